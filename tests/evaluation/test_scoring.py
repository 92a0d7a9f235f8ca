"""Scores against the plain definition: the full forward pass, a log-softmax, a sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from affinage.evaluation import scoring
from affinage.evaluation.scoring import Scorer
from affinage.generation.model import logits_of
from tiny_models import CONTEXT, tiny_llama


def slow_score(model, before, continuation):
    whole = (before + continuation)[-(CONTEXT + 1) :]
    row = np.zeros((1, CONTEXT), np.int32)
    row[0, : len(whole) - 1] = whole[:-1]
    lazy, _ = logits_of(model.graph, model.params, jnp.asarray(row), jnp.arange(CONTEXT)[None], "float32")
    logits = np.asarray(jax.nn.log_softmax(lazy.array(), axis=-1))[0]
    at = range(len(whole) - 1 - len(continuation), len(whole) - 1)
    total = sum(float(logits[p, t]) for p, t in zip(at, continuation, strict=True))
    return total, all(logits[p].argmax() == t for p, t in zip(at, continuation, strict=True))


def some_pairs(model):
    generator = np.random.default_rng(0)
    draw = lambda count: [int(t) for t in generator.integers(10, 400, count)]  # noqa: E731
    pairs = [([2, *draw(int(generator.integers(0, 50)))], draw(int(generator.integers(1, 9)))) for _ in range(12)]
    pairs += [(pairs[0][0], [choice]) for choice in (20, 21, 22)]  # one-token choices share a row
    pairs += [([2, *draw(CONTEXT + 20)], draw(4)), ([2], draw(CONTEXT))]  # cut from the left; as long as can be
    # A greedy continuation, so that both answers to "is it greedy" occur.
    tokens = [2, 40]
    for _ in range(4):
        row = jnp.asarray([tokens])
        lazy, _ = logits_of(model.graph, model.params, row, jnp.arange(len(tokens))[None], "float32")
        tokens.append(int(lazy.array()[0, -1].argmax()))
    return [*pairs, (tokens[:2], tokens[2:]), (tokens[:2], [*tokens[2:5], 11])]


@pytest.mark.parametrize(("batch", "block"), [(4, 2**24), (64, 420 * 7)])
def test_scores_equal_the_definition(batch, block, monkeypatch):
    monkeypatch.setattr(scoring, "_LOGITS_AT_ONCE", block)
    scoring._compiled.cache_clear()
    model = tiny_llama()
    pairs = some_pairs(model)
    answered = []
    results = Scorer(model, batch=batch).score(pairs, answered.append)
    assert sum(answered) == len(pairs)
    for (before, continuation), (value, greedy) in zip(pairs, results, strict=True):
        expected, expected_greedy = slow_score(model, before, continuation)
        assert value == pytest.approx(expected, abs=2e-4)
        assert greedy == expected_greedy
    assert results[-2][1] and not results[-1][1]
    scoring._compiled.cache_clear()


def test_nothing_to_score_is_no_error():
    assert Scorer(tiny_llama()).score([]) == []
