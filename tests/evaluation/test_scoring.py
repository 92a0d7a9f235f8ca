"""Scores against the plain definition: the full forward pass, a log-softmax, a sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from affinage.evaluation import scoring
from affinage.evaluation.families import find_families
from affinage.evaluation.rows import group_requests, in_pieces
from affinage.evaluation.scoring import Scorer
from affinage.model.kinds.norm import RmsNorm
from tiny_models import CONTEXT, VOCABULARY, full_logits, tiny_gpt2, tiny_llama


def slow_score(model, before, continuation):
    if len(continuation) > CONTEXT:  # in pieces of half the context, each after what comes before
        half = CONTEXT // 2
        cuts = range(0, len(continuation), half)
        scores = [slow_score(model, before + continuation[:at], continuation[at : at + half]) for at in cuts]
        return sum(value for value, _ in scores), all(greedy for _, greedy in scores)
    whole = (before + continuation)[-(CONTEXT + 1) :]
    logits = np.asarray(jax.nn.log_softmax(full_logits(model, whole[:-1]), axis=-1))
    at = range(len(whole) - 1 - len(continuation), len(whole) - 1)
    total = sum(float(logits[p, t]) for p, t in zip(at, continuation, strict=True))
    return total, all(logits[p].argmax() == t for p, t in zip(at, continuation, strict=True))


def some_pairs(model):
    generator = np.random.default_rng(0)
    draw = lambda count: [int(t) for t in generator.integers(10, 400, count)]  # noqa: E731
    pairs = [([2, *draw(int(generator.integers(0, 50)))], draw(int(generator.integers(1, 9)))) for _ in range(12)]
    pairs += [(pairs[0][0], [choice]) for choice in (20, 21, 22)]  # one-token choices share a row
    pairs += [([2, *draw(CONTEXT + 20)], draw(4)), ([2], draw(CONTEXT))]  # cut from the left; as long as can be
    pairs += [([2, *draw(5)], draw(CONTEXT + 30))]
    # A greedy continuation, so that both answers to "is it greedy" occur.
    tokens = [2, 40]
    for _ in range(4):
        tokens.append(int(full_logits(model, tokens)[-1].argmax()))
    # What is shared is computed once: families of two to five, ends of one token and of many.
    for size in (3, 3, 5, 2):
        shared = [2, *draw(int(generator.integers(8, 40)))]
        pairs += [(shared, draw(int(generator.integers(1, 9)))) for _ in range(size)]
    pairs += [(pairs[-1][0], [pairs[-1][1][0], *pairs[-2][1][1:]]), (pairs[-1][0], draw(90))]
    return [*pairs, (tokens[:2], tokens[2:]), (tokens[:2], [*tokens[2:5], 11])]


@pytest.mark.parametrize(("batch", "block"), [(4, 2**24), (64, 420 * 7)])
def test_scores_equal_the_definition(batch, block, monkeypatch):
    monkeypatch.setattr(scoring, "_LOGITS_AT_ONCE", block)
    scoring._compiled.cache_clear()
    model = tiny_llama()
    pairs = some_pairs(model)
    answered = []
    results = Scorer(model, batch=batch).score(pairs, answered.append)
    assert sum(answered) == len(pairs) + 2, "one is scored in three pieces"
    for (before, continuation), (value, greedy) in zip(pairs, results, strict=True):
        expected, expected_greedy = slow_score(model, before, continuation)
        assert value == pytest.approx(expected, abs=2e-4)
        assert greedy == expected_greedy
    assert results[-2][1] and not results[-1][1]
    scoring._compiled.cache_clear()


def test_sharing_contexts_changes_nothing():
    model = tiny_gpt2()
    pairs = some_pairs(model)
    shared, apart = (Scorer(model, batch=8, share=share).score(pairs) for share in (True, False))
    assert [value for value, _ in shared] == pytest.approx([value for value, _ in apart], abs=2e-4)
    rows = group_requests(in_pieces(pairs, CONTEXT)[0], CONTEXT)
    assert sorted(len(family.rows) for family in find_families(rows, 2 * CONTEXT) if len(family.rows) > 1) >= [
        2,
        3,
        3,
        5,
    ]


@pytest.mark.parametrize("lengths", [(60, 61), (CONTEXT - 3,), (CONTEXT, CONTEXT - 1, 20)])
def test_rows_that_fill_the_room_of_two_do_with_the_positions_that_were_learned(lengths):
    model = tiny_gpt2()
    pairs = [([2, *range(30, 29 + length)], [40, 41]) for length in lengths]
    for (before, continuation), (value, _) in zip(pairs, Scorer(model, batch=4).score(pairs), strict=True):
        assert value == pytest.approx(slow_score(model, before, continuation)[0], abs=2e-4)


def test_a_kind_that_looks_at_other_tokens_and_knows_no_parents_scores_the_same(monkeypatch):
    """Each text is then a row of its own."""
    model = tiny_llama()
    pairs = some_pairs(model)
    joined = Scorer(model, batch=8).score(pairs)
    monkeypatch.setattr(RmsNorm, "joins", False)
    shapes = []
    scorer = Scorer(model, batch=8)
    score = scorer._score
    monkeypatch.setattr(scorer, "_score", lambda *given: shapes.append(given[-1]) or score(*given))
    assert [v for v, _ in scorer.score(pairs)] == pytest.approx([v for v, _ in joined], abs=2e-4)
    assert shapes and all(one is None for one in shapes)


def test_only_scalars_leave_the_device(monkeypatch):
    """Two for each token that is scored, and none for each piece of the vocabulary."""
    model = tiny_llama()
    pairs = some_pairs(model)
    scorer = Scorer(model, batch=8)
    score, scored, given_back = scorer._score, 0, []

    def watched(params, tokens, at, targets, joined):
        nonlocal scored
        scored += targets.size
        given_back.extend(jax.tree.leaves(jax.eval_shape(score, params, tokens, at, targets, joined)))
        assert [leaf.shape for leaf in given_back[-2:]] == [targets.shape] * 2
        return score(params, tokens, at, targets, joined)

    monkeypatch.setattr(scorer, "_score", watched)
    scorer.score(pairs)
    assert [leaf.dtype for leaf in given_back] == [jnp.float32, jnp.bool_] * (len(given_back) // 2)
    assert sum(leaf.size for leaf in given_back) == 2 * scored < VOCABULARY * len(pairs)


def test_nothing_to_score_is_no_error():
    assert Scorer(tiny_llama()).score([]) == []


def test_of_equally_likely_tokens_the_first_is_the_greedy_one():
    hidden, kernel = jnp.ones((1, 4, 2)), jnp.asarray([[0.0, 0.0], [1, 1], [1, 1], [0, 0]])
    _, best = scoring._log_probabilities(kernel, None, hidden, jnp.asarray([[0, 1, 2, 3]]))
    assert best.tolist() == [[False, True, False, False]]
