"""What is not finite, in the values or the gradients around the layers, and spikes: the update is left out."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import tiny
from affinage.model import Graph, parse
from affinage.model.layer import LAYERS, Layer, LayerContext, register_layer
from affinage.training import TrainJob

SITES = {"below": ("drop", "blocks"), "above": ("blocks", "norm")}  # the layers, and the nodes between which it is
INJECTIONS = [*itertools.product(SITES, ("value", "gradient"), (np.nan, np.inf, -np.inf))]


@jax.custom_vjp
def poisoned(x: jax.Array, value: jax.Array, gradient: jax.Array) -> jax.Array:
    return x + value


poisoned.defvjp(lambda x, value, gradient: (x + value, gradient), lambda gradient, g: (g + gradient, None, None))


@pytest.fixture(scope="module", autouse=True)
def sick_kind() -> Iterator[None]:
    """A node that adds what the batch says to a value and to its gradient."""

    @register_layer("sick")
    class Sick(Layer):
        site: str

        def shape(self, inputs: tuple[Any, ...]) -> Any:
            return inputs[0]

        def apply(self, params: Any, inputs: tuple[Any, ...], context: LayerContext) -> jax.Array:
            of = [context.batch[f"{self.site} {way}"][:, None, None] for way in ("value", "gradient")]
            return poisoned(inputs[0], *(each.astype(inputs[0].dtype) for each in of))

    yield
    del LAYERS["sick"]


def graph(layers: int) -> Graph:
    nodes = tiny.graph(layers=layers).to_dict()["nodes"]
    for site, (before, after) in SITES.items():
        nodes[site] = {"kind": "sick", "in": before, "site": site}
        nodes[after] |= {"in": site}
    return parse({"inputs": ["tokens"], "nodes": nodes})


class Feed(tiny.RandomFeed):
    """Sick in one row of the named steps, counted from 0: in the mask of the loss, or as of `INJECTIONS`."""

    def __init__(self, sick: dict[int, tuple | str]) -> None:
        super().__init__()
        self.sick = sick

    def batch(self, step: int) -> dict[str, np.ndarray]:
        batch = super().batch(step)
        batch |= {f"{site} {way}": np.zeros(self.rows, np.float32) for site in SITES for way in ("value", "gradient")}
        match self.sick.get(step):
            case "loss":
                batch["loss_mask"] = np.full_like(batch["loss_mask"], np.nan)
            case (site, way, value):
                batch[f"{site} {way}"][step % self.rows] = value
        return batch


def job(folder: Path, feed: Feed, layers: int = 1, **changes: Any) -> TrainJob:
    return tiny.job(folder, graph=graph(layers), feed=feed, **changes)


@pytest.fixture(scope="module")
def room() -> tuple[Any, Any, Feed]:
    """A program, its compiled step, and a feed that makes every second batch sick."""
    feed = Feed({2 * at + 1: sick for at, sick in enumerate(INJECTIONS)})
    changes = {"precision": {"params": "bfloat16"}, "health": {"spike_window": 16, "on_spike": "skip"}}
    return *tiny.compiled(job(Path("unused"), feed, **changes)), feed


def bits(state: Any) -> list[bytes]:
    return tiny.bits((state.params, state.opt_state))


def test_a_sick_batch_leaves_nothing_behind_wherever_it_is_sick(room):
    program, step, feed = room
    state, well = program.begin(), program.begin()
    for number in range(2 * len(INJECTIONS)):
        before = bits(state)
        state, metrics = step(state, program.put(feed.batch(number)))
        sick = feed.sick.get(number)
        assert bool(metrics["skipped"]) == (bits(state) == before) == bool(sick), sick
        if sick:
            well = well._replace(step=jax.device_put(well.step + 1, well.step.sharding))
        else:
            well, _ = step(well, program.put(feed.batch(number)))
    assert bits(well) == bits(state)
