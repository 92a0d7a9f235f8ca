"""Copies of the model that add up the gradients of their own micro-batches train as one device does."""

import dataclasses
import json

import meshes
import pytest

from affinage.model import parse
from affinage.parallel.choice import call_on
from affinage.planning.compiled import collectives_in, loops_of
from affinage.recipe.parallel import ParallelSettings
from affinage.training.step import replicas_of


def with_dropout(model):
    described = model.to_dict()
    described["nodes"]["blocks"]["dropout"] = 0.1
    return parse(json.loads(json.dumps(described)))


DENSE = with_dropout(meshes.graph("dense"))  # packed documents, masks of very different sums


@pytest.mark.parametrize(
    ("sizes", "looped"),
    [
        ({"data": 4}, set()),
        # Weights are gathered and gradients scattered in every micro-batch, keys and values sent; the rest is not.
        ({"data": 2, "fsdp": 2}, None),
        ({"data": 2, "context": 2, "tensor": 2}, None),
    ],
    ids=str,
)
def test_replicas_with_sums_of_their_own_are_one_training(sizes, looped):
    one = meshes.program(DENSE, sizes, micro_batches=2, parallel={})
    assert replicas_of(DENSE, one.call) == sizes["data"]
    meshes.assert_same_as_on_one_device(one, 20)
    if looped is not None:
        program = one.compile_training().as_text()
        assert set(collectives_in(loops_of(program))) == looped
        assert collectives_in(program)["all-reduce"]


@pytest.mark.parametrize(
    ("model", "sizes", "parallel", "attention"),
    [
        (meshes.graph("moe"), {"data": 2}, {}, "auto"),
        (DENSE, {"data": 2, "context": 2}, {"context_attention": "ring"}, "auto"),
        (DENSE, {"data": 2, "pipeline": 2}, {}, "auto"),
        (DENSE, {"data": 2}, {"sharding": {"embed": ["data", "fsdp"]}}, "auto"),
        (DENSE, {"data": 2}, {}, "cudnn"),
    ],
    ids=["experts", "ring", "pipeline", "weights-over-data", "cudnn"],
)
def test_devices_go_together_where_replicas_cannot_be_alone(model, sizes, parallel, attention):
    one = meshes.program(model, sizes, micro_batches=2, parallel=parallel)
    asked = call_on(one.layout, attention, ParallelSettings.model_validate(parallel))
    assert replicas_of(model, dataclasses.replace(one.call, attention=attention)) == 1 == replicas_of(model, asked)


@pytest.mark.parametrize(("net", "hidden", "copies"), [("mlp", 16, 2), ("conv", 4, 1)])
def test_convolutions_go_together(net, hidden, copies):
    """XLA would gather the images of all copies: it does not divide the gradients of their kernels."""
    nodes = {
        "views": {"kind": "augment", "in": "images", "views": 2},
        "encoder": {"kind": "encoder", "in": "views", "net": net, "hidden": [hidden], "width": 8},
        "constant": {"kind": "stop_gradient", "in": "encoder"},
        "loss": {"kind": "cosine_regression_loss", "in": ["encoder", "constant"]},
    }
    model = parse({"inputs": {"images": [8, 8, 1]}, "nodes": nodes})
    assert replicas_of(model, meshes.program(DENSE, {"data": 2}, micro_batches=2, parallel={}).call) == copies


def test_a_ring_in_micro_batches_over_replicas_trains_as_one_device():
    parallel = {"context_attention": "ring"}
    meshes.assert_same_as_on_one_device(
        meshes.program(DENSE, {"data": 2, "context": 2}, micro_batches=2, parallel=parallel), 20
    )
