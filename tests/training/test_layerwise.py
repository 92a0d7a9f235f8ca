"""Layers that are updated one by one are updated as together, wherever the mathematics is the same."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from sick_layers import INJECTIONS, sick_kind

from affinage.errors import UserError
from affinage.model import parse
from affinage.recipe.parallel import ParallelSettings
from affinage.training import train

SICK = 8  # the step, counted from 1
STEPS = 3
SPLIT_SEQUENCE = {"sharding": {"batch": ["data"], "sequence": ["fsdp"], "residual": ["fsdp", "tensor"]}}


def job(update: str, mesh=None, parallel=None, tied: str | bool = False, block=None, clip: float = 1e9, **changed: Any):
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
        update=update,
        optimizer={"clip_norm": clip, **changed.pop("optimizer", {})},
        **changed,
    )


@pytest.mark.parametrize(
    ("mesh", "parallel", "changed"),
    [
        ({"fsdp": 2}, {}, {"tied": "embed", "optimizer": {"moments": "bfloat16"}}),
        pytest.param({"fsdp": 2, "tensor": 2}, SPLIT_SEQUENCE, {}, marks=pytest.mark.full),
        pytest.param(
            {"data": 1},
            {},
            {"tied": "embed", "block": {"dropout": 0.1}, "optimizer": {"name": "lion"}},
            marks=pytest.mark.full,
        ),
    ],
    ids=["tied, split over two", "split over four", "tied, dropout, lion"],
)
def test_it_is_the_plain_step_where_nothing_is_clipped(mesh, parallel, changed):
    (before, plain), (after, ours) = (
        tiny.steps_of(job(update, mesh, parallel, **dict(changed)), STEPS) for update in ("whole", "layerwise")
    )
    for one, other in zip(plain, ours, strict=True):
        assert other.pop("torn") == 0.0 and one.keys() == other.keys()
        for name in one:
            assert other[name] == pytest.approx(one[name], rel=2e-5), name
    assert jax.tree.structure(before) == jax.tree.structure(after)
    if "name" not in changed.get("optimizer", {}):  # a sign turns rounding into a whole step
        for one, other in zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True):
            np.testing.assert_allclose(other, one, atol=2e-4 if changed else 1e-5)
            assert other.sharding == one.sharding


@pytest.mark.full
def test_each_layer_is_clipped_by_its_own_norm():
    layerwise, whole = (tiny.steps_of(job(update, clip=1e-3), 2)[1] for update in ("layerwise", "whole"))
    assert layerwise[0]["grad_norm"] == pytest.approx(whole[0]["grad_norm"], rel=1e-5)  # before clipping
    assert layerwise[1]["loss"] != whole[1]["loss"]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"micro_batches": 2}, "micro_batches"),
        ({"optimizer": {"name": "muon"}}, "muon"),
        ({"block": {"ffn": {"kind": "moe", "experts": 4, "top_k": 2, "width": 16}}}, "mixture of experts"),
        ({"parallel": {"remat": "dots"}}, "dots"),
    ],
)
def test_what_it_does_not_go_with_is_refused(changed: dict, why: str):
    with pytest.raises(UserError, match=why):
        tiny.compiled(job("layerwise", **changed))


# ---- a gradient that is not finite below layers that are updated already


class SickFeed(tiny.RandomFeed):
    """The batch of the sick step has a loss that is not finite, or a gradient, above the layers or only below them."""

    def __init__(self, sick: str) -> None:
        super().__init__()
        self._sick = sick

    def batch(self, step: int) -> dict[str, np.ndarray]:
        batch = super().batch(step) | {"sick": np.zeros(self.rows, np.int32)}
        if step + 1 == SICK and self._sick == "loss":
            batch["loss_mask"] = np.full_like(batch["loss_mask"], np.nan)
        elif step + 1 == SICK:
            batch["sick"][0] = 1 + INJECTIONS.index((0 if self._sick == "below" else 1, "gradient", "NaN"))
        return batch


def test_a_gradient_that_comes_too_late_to_leave_all_out_is_as_if_the_batch_had_not_been_there(tmp_path: Path):
    graph, found, ends = tiny.graph(layers=2).to_dict(), {}, {}
    for site, before, after in ((0, "drop", "blocks"), (1, "blocks", "norm")):
        graph["nodes"][f"sick{site}"] = {"kind": "sick", "in": before, "site": site}
        graph["nodes"][after] = graph["nodes"][after] | {"in": f"sick{site}"}
    with sick_kind():
        for sick in ("loss", "above", "below"):
            found[sick] = train(tiny.job(tmp_path / sick, graph=parse(graph), feed=SickFeed(sick), update="layerwise"))
            ends[sick] = tiny.saved_bits(tmp_path / sick, 10, "params", "opt_state")
    for sick in ("loss", "above"):  # no layer was updated
        assert found[sick]["skipped_updates"] == 1 and found[sick]["health"]["rewinds"] == []
    assert found["below"]["health"]["rewinds"] == [[SICK, 5]] and found["below"]["health"]["left_out"] == [SICK]
    assert ends["below"] == ends["above"] == ends["loss"]
    (event,) = tiny.lines(tmp_path / "below", "health.jsonl")
    assert event["done"] == "rewound to 5" and np.isfinite(event["loss"]) and event["grad_norm"] is None
