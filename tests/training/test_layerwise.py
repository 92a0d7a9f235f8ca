"""Layers that are updated one by one are updated as together, wherever the mathematics is the same."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny

from affinage.errors import UserError
from affinage.model import parse
from affinage.model.kind import KINDS, Context, NodeKind, node_kind
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


@jax.custom_vjp
def times_on_the_way_back(x: jax.Array, factors: jax.Array) -> jax.Array:
    return x


times_on_the_way_back.defvjp(
    lambda x, factors: (x, factors), lambda factors, gradient: (gradient * factors[:, None, None], None)
)


@pytest.fixture
def sick_kind() -> Iterator[None]:
    @node_kind("sick_on_the_way_back")
    class Sick(NodeKind):
        factors: str  # of each row, in the batch

        def shape(self, inputs: tuple[Any, ...]) -> Any:
            return inputs[0]

        def apply(self, params: Any, inputs: tuple[Any, ...], context: Context) -> jax.Array:
            return times_on_the_way_back(inputs[0], context.batch[self.factors])

    yield
    del KINDS["sick_on_the_way_back"]


class SickFeed(tiny.RandomFeed):
    """The batch of the sick step has a loss that is not finite, or a gradient, above the layers or only below them."""

    def __init__(self, sick: str) -> None:
        super().__init__()
        self._sick = sick

    def batch(self, step: int) -> dict[str, np.ndarray]:
        batch = super().batch(step) | {name: np.ones(self.rows, np.float32) for name in ("above", "below")}
        if step + 1 == SICK:
            batch[self._sick] = np.full_like(batch[self._sick], np.nan)
        return batch


def test_a_gradient_that_comes_too_late_to_leave_all_out_is_as_if_the_batch_had_not_been_there(
    tmp_path: Path, sick_kind: None
):
    graph, found, ends = tiny.graph(layers=2).to_dict(), {}, {}
    for name, before, after in (("below", "drop", "blocks"), ("above", "blocks", "norm")):
        graph["nodes"][name] = {"kind": "sick_on_the_way_back", "in": before, "factors": name}
        graph["nodes"][after] = graph["nodes"][after] | {"in": name}
    for sick in ("loss_mask", "above", "below"):
        found[sick] = train(tiny.job(tmp_path / sick, graph=parse(graph), feed=SickFeed(sick), update="layerwise"))
        ends[sick] = tiny.saved_bits(tmp_path / sick, 10, "params", "opt_state")
    for sick in ("loss_mask", "above"):  # no layer was updated
        assert found[sick]["skipped_updates"] == 1 and found[sick]["health"]["rewinds"] == []
    assert found["below"]["health"]["rewinds"] == [[SICK, 5]] and found["below"]["health"]["left_out"] == [SICK]
    assert ends["below"] == ends["above"] == ends["loss_mask"]
    (event,) = tiny.lines(tmp_path / "below", "health.jsonl")
    assert event["done"] == "rewound to 5" and np.isfinite(event["loss"]) and event["grad_norm"] is None
