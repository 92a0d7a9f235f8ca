"""Moving averages of weights belong to the state: moved by its step, split and skipped with it."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import tiny_graphs
from affinage.model import parse
from affinage.training.state import TrainState

GRAPH = parse(tiny_graphs.byol())


class Images(tiny.RandomFeed):
    """Noise, a function of the step; that of the fourth step is not finite."""

    def batch(self, step: int) -> dict[str, np.ndarray]:
        images = np.random.default_rng(step).random((8, 8, 8, 1)).astype(np.float32)
        images[0] *= np.nan if step == 3 else 1
        return {"images": images, "rows": np.arange(8, dtype=np.int32)}


def steps(mesh: dict[str, int], count: int, **changes: Any) -> tuple[list[TrainState], list[dict[str, float]]]:
    job = tiny.job(Path("unused"), graph=GRAPH, mesh=mesh, feed=Images(), **changes)
    program, step = tiny.compiled(job)
    state, seen = program.begin(), []
    states = [jax.device_get(state)]
    for number in range(count):
        state, metrics = step(state, program.put(Images().batch(number)))
        states.append(jax.device_get(state))
        seen.append({name: float(value) for name, value in metrics.items()})
    for name, tree in program.abstract.target_params["target"].items():  # split like the weights they follow
        jax.tree.map(
            lambda a, p: a.sharding == p.sharding or pytest.fail(f"{a} {p}"), tree, program.abstract.params[name]
        )
    assert {leaf.dtype for leaf in jax.tree.leaves(program.abstract.target_params)} == {jnp.dtype("float32")}
    return states, seen


@pytest.fixture(scope="module")
def one_device() -> tuple[list[TrainState], list[dict[str, float]]]:
    return steps({"data": 1}, 4)


def test_every_step_moves_the_averages_by_the_formula(one_device):
    states, _ = one_device
    for before, after in pairwise(states[:4]):
        for name, tree in after.target_params["target"].items():
            jax.tree.map(
                lambda new, old, p: np.testing.assert_allclose(new, 0.9 * old + 0.1 * p, rtol=1e-5, atol=1e-7),
                tree,
                before.target_params["target"][name],
                after.params[name],
            )


def test_a_skipped_update_leaves_them_bit_for_bit(one_device):
    states, seen = one_device
    assert [metrics["skipped"] for metrics in seen] == [0, 0, 0, 1]
    assert tiny.bits(states[3][1:]) == tiny.bits(states[4][1:])


@pytest.mark.full
def test_mesh_and_accumulation_change_nothing(one_device):
    _, got = steps({"fsdp": 2}, 3, gradient_accumulation_steps=2)
    tiny.assert_close(got, one_device[1][:3], rtol=2e-4)
    assert got[0]["loss_tokens"] == 8
