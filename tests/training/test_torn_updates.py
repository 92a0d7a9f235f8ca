"""Layers updated one by one: a gradient that is not finite below layers that are updated already is gone back from."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny

from affinage.checkpoint import CheckpointStore
from affinage.model import Graph, parse
from affinage.model.kind import KINDS, Context, NodeKind, node_kind
from affinage.recipe.training import HealthSettings
from affinage.training import TrainJob, train
from affinage.training.health import Health, Incurable

SICK = 8  # the step, counted from 1


@jax.custom_vjp
def times_on_the_way_back(x: jax.Array, factors: jax.Array) -> jax.Array:
    return x


times_on_the_way_back.defvjp(
    lambda x, factors: (x, factors), lambda factors, gradient: (gradient * factors[:, None, None], None)
)


@pytest.fixture(autouse=True)
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


def graph() -> Graph:
    described = json.loads(json.dumps(tiny.graph(layers=2).to_dict()))
    nodes = described["nodes"]
    for name, before, after in (("below", "drop", "blocks"), ("above", "blocks", "norm")):
        nodes[name] = {"kind": "sick_on_the_way_back", "in": before, "factors": name}
        nodes[after]["in"] = name
    return parse(described)


class Feed(tiny.RandomFeed):
    """The batch of the sick step has a loss that is not finite, or a gradient, above the layers or only below them."""

    def __init__(self, sick: str) -> None:
        super().__init__()
        self._sick = sick

    def batch(self, step: int) -> dict[str, np.ndarray]:
        batch = super().batch(step) | {name: np.ones(self.rows, np.float32) for name in ("above", "below")}
        if step + 1 == SICK:
            name = "loss_mask" if self._sick == "loss" else self._sick
            batch[name] = np.full_like(batch[name], np.nan)
        return batch


def trained(folder: Path, sick: str) -> tuple[dict[str, Any], list[bytes]]:
    """The summary, and the bits of the last checkpoint."""
    settings = tiny.settings(12, update="layerwise", checkpoint={"every_steps": 5})
    job = TrainJob(graph=graph(), settings=settings, mesh={"data": 1}, seed=1, feed=Feed(sick), folder=folder)
    summary = train(job)
    state = CheckpointStore(folder / "checkpoints").restore(12, {"params": None, "opt_state": None})
    return summary, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def test_a_gradient_that_comes_too_late_to_leave_all_out_is_as_if_the_batch_had_not_been_there(tmp_path: Path):
    left_out, bits = trained(tmp_path / "loss", "loss")
    above, equal = trained(tmp_path / "above", "above")
    torn, same = trained(tmp_path / "below", "below")
    for found in (left_out, above):  # no layer was updated
        assert found["skipped_updates"] == 1 and found["health"]["rewinds"] == []
    assert torn["health"]["rewinds"] == [[SICK, 5]] and torn["health"]["left_out"] == [SICK]
    assert same == equal == bits
    lines = (tmp_path / "below" / "health.jsonl").read_text().splitlines()
    (event,) = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert event["done"] == "rewound to 5" and np.isfinite(event["loss"]) and event["grad_norm"] is None


def test_where_it_has_gone_back_too_often_it_stops(tmp_path: Path):
    ten = {"rewinds": [[step, step - 1] for step in range(1, 11)]}
    health = Health(HealthSettings(most_in_a_row=99, most=99), tmp_path, 0, ten)
    health.look(30, {"skipped": 1.0, "loss": float("nan"), "grad_norm": float("nan")})  # all of it was left out
    with pytest.raises(Incurable, match="after 10 ways back"):
        health.look(40, {"skipped": 1.0, "torn": 1.0, "loss": 2.0, "grad_norm": float("nan")})
