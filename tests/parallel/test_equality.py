"""Twenty steps have the same losses and gradient norms on every mesh as on one device: every axis, every pair."""

import itertools
import re

import meshes
import numpy as np
import pytest

from affinage.errors import UserError
from affinage.model.kinds import loss

AXES = ("data", "fsdp", "tensor", "expert", "context", "pipeline")
# What eight devices divide, but for the layers: only the pipeline alone has eight stages, which take long to compile.
MODELS = {"dense": meshes.graph("dense", heads=8), "moe": meshes.graph("moe", heads=8, experts=8)}
STAGES = {"dense": meshes.graph("dense", 8), "moe": meshes.graph("moe", 8)}
DENSE, MOE = MODELS["dense"], MODELS["moe"]
ROWS = 16


@pytest.mark.parametrize("micro_batches", [1, 2], ids=["whole", "accumulated"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("axis", AXES)
def test_every_axis_alone(axis: str, kind: str, micro_batches: int):
    model = (STAGES if axis == "pipeline" else MODELS)[kind]
    one = meshes.program(model, {axis: 8}, micro_batches=micro_batches, rows=ROWS, parallel={})
    meshes.assert_same_as_on_one_device(one, 20)


PAIRS = list(itertools.combinations(AXES, 2))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("axes", PAIRS, ids="-".join)
def test_every_pair_of_axes(axes: tuple[str, str], kind: str):
    sizes = dict(zip(axes, (4, 2), strict=True))
    micro_batches = 1 + (PAIRS.index(axes) + (kind == "moe")) % 2  # one model accumulates, the other does not
    one = meshes.program(MODELS[kind], sizes, micro_batches=micro_batches, rows=ROWS, parallel={})
    meshes.assert_same_as_on_one_device(one, 20)


ON_THE_SEQUENCE = {"batch": ["data"], "sequence": ["fsdp", "context"], "residual": ["fsdp", "context", "tensor"]}


@pytest.mark.parametrize(
    ("sizes", "parallel", "more"),
    [
        ({"context": 4}, {"context_attention": "ring"}, {}),
        # A window of 10 over parts of 8 positions: two of the three turns of the ring.
        ({"context": 4, "tensor": 2}, {"context_attention": "ring"}, {"window": 10}),
        # Norms and residual sums over parts of the sequence beside tensor parallelism.
        ({"tensor": 4}, {"sharding": {"residual": ["context", "tensor"]}}, {}),
        # One row: weights are split over devices that share no row of the batch.
        ({"fsdp": 2, "context": 2, "tensor": 2}, {"sharding": ON_THE_SEQUENCE}, {"rows": 1}),
        ({"fsdp": 2, "context": 2}, {"sharding": ON_THE_SEQUENCE, "context_attention": "ring"}, {"rows": 1}),
    ],
    ids=["ring", "ring-window", "sequence-sharded-norms", "one-row", "one-row-ring"],
)
def test_sequences_split_in_other_ways(sizes: dict, parallel: dict, more: dict):
    model = meshes.graph("dense", window=more.pop("window", None))
    meshes.assert_same_as_on_one_device(meshes.program(model, sizes, parallel=parallel, **more), 20)


@pytest.mark.parametrize("sizes", [{"fsdp": 2}, {"tensor": 2}, {"context": 2}], ids=str)
def test_a_loss_in_parts_on_one_device_is_whole_where_devices_share_the_logits(sizes: dict, monkeypatch):
    monkeypatch.setattr(loss, "WHOLE_BYTES", meshes.ROWS * meshes.CONTEXT * meshes.VOCABULARY * 4 // 2)
    monkeypatch.setattr(loss, "AUTO_CHUNK", 10)
    alone, shared = (meshes.program(DENSE, on, parallel={}) for on in ({"data": 1}, sizes))
    tokens = meshes.ROWS * meshes.CONTEXT
    chunks = [loss.auto_chunk(tokens, meshes.VOCABULARY, one.layout) for one in (alone, shared)]
    assert chunks == [10, 0]
    expected = meshes.run(alone, 20)
    for name, values in meshes.run(shared, 20).items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("capacity_factor", [None, 1.0], ids=["dropless", "capacity"])
def test_accumulated_experts_over_their_axis(capacity_factor: float | None):
    model = meshes.graph("moe", capacity_factor=capacity_factor)
    one = meshes.program(model, {"data": 2, "expert": 2}, micro_batches=4, rows=ROWS, parallel={})
    meshes.assert_same_as_on_one_device(one, 20)


@pytest.mark.parametrize(
    ("sizes", "parallel", "more"),
    [
        ({"pipeline": 4}, {"pipeline_micro_batches": 2}, {}),  # fewer micro-batches than stages
        ({"pipeline": 2}, {"pipeline_rounds": 2, "pipeline_micro_batches": 4}, {}),
        ({"pipeline": 2}, {"pipeline_rounds": 2, "remat": "dots"}, {}),
        ({"pipeline": 2, "data": 2, "tensor": 2}, {"remat": "block"}, {"micro_batches": 2}),
        ({"pipeline": 2, "tensor": 2}, {"sharding": {"vocab": ["tensor", "pipeline"]}}, {}),
    ],
    ids=["few", "rounds", "rounds-computed-again", "three-axes", "vocabulary-over-stages"],
)
def test_pipelines(sizes: dict, parallel: dict, more: dict):
    meshes.assert_same_as_on_one_device(meshes.program(MOE, sizes, parallel=parallel, **more), 20)


@pytest.mark.parametrize(
    ("sizes", "parallel", "said"),
    [
        ({"pipeline": 3}, {}, r"4 layers of `blocks` do not divide into 3 stages.*`repeat: 3 or 6`.*1 or 2 or 4"),
        ({"pipeline": 2}, {"pipeline_rounds": 4}, "2 stages of 4 rounds.*`repeat: 8`"),
        ({"pipeline": 2}, {"pipeline_micro_batches": 3}, "3 micro-batches.*`pipeline_micro_batches` to 2 or 4"),
        ({"pipeline": 2, "context": 2}, {"context_attention": "ring"}, "does not go through a pipeline"),
        ({"context": 3}, {}, "context of 32 does not divide.*30, 33"),
        ({"fsdp": 3}, {}, r"batch 8 does not divide.*6, 9"),
        ({"fsdp": 2}, {"sharding": {"sequence": ["fsdp"]}}, "both `batch` and `sequence`"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_with_what_would(sizes: dict, parallel: dict, said: str):
    with pytest.raises(UserError, match=re.compile(said, re.DOTALL)):
        meshes.program(DENSE, sizes, parallel=parallel)
