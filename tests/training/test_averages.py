"""The moving average of the parameters belongs to the state: moved by its step, split and skipped with it."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from affinage.training.state import TrainState


def steps(mesh: dict[str, int], **changes: Any) -> list[TrainState]:
    """The states of four steps, of which the last update is not finite and so skipped."""
    job = tiny.job(Path("unused"), mesh=mesh, ema={"decay": 0.9}, **changes)
    program, step = tiny.compiled(job)
    state = program.begin()
    states, batches = [jax.device_get(state)], job.feed.iterate(0)
    for number in range(4):
        if number == 3:
            state = state._replace(params=jax.tree.map(lambda p: p * jnp.nan, state.params))
        state, metrics = step(state, program.put(next(batches)))
        assert float(metrics["skipped"]) == (number == 3)
        states.append(jax.device_get(state))
    averaged, params = program.abstract.ema_params, program.abstract.params
    assert all(jax.tree.leaves(jax.tree.map(lambda a, p: a.sharding == p.sharding, averaged, params)))
    assert {leaf.dtype for leaf in jax.tree.leaves(averaged)} == {jnp.dtype("float32")}
    return states


def test_it_moves_by_the_formula_and_not_with_a_skipped_update():
    states = steps({"data": 1})
    for before, after in pairwise(states[:4]):
        jax.tree.map(
            lambda new, old, p: np.testing.assert_allclose(new, 0.9 * old + 0.1 * p, rtol=1e-5, atol=1e-7),
            after.ema_params,
            before.ema_params,
            after.params,
        )
    assert tiny.bits(states[3].ema_params) == tiny.bits(states[4].ema_params)
    assert tiny.bits(states[0].ema_params) == tiny.bits(states[0].params)


@pytest.mark.full
def test_mesh_and_accumulation_change_nothing():
    whole, split = steps({"data": 1}), steps({"fsdp": 2}, gradient_accumulation_steps=2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), whole[3].ema_params, split[3].ema_params)
