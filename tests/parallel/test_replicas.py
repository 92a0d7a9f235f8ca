"""Copies of the model that add up the gradients of their own micro-batches train as one device does."""

import meshes
import pytest

from affinage.model import parse
from affinage.planning.compiled import collectives_in, loops_of
from affinage.training.step import replicas_of


def with_dropout(model):
    described = model.to_dict()
    nodes = described["nodes"] | {"blocks": {**described["nodes"]["blocks"], "dropout": 0.1}}
    return parse({**described, "nodes": nodes})


DENSE = with_dropout(meshes.graph("dense", layers=2))  # packed documents, masks of very different sums


@pytest.mark.parametrize(
    ("sizes", "parallel", "looped"),
    [
        ({"data": 2}, {}, []),
        # Weights are gathered and gradients scattered in every micro-batch, keys and values sent; the rest is not.
        pytest.param({"data": 2, "context": 2, "tensor": 2}, {}, None, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_replicas_with_sums_of_their_own_are_one_training(sizes, parallel, looped):
    one = meshes.program(DENSE, sizes, micro_batches=2, parallel=parallel)
    step = meshes.compiled(one)
    meshes.assert_same_as_on_one_device(one, 3, step)
    if looped is not None:
        assert replicas_of(DENSE, one.apply_config) == sizes["data"]
        assert list(collectives_in(loops_of(step.as_text()))) == looped
        assert collectives_in(step.as_text())["all-reduce"]
