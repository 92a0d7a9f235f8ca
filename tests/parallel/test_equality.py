"""Steps have the same losses and gradient norms on every mesh as on one device.

The quick tier takes each axis alone over two devices, and what splits a step in a way of its own. `full` has every
axis over eight devices, and every pair of axes, with and without accumulation, over twenty steps.
"""

import itertools
import math
import re

import jax
import meshes
import numpy as np
import pytest

from affinage.model import parse
from affinage.planning.compiled import collectives_in
from affinage.training.step import replicas_of
from run_affinage import refused

AXES = ("data", "fsdp", "tensor", "expert", "context", "pipeline")
# What eight devices divide, but for the layers: only the pipeline alone has eight stages, which take long to compile.
MODELS = {"dense": meshes.graph("dense", heads=8), "moe": meshes.graph("moe", heads=8, experts=8)}
STAGES = {"dense": meshes.graph("dense", 8), "moe": meshes.graph("moe", 8)}
SMALL = {"dense": meshes.graph("dense", 2), "moe": meshes.graph("moe", 2)}
ROWS = 16
RING = {"context_attention": "ring"}
ON_THE_SEQUENCE = {"batch": ["data"], "sequence": ["fsdp", "context"], "residual": ["fsdp", "context", "tensor"]}


@pytest.mark.parametrize(
    ("kind", "sizes", "parallel", "sent"),
    [
        pytest.param("dense", {"data": 2}, {}, "all-reduce", marks=pytest.mark.full),
        ("dense", {"fsdp": 2}, {}, "all-gather all-reduce"),
        ("dense", {"tensor": 2}, {}, "all-reduce"),
        ("dense", {"context": 2}, {}, "all-gather all-reduce"),
        ("dense", {"context": 2}, RING, "all-reduce collective-permute"),
        ("moe", {"expert": 2}, {}, "all-gather all-reduce all-to-all"),
        ("dense", {"pipeline": 2}, {}, "all-gather all-reduce collective-permute"),
    ],
    ids=str,
)
def test_an_axis_of_two_sends_what_it_needs_and_computes_the_same(kind, sizes, parallel, sent):
    one = meshes.program(SMALL[kind], sizes, parallel=parallel)
    step = meshes.compiled(one)
    meshes.assert_same_as_on_one_device(one, 3, step)
    assert set(collectives_in(step.as_text())) == set(sent.split())
    # The gradient of looked-up vectors is added up where their rows are: embedding and head are not on every stage.
    assert not re.search(r" all-gather\(.*transpose\(jvp\(embed\)\)", step.as_text())
    # The new state is written where the old one is: memory is planned so.
    state = jax.tree.leaves(one.abstract)
    bytes_of_a_device = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in state)
    assert step.memory_analysis().alias_size_in_bytes >= bytes_of_a_device


def test_replicas_with_sums_of_their_own_are_one_training():
    """They add up the gradients of their own micro-batches, and nothing is sent in between."""
    described = SMALL["dense"].to_dict()
    nodes = described["nodes"] | {"blocks": {**described["nodes"]["blocks"], "dropout": 0.1}}
    one = meshes.program(parse({**described, "nodes": nodes}), {"data": 2}, micro_batches=2, parallel={})
    step = meshes.compiled(one)
    meshes.assert_same_as_on_one_device(one, 3, step)
    assert replicas_of(one.job.graph, one.apply_config) == 2
    assert not collectives_in(meshes.loops_of(step.as_text())) and collectives_in(step.as_text())["all-reduce"]


SPLITS: list[dict[str, int]] = [{axis: 8} for axis in AXES]
SPLITS += [dict(zip(axes, (4, 2), strict=True)) for axes in itertools.combinations(AXES, 2)]


@pytest.mark.full
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_every_axis_alone_and_every_pair(sizes: dict[str, int], kind: str):
    model = (STAGES if sizes == {"pipeline": 8} else MODELS)[kind]
    micro_batches = 1 + (SPLITS.index(sizes) + (kind == "moe")) % 2  # one model accumulates, the other does not
    one = meshes.program(model, sizes, micro_batches=micro_batches, rows=ROWS, parallel={})
    meshes.assert_same_as_on_one_device(one, 20)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "sizes", "parallel", "more"),
    [
        # A window of 10 over parts of 8 positions: two of the three turns of the ring.
        ("window", {"context": 4, "tensor": 2}, RING, {}),
        # One row: weights are split over devices that share no row of the batch.
        ("dense", {"fsdp": 2, "context": 2, "tensor": 2}, {"sharding": ON_THE_SEQUENCE}, {"rows": 1}),
        ("capacity", {"data": 2, "expert": 2}, {}, {"micro_batches": 4, "rows": ROWS}),
        ("dense", {"pipeline": 2, "context": 2, "data": 2}, RING, {}),
        ("moe", {"pipeline": 2}, {"pipeline_rounds": 2, "remat": "dots"}, {}),
        ("moe", {"pipeline": 2, "data": 2, "tensor": 2}, {"remat": "block"}, {"micro_batches": 2}),
    ],
    ids=str,
)
def test_what_is_split_in_other_ways(kind: str, sizes: dict, parallel: dict, more: dict):
    model = {"window": meshes.graph("dense", window=10), "capacity": meshes.graph("moe", capacity_factor=1.0)}
    one = meshes.program(model.get(kind, MODELS.get(kind)), sizes, parallel=parallel, **more)
    meshes.assert_same_as_on_one_device(one, 20)


@pytest.mark.full
def test_a_pipeline_in_bfloat16_computes_what_one_device_does():
    """On processors, XLA's compiler can end the process over a pipeline's sums in bfloat16."""
    low = {"parallel": {}, "precision": {"compute": "bfloat16"}}
    found, expected = (meshes.run(meshes.program(SMALL["dense"], sizes, **low), 5) for sizes in ({"pipeline": 2}, {}))
    np.testing.assert_allclose(found, expected, rtol=2e-2)


@pytest.mark.parametrize(
    ("sizes", "parallel", "named"),
    [
        ({"pipeline": 3}, {}, r"4 layers of `blocks`.*3 stages.*`repeat: 3 or 6`"),
        ({"pipeline": 2}, {"pipeline_rounds": 4}, "2 stages of 4 rounds.*`repeat: 8`"),
        ({"pipeline": 2}, {"pipeline_micro_batches": 3}, "3 micro-batches.*2 or 4"),
        ({"context": 3}, {}, "context of 32.*30 or 33"),
        ({"fsdp": 3}, {}, "batch 8.*6 or 9"),
        ({"fsdp": 2}, {"sharding": {"sequence": ["fsdp"]}}, "`batch` and `sequence`"),
        ({"data": 16}, {}, "data 16 .* 8 devices"),
        ({"data": "auto", "tensor": 3}, {}, "divide the 8"),
        ({"data": "auto", "fsdp": "auto"}, {}, "one axis"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_with_what_would(sizes: dict, parallel: dict, named: str):
    assert refused(meshes.program, meshes.graph("dense"), sizes, parallel=parallel, match=f"(?s){named}").where


REMATS = ["block", {"keep": ["query", "ffn_up"]}, pytest.param("dots", marks=pytest.mark.full)]


@pytest.mark.parametrize("remat", REMATS, ids=str)
def test_the_step_is_the_same_with_less_memory(remat):
    plain, one = (meshes.program(SMALL["dense"], {"data": 1}, parallel=parallel) for parallel in ({}, {"remat": remat}))
    step = meshes.compiled(one)
    meshes.assert_same_as_on_one_device(one, 3, step)
    less, more = (program.memory_analysis().temp_size_in_bytes for program in (step, meshes.compiled(plain)))
    assert less < more


def test_an_option_that_xla_does_not_have_is_refused():
    program = meshes.program(SMALL["dense"], {"data": 1}, parallel={"xla_flags": {"xla_cpu_faster": True}})
    assert refused(program.compile_training, match="'xla_cpu_faster'").fix
