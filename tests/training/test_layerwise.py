"""Layers that are updated one by one are updated as together, wherever the mathematics is the same."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import tiny
from affinage.config.training import ParallelSettings
from affinage.errors import UserError
from affinage.model import parse

STEPS = 3
SPLIT_SEQUENCE = {"sharding": {"batch": ["data"], "sequence": ["fsdp"], "residual": ["fsdp", "tensor"]}}


def job(
    in_backward: bool, mesh=None, parallel=None, tied: str | bool = False, block=None, clip: float = 1e9, **changed: Any
):
    graph = tiny.graph().to_dict()
    graph["nodes"]["blocks"] |= block or {}
    graph["nodes"]["logits"] = {"kind": "unembed", "in": "norm", "tied": tied}
    if not tied:
        graph["nodes"]["logits"]["vocab"] = tiny.VOCABULARY
    return tiny.job(
        Path("unused"),
        graph=parse(graph),
        mesh=mesh or {"data": 1},
        parallel=ParallelSettings.model_validate(parallel or {}),
        optimizer_in_backward=in_backward,
        optimizer={"max_grad_norm": clip, **changed.pop("optimizer", {})},
        **changed,
    )


@pytest.mark.parametrize(
    ("mesh", "parallel", "changed"),
    [
        ({"data": 1}, {}, {"tied": "embed", "block": {"dropout": 0.1}, "optimizer": {"state_dtype": "bfloat16"}}),
        pytest.param({"fsdp": 2, "tensor": 2}, SPLIT_SEQUENCE, {}, marks=pytest.mark.full),
    ],
    ids=["tied, dropout", "split over four"],
)
def test_it_is_the_plain_step_where_nothing_is_clipped(mesh, parallel, changed):
    (before, plain), (after, ours) = (
        tiny.steps_of(job(update, mesh, parallel, **dict(changed)), STEPS) for update in (False, True)
    )
    for one, other in zip(plain, ours, strict=True):
        assert other.pop("torn") == 0.0 and one.keys() == other.keys()
        for name in one:
            assert other[name] == pytest.approx(one[name], rel=2e-5), name
    for one, other in zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True):
        np.testing.assert_allclose(other, one, atol=2e-4 if changed else 1e-5)
        assert other.sharding == one.sharding


@pytest.mark.full
def test_each_layer_is_clipped_by_its_own_norm():
    layerwise, whole = (tiny.steps_of(job(update, clip=1e-3), 2)[1] for update in (True, False))
    assert layerwise[0]["grad_norm"] == pytest.approx(whole[0]["grad_norm"], rel=1e-5)  # before clipping
    assert layerwise[1]["loss"] != whole[1]["loss"]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps"),
        ({"optimizer": {"name": "sgd"}}, "sgd"),
        ({"block": {"ffn": {"kind": "moe", "experts": 4, "top_k": 2, "width": 16}}}, "mixture of experts"),
    ],
)
def test_what_it_does_not_go_with_is_refused(changed: dict, why: str):
    with pytest.raises(UserError, match=why):
        tiny.compiled(job(True, **changed))
