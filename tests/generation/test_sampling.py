"""Sampling: filters leave what transformers' processors leave, and draws follow the distribution that they claim."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.generation import logits_process

from affinage.errors import UserError
from affinage.generation.sampling import SamplingParams, SamplingTensors, choose, filtered

VOCABULARY = 97
CASES = [
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.0, top_k=11),
    SamplingParams(temperature=1.0, top_k=500),
    SamplingParams(temperature=1.0, top_p=0.3),
    SamplingParams(temperature=1.0, min_p=0.02),
    SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05),
    SamplingParams(temperature=1.4, top_k=60, top_p=0.99, min_p=0.01),
]


def drawn(rows: int) -> np.ndarray:
    return (3 * np.random.default_rng(3).normal(size=(rows, VOCABULARY))).astype(np.float32)


@pytest.mark.parametrize("sampling", CASES, ids=str)
def test_filters_leave_what_transformers_leaves(sampling: SamplingParams):
    logits = drawn(16)
    steps = [logits_process.TemperatureLogitsWarper(sampling.temperature)]  # in the order of `generate`
    steps += [logits_process.TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    steps += [logits_process.TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    steps += [logits_process.MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    wanted = torch.tensor(logits)
    for step in steps:
        wanted = step(None, wanted)
    ours = np.asarray(filtered(jnp.asarray(logits), SamplingTensors.of([sampling] * 16)))
    np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(wanted.numpy()))
    np.testing.assert_allclose(ours, wanted.numpy(), rtol=1e-6)


def test_a_row_with_filters_of_its_own_is_as_if_all_had_them():
    logits = drawn(len(CASES))
    together = np.asarray(filtered(jnp.asarray(logits), SamplingTensors.of(CASES)))
    for row, sampling in enumerate(CASES):
        one = slice(row, row + 1)
        alone = filtered(jnp.asarray(logits[one]), SamplingTensors.of([sampling]))
        np.testing.assert_array_equal(together[one], np.asarray(alone))


def draw(logits, sampling, rows, steps):
    logits = jnp.asarray(logits, jnp.float32)
    rows, steps = jnp.asarray(rows, jnp.int32), jnp.asarray(steps, jnp.int32)
    return np.asarray(choose(logits, SamplingTensors.of([sampling] * len(logits)), rows, steps))


def test_greedy_takes_the_first_of_the_best_and_filters_never_exclude_every_token():
    assert draw([[0.0, 3.0, 3.0], [1.0, 0.0, -1.0]], SamplingParams(), [0, 1], [0, 0]).tolist() == [1, 0]
    strict = SamplingParams(temperature=0.5, top_k=1, top_p=1e-6, min_p=1.0)
    logits = np.random.default_rng(0).normal(size=(5, 50)).astype(np.float32)
    np.testing.assert_array_equal(draw(logits, strict, np.arange(5), np.zeros(5)), logits.argmax(-1))


def test_draws_follow_the_tempered_distribution():
    logits, count = np.array([1.0, 0.0, -1.0, 2.0], np.float32), 20_000
    tokens = draw(np.tile(logits, (count, 1)), SamplingParams(temperature=0.7), np.arange(count), np.zeros(count))
    powers = np.exp(logits / 0.7)
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / count, powers / powers.sum(), atol=0.02)


def test_a_draw_depends_on_seed_row_and_step_and_on_nothing_else():
    logits, sampling = np.zeros((1, 1000), np.float32), SamplingParams(temperature=1.0, seed=5)
    alone = draw(logits, sampling, [3], [7])
    assert draw(np.tile(logits, (4, 1)), sampling, [1, 2, 3, 4], [7, 7, 7, 7])[2] == alone[0]
    others = [(SamplingParams(temperature=1.0, seed=6), [3], [7]), (sampling, [4], [7]), (sampling, [3], [8])]
    assert all(draw(logits, *other)[0] != alone[0] for other in others)


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"min_p": 2.0}, {"seed": -1}])
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(UserError):
        SamplingParams(**wrong)
