"""Requests are packed into batches: each is asked after its own text alone, and what they share is computed once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from affinage.errors import UserError
from affinage.evaluation.scoring import as_rows, batches, find_groups

CONTEXT = 40
token_lists = st.lists(st.integers(1, 2), min_size=1, max_size=30)
many_pairs = st.lists(st.tuples(token_lists, token_lists), max_size=25)


def rows_of(pairs):
    return as_rows([(before, continuation[:CONTEXT]) for before, continuation in pairs], CONTEXT)


def packed(groups, batch, multiple=1):
    told = {"context": CONTEXT, "most": 2 * CONTEXT, "pad": 0, "multiple": multiple}
    return batches(groups, batch * CONTEXT, **told)


@pytest.mark.parametrize("pair", [([], [1]), ([1], []), ([1], [2] * 9)], ids=str)
def test_pairs_that_cannot_be_scored_are_refused(pair):
    with pytest.raises((ValueError, UserError)):
        as_rows([pair], context=8)


def answer(text: tuple[int, ...], token: int) -> tuple[float, bool]:
    """Log-probability of a token after a text, and whether it is the most likely one: any function of both."""
    drawn = hash((text, token)) % 1000
    return -drawn / 1000, drawn % 7 > 0


@settings(max_examples=25)
@given(many_pairs, st.integers(1, 9), st.integers(1, 3))
def test_every_request_is_answered_by_what_was_asked_after_the_text_that_the_place_sees(pairs, batch, multiple):
    answered = {}
    for one in packed(find_groups(rows_of(pairs), 2 * CONTEXT), batch, multiple):
        values, best = np.zeros(one.logit_positions.shape), np.zeros(one.logit_positions.shape, bool)
        count, length = one.tokens.shape
        for part, column in np.ndindex(*one.logit_positions.shape):
            row, place = divmod(
                part * (count // len(one.logit_positions)) * length + one.logit_positions[part, column], length
            )
            positions, segments, prefixes = (each[row] for each in one.places.values())
            own = np.isin(segments, [segments[place], prefixes[place]])
            text = one.tokens[row][own & (positions <= positions[place])]
            values[part, column], best[part, column] = answer(tuple(text.tolist()), int(one.targets[part, column]))
        answered |= dict(one.answers(values, best))
    for index, (before, continuation) in enumerate(pairs):
        whole = (before + continuation[:CONTEXT])[-(CONTEXT + 1) :]
        start = len(whole) - len(continuation[:CONTEXT])
        expected = [answer(tuple(whole[:at]), whole[at]) for at in range(start, len(whole))]
        value, greedy = answered[index]
        assert abs(value - sum(one for one, _ in expected)) < 1e-6
        assert greedy == all(one for _, one in expected)


def test_what_questions_share_is_computed_once_and_short_ones_share_a_row():
    question = list(range(1, 21))
    pairs = [(question, end) for end in ([30, 40, 50], [30], [31], [30])]
    (group,) = find_groups(as_rows(pairs, 99), 198)
    assert group.length == 20 + 2 and group.targets == 6
    (batch,) = packed(find_groups(rows_of([([1, n], [2]) for n in range(10)]), 2 * CONTEXT), 9)
    assert len(batch.tokens) == 3 and sum(map(len, batch.requests)) == 10


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.booleans())
def test_rows_have_few_lengths_and_little_padding(lengths, packed_rows):
    pairs = [([1] * length, [2 + n]) for n, length in enumerate(lengths)]
    groups = [find_groups([row], 60)[0] for row in as_rows(pairs, 60)]
    found = batches(groups, 600, context=60, most=60 * packed_rows, pad=0, multiple=1)
    assert len({one.tokens.shape[1] for one in found}) <= 3
    padded = sum(one.tokens.size for one in found)
    assert padded <= 60 * len(groups) + 60
