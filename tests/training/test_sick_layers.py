"""What is not finite, in the values or the gradients around the layers, and spikes: the update is left out."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import tiny
from affinage.model import parse
from affinage.model.layer import LAYERS, Layer, LayerContext, register_layer

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


class Feed(tiny.RandomFeed):
    """Every second step is sick in one row, as of `INJECTIONS`."""

    def batch(self, step: int) -> dict[str, np.ndarray]:
        batch = super().batch(step)
        batch |= {f"{site} {way}": np.zeros(self.rows, np.float32) for site in SITES for way in ("value", "gradient")}
        if step % 2:
            site, way, value = INJECTIONS[step // 2]
            batch[f"{site} {way}"][step % self.rows] = value
        return batch


def bits(state: Any) -> list[bytes]:
    return tiny.bits((state.params, state.opt_state))


def test_a_sick_batch_leaves_nothing_behind_wherever_it_is_sick():
    nodes = tiny.graph(layers=1).to_dict()["nodes"]
    for site, (before, after) in SITES.items():
        nodes[site] = {"kind": "sick", "in": before, "site": site}
        nodes[after] |= {"in": site}
    changes = {"precision": {"params": "bfloat16"}, "health": {"spike_window": 16, "on_spike": "skip"}}
    feed, graph = Feed(), parse({"inputs": ["tokens"], "nodes": nodes})
    program, step = tiny.compiled(tiny.job(Path("unused"), graph=graph, feed=feed, **changes))
    state, well = program.begin(), program.begin()
    for number in range(2 * len(INJECTIONS)):
        before, sick = bits(state), bool(number % 2)
        state, metrics = step(state, program.put(feed.batch(number)))
        assert bool(metrics["skipped"]) == (bits(state) == before) == sick, INJECTIONS[number // 2]
        if sick:
            well = well._replace(step=jax.device_put(well.step + 1, well.step.sharding))
        else:
            well, _ = step(well, program.put(feed.batch(number)))
    assert bits(well) == bits(state)
