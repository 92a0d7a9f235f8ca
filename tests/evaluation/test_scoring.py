"""Scores against the plain definition (forward pass, log-softmax, sum), and how many rows are scored at once."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from affinage.evaluation.scoring import as_rows, batches, default_batch, find_groups, score
from affinage.generation.engine import generate
from affinage.generation.sampling import SamplingParams
from affinage.hardware.chips import CHIPS
from affinage.model.forward import abstract_params, logical_axes
from affinage.parallel.sharding import MeshLayout, make_mesh, serving_layout, table_with
from tiny_models import CONTEXT, VOCABULARY, full_logits, tiny_llama


def answers_to(model, pairs, **settings):
    answers = dict(score(model, pairs, **settings))
    return [answers[index] for index in range(len(pairs))]


def slow_score(model, before, continuation):
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


@pytest.mark.parametrize(("batch", "block"), [pytest.param(4, 2**24, marks=pytest.mark.full), (16, VOCABULARY * 7)])
def test_scores_equal_the_definition(batch, block):
    model = tiny_llama()
    pairs = some_pairs(model)
    results = answers_to(model, pairs, batch=batch, logits_at_once=block)
    for pair, (value, greedy) in zip(pairs, results, strict=True):
        expected, expected_greedy = slow_score(model, *pair)
        assert value == pytest.approx(expected, abs=2e-4) and greedy == expected_greedy
    assert results[-2][1] and not results[-1][1]
    assert answers_to(model, []) == []


def test_of_equally_likely_tokens_the_first_is_the_greedy_one():
    model = tiny_llama()
    flat = replace(model, params=model.params | {"logits": jax.tree.map(jnp.zeros_like, model.params["logits"])})
    results = answers_to(flat, [([2], [token]) for token in (0, 1, VOCABULARY - 1)])
    assert [greedy for _, greedy in results] == [True, False, False]


# A table with every line that generation reads moved to another axis of the mesh.
SWAPPED = {
    "batch": ("data",),
    "sequence": ("fsdp", "context"),
    "residual": ("fsdp", "context"),
    **dict.fromkeys(("heads", "kv_heads", "ffn", "vocab"), ("fsdp",)),
    "embed": ("tensor",),
}


@pytest.mark.parametrize(("mesh", "replacements", "says"), [
    ({"fsdp": 2, "tensor": 2}, {}, False),
    pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, {}, True, marks=pytest.mark.full),
    pytest.param({"data": 1, "fsdp": 2, "tensor": 2}, SWAPPED, True, marks=pytest.mark.full),
], ids=["scores", "default", "swapped"])  # fmt: skip
def test_a_sharded_model_scores_and_says_what_it_does_on_one_device(mesh, replacements, says):
    model = tiny_llama(scale=3.0)
    axes, abstract = logical_axes(model.graph), abstract_params(model.graph)
    devices = jax.devices()[: math.prod(mesh.values())]
    layout, shardings = serving_layout(mesh, devices, axes, abstract, replacements)
    sharded = replace(model, params=jax.device_put(model.params, shardings), layout=layout)
    up = sharded.params["blocks"]["ffn"]["up"]["kernel"].sharding.spec  # [layers, width, hidden]
    assert tuple(up) == ((None, "tensor", "fsdp") if replacements else (None, "fsdp", "tensor"))
    assert sharded.row_multiple == (1 if replacements else len(devices) // 2)
    pairs = [([2, 270 + n, 280], [290 + n, 300]) for n in range(5)]
    expected = [value for value, _ in answers_to(model, pairs)]
    assert [value for value, _ in answers_to(sharded, pairs)] == pytest.approx(expected, abs=1e-4)
    if not says:
        return
    prompts, request = [before for before, _ in pairs[:3]], SamplingParams(12, ignore_eos=True)
    said = [[each.tokens for each in generate(one, prompts, request)] for one in (sharded, model)]
    assert said[0] == said[1]


def test_the_batch_shrinks_with_the_square_of_the_context_and_less_where_memory_is_large(monkeypatch):
    model, mesh = tiny_llama(), make_mesh({"data": 4}, jax.devices()[:4])
    contexts = (96, 512, 1024, 3000, 2**20)
    assert [default_batch(replace(model, context=context)) for context in contexts] == [64, 64, 16, 1, 1]
    assert default_batch(replace(model, context=1024, layout=MeshLayout(mesh, table_with({})))) == 4 * 16
    for device, rows in (("L4", [64, 16, 4, 1, 1]), ("A100 80GB", [64, 16, 8, 4, 2])):
        monkeypatch.setattr("affinage.evaluation.scoring.chip", lambda _, device=device: CHIPS[device])
        assert [default_batch(replace(model, context=2**n)) for n in range(9, 14)] == rows


# ---- requests are packed into batches, and what they share is computed once


ROW = 40
token_lists = st.lists(st.integers(1, 2), min_size=1, max_size=30)
many_pairs = st.lists(st.tuples(token_lists, token_lists), max_size=25)


def rows_of(pairs):
    return as_rows([(before, continuation[:ROW]) for before, continuation in pairs], ROW)


def packed(groups, batch, multiple=1):
    return batches(groups, batch * ROW, context=ROW, most=2 * ROW, multiple=multiple)


def answer(text: tuple[int, ...], token: int) -> tuple[float, bool]:
    """Log-probability of a token after a text, and whether it is the most likely one: any function of both."""
    drawn = hash((text, token)) % 1000
    return -drawn / 1000, drawn % 7 > 0


@settings(max_examples=25)
@given(many_pairs, st.integers(1, 9), st.integers(1, 3))
def test_every_request_is_answered_by_what_was_asked_after_the_text_that_the_place_sees(pairs, batch, multiple):
    answered = {}
    for one in packed(find_groups(rows_of(pairs), 2 * ROW), batch, multiple):
        values, best = np.zeros(one.logit_positions.shape), np.zeros(one.logit_positions.shape, bool)
        count, length = one.tokens.shape
        for part, column in np.ndindex(*one.logit_positions.shape):
            rows_of_a_part = count // len(one.logit_positions)
            row, place = divmod(part * rows_of_a_part * length + one.logit_positions[part, column], length)
            positions, segments, prefixes = (each[row] for each in one.places.values())
            own = np.isin(segments, [segments[place], prefixes[place]])
            text = one.tokens[row][own & (positions <= positions[place])]
            values[part, column], best[part, column] = answer(tuple(text.tolist()), int(one.targets[part, column]))
        answered |= dict(one.answers(values, best))
    for index, (before, continuation) in enumerate(pairs):
        whole = (before + continuation[:ROW])[-(ROW + 1) :]
        start = len(whole) - len(continuation[:ROW])
        expected = [answer(tuple(whole[:at]), whole[at]) for at in range(start, len(whole))]
        value, greedy = answered[index]
        assert abs(value - sum(one for one, _ in expected)) < 1e-6
        assert greedy == all(one for _, one in expected)


def test_what_questions_share_is_computed_once_and_short_ones_share_a_row():
    for pair in (([], [1]), ([1], []), ([1], [2] * 9)):  # which cannot be scored
        with pytest.raises(ValueError):
            as_rows([pair], context=8)
    text = list(range(1, 21))
    pairs = [(text, end) for end in ([30, 40, 50], [30], [31], [30])]
    pairs += [([*text, question, 70], [choice]) for question in (50, 60) for choice in (30, 31)]
    (group,) = find_groups(as_rows(pairs, 99), 198)
    assert group.length == 20 + 3 * 2 and group.targets == 10
    apart = [([*text, *text], [n, n]) for n in range(4)] + [([*text, *[9] * 20], [1])]  # 124 if joined
    assert [group.length for group in find_groups(as_rows(apart, 99), 198)] == [40 + 4, 40]
    (batch,) = packed(find_groups(rows_of([([1, n], [2]) for n in range(10)]), 2 * ROW), 9)
    assert len(batch.tokens) == 3 and sum(map(len, batch.requests)) == 10


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.booleans())
def test_rows_have_few_lengths_and_little_padding(lengths, packed_rows):
    pairs = [([1] * length, [2 + n]) for n, length in enumerate(lengths)]
    groups = [find_groups([row], 60)[0] for row in as_rows(pairs, 60)]
    found = batches(groups, 600, context=60, most=60 * packed_rows, multiple=1)
    assert len({one.tokens.shape[1] for one in found}) <= 3
    assert sum(one.tokens.size for one in found) <= 60 * len(groups) + 60
