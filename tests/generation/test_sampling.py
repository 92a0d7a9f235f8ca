"""Sampling filters against their slow, obvious definitions, and the draws against the distribution they claim."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from affinage.errors import UserError
from affinage.generation.sampling import (
    Sampling,
    choose,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    knobs,
    penalise_repetition,
)

rows_of_logits = st.lists(
    st.lists(st.integers(-32, 32), min_size=7, max_size=7, unique=True), min_size=1, max_size=3
).map(lambda rows: np.array(rows, np.float32) / 4)


def softmax(row):
    powers = np.exp(row - row.max())
    return powers / powers.sum()


def kept(logits):
    return np.isfinite(np.asarray(logits))


@given(rows_of_logits, st.integers(1, 9))
def test_top_k_keeps_the_k_largest(logits, k):
    for row, mask in zip(logits, kept(keep_top_k(jnp.asarray(logits), jnp.int32(k))), strict=True):
        assert set(np.flatnonzero(mask)) == set(np.argsort(-row)[: min(k, 7)])


@given(rows_of_logits, st.floats(0.05, 0.95))
def test_top_p_keeps_the_smallest_set_that_reaches_p(logits, p):
    for row, mask in zip(logits, kept(keep_top_p(jnp.asarray(logits), jnp.float32(p))), strict=True):
        order, mass, expected = np.argsort(-row), 0.0, set()
        for token in order:
            if mass >= p - 1e-6 and abs(mass - p) > 1e-6:
                break
            if abs(mass - p) <= 1e-6:  # rounding decides: either answer is right
                return
            expected.add(token)
            mass += softmax(row)[token]
        assert set(np.flatnonzero(mask)) == expected


@given(rows_of_logits, st.floats(0.01, 0.9))
def test_min_p_keeps_tokens_of_at_least_p_times_the_best(logits, p):
    for row, mask in zip(logits, kept(keep_min_p(jnp.asarray(logits), jnp.float32(p))), strict=True):
        share = softmax(row) / softmax(row).max()
        clear = np.abs(share - p) > 1e-5
        np.testing.assert_array_equal(mask[clear], (share >= p)[clear])


def test_the_repetition_penalty_moves_seen_tokens_down_whatever_their_sign():
    logits = jnp.array([[2.0, -2.0, 1.0]])
    seen = jnp.array([[True, True, False]])
    np.testing.assert_allclose(penalise_repetition(logits, seen, jnp.float32(2.0)), [[1.0, -4.0, 1.0]])


def draw(logits, sampling, rows, steps, seen=None):
    logits = jnp.asarray(logits, jnp.float32)
    rows, steps = jnp.asarray(rows, jnp.int32), jnp.asarray(steps, jnp.int32)
    return np.asarray(choose(logits, knobs(sampling), sampling.filters, rows, steps, seen))


def test_greedy_takes_the_first_of_the_best():
    assert draw([[0.0, 3.0, 3.0], [1.0, 0.0, -1.0]], Sampling(), [0, 1], [0, 0]).tolist() == [1, 0]


def test_draws_follow_the_tempered_distribution():
    logits = np.array([1.0, 0.0, -1.0, 2.0], np.float32)
    count = 20_000
    tokens = draw(np.tile(logits, (count, 1)), Sampling(temperature=0.7), np.arange(count), np.zeros(count))
    shares = np.bincount(tokens, minlength=4) / count
    np.testing.assert_allclose(shares, softmax(logits / 0.7), atol=0.02)


def test_a_draw_depends_on_seed_row_and_step_and_on_nothing_else():
    logits = np.zeros((1, 1000), np.float32)
    sampling = Sampling(temperature=1.0, seed=5)
    alone = draw(logits, sampling, [3], [7])
    together = draw(np.tile(logits, (4, 1)), sampling, [1, 2, 3, 4], [7, 7, 7, 7])
    assert together[2] == alone[0]
    others = [
        draw(logits, Sampling(temperature=1.0, seed=6), [3], [7]),
        draw(logits, sampling, [4], [7]),
        draw(logits, sampling, [3], [8]),
    ]
    assert all(other[0] != alone[0] for other in others)


def test_filters_never_exclude_every_token():
    strict = Sampling(temperature=0.5, top_k=1, top_p=1e-6, min_p=1.0, repetition_penalty=1.3)
    logits = np.random.default_rng(0).normal(size=(5, 50)).astype(np.float32)
    seen = jnp.zeros((5, 50), bool)
    tokens = draw(logits, strict, np.arange(5), np.zeros(5), seen)
    np.testing.assert_array_equal(tokens, logits.argmax(-1))


def test_more_than_any_vocabulary_is_all_of_it():
    logits = np.random.default_rng(0).normal(size=(5, 50)).astype(np.float32)
    drawn = [draw(logits, Sampling(1.0, top_k), np.arange(5), np.zeros(5)) for top_k in (50, 2**40)]
    np.testing.assert_array_equal(*drawn)


def test_changing_a_value_compiles_nothing_again():
    traced = []

    @partial(jax.jit, static_argnames="filters")
    def compiled(*given, filters):
        traced.append(filters)
        return choose(*given[:2], filters, *given[2:])

    rows = jnp.zeros(1, jnp.int32)
    for top_p in (0.5, 0.9):
        sampling = Sampling(temperature=1.0, top_p=top_p)
        compiled(jnp.zeros((1, 9)), knobs(sampling), rows, rows, filters=sampling.filters)
    assert len(traced) == 1


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"min_p": 2.0}, {"seed": -1}])
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(UserError):
        Sampling(**wrong)
