"""Twenty steps have the same losses and gradient norms on every mesh as on one device: every axis, every pair."""

import itertools

import meshes
import pytest

AXES = ("data", "fsdp", "tensor", "expert", "context")
DENSE = meshes.graph("dense")
MOE = meshes.graph("moe")  # with a dense layer beside the experts: one compilation shows both


@pytest.mark.parametrize("axis", AXES)
def test_every_axis_alone(axis: str):
    meshes.assert_same_as_on_one_device(meshes.program(DENSE, {axis: 2}, parallel={}), 20)


@pytest.mark.parametrize("axes", itertools.combinations(AXES, 2), ids="-".join)
def test_every_pair_of_axes(axes: tuple[str, str]):
    meshes.assert_same_as_on_one_device(meshes.program(MOE, dict.fromkeys(axes, 2), parallel={}), 20)


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


@pytest.mark.parametrize("capacity_factor", [None, 1.0], ids=["dropless", "capacity"])
def test_accumulated_experts_over_their_axis(capacity_factor: float | None):
    model = meshes.graph("moe", capacity_factor=capacity_factor)
    one = meshes.program(model, {"data": 2, "expert": 2}, micro_batches=2, parallel={})
    meshes.assert_same_as_on_one_device(one, 20)
    text = one.compile_training().as_text()
    assert "all-to-all" in text
