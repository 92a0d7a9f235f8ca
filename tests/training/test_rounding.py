"""Stochastic rounding to bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np

from affinage.training.step import stochastic_bfloat16, stored_like


def test_the_mean_is_the_value_and_only_the_two_neighbours_occur():
    # Between -1 and -2 bfloat16 steps by 2^-7; this stands a quarter below -1.
    x = jnp.full(40_000, -(1 + 0.25 * 2**-7), jnp.float32)
    rounded = -np.asarray(stochastic_bfloat16(x, jax.random.key(0)), np.float32)
    assert set(np.unique(rounded)) == {1.0, 1 + 2**-7}
    share = (rounded > 1).mean()
    assert abs(share - 0.25) < 5 * np.sqrt(0.25 * 0.75 / x.size)


def test_what_bfloat16_can_hold_and_what_is_not_finite_stays():
    x = jnp.array([0.0, -0.0, 1.5, -3.0, 2.0**-100, jnp.inf, -jnp.inf, jnp.nan], jnp.float32)
    for seed in range(5):
        rounded = stochastic_bfloat16(x, jax.random.key(seed))
        np.testing.assert_array_equal(np.asarray(rounded, np.float32), np.asarray(x))


def test_a_thousand_updates_that_are_each_too_small_add_up():
    start, update = jnp.ones(2000, jnp.bfloat16), 2.0**-12  # a 32nd of bfloat16's step at 1

    @jax.jit
    def moved(weights: jax.Array, key: jax.Array) -> jax.Array:
        return stored_like(weights, weights.astype(jnp.float32) + update, key)

    random = start
    for step in range(1000):
        random = moved(random, jax.random.key(step))
    assert (start.astype(jnp.float32) + update).astype(jnp.bfloat16)[0] == 1.0  # rounded to the nearest it stays
    assert abs(float(random.astype(jnp.float32).mean()) - (1 + 1000 * update)) < 0.01
