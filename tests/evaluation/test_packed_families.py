"""Families are packed into rows: each row of each still sees its own tokens alone, and is asked what it was asked."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from affinage.evaluation.families import Family, find_families
from affinage.evaluation.packing import batches
from affinage.evaluation.rows import Row, group_requests

CONTEXT = 40
token_lists = st.lists(st.integers(1, 2), min_size=1, max_size=30)


def rows_of(pairs: list[tuple[list[int], list[int]]]) -> list[Row]:
    return group_requests([(before, continuation[:CONTEXT]) for before, continuation in pairs], CONTEXT)


def alone(*lengths: int) -> list[Family]:
    return [Family(0, (row,)) for row in rows_of([([1] * (length - 1), [2, 3]) for length in lengths])]


@given(st.lists(st.tuples(token_lists, token_lists), max_size=25), st.integers(1, 9), st.integers(1, 3))
def test_a_batch_says_of_every_row_what_it_is_and_what_is_asked(pairs, batch, multiple):
    rows = rows_of(pairs)
    found = find_families(rows, 2 * CONTEXT)
    assert sum(family.length for family in found) <= sum(len(row.tokens) for row in rows)
    made = batches(
        found, batch * CONTEXT, context=CONTEXT, most=2 * CONTEXT, compile_tokens=50.0, pad=0, multiple=multiple
    )
    assert [one.tokens.size for one in made] == sorted((one.tokens.size for one in made), reverse=True)
    seen = []
    for one in made:
        assert len(one.tokens) % multiple == 0 and len(one.rows) <= len(one.tokens)
        count, length = one.tokens.shape
        assert count == multiple or count * length <= batch * CONTEXT * min(1, CONTEXT / length)
        assert len(one.at) in (multiple, count)
        for index, packed in enumerate(one.rows):
            number = 0
            for family in packed:
                number += 1
                parent = number
                for row in family.rows:
                    number += 1
                    mine = np.flatnonzero(np.isin(one.segments[index], [number, parent]))
                    assert (one.parents[index, mine] == parent).all()
                    assert one.tokens[index, mine].tolist() == list(row.tokens)
                    assert one.positions[index, mine].tolist() == list(range(len(row.tokens)))
                    seen.append((row.tokens, row.scored))
    assert sorted(seen) == sorted((row.tokens, row.scored) for row in rows)


def answer(text: tuple[int, ...], token: int) -> tuple[float, bool]:
    """Log-probability of a token after a text, and whether it is the most likely one: any function of both."""
    drawn = hash((text, token)) % 1000
    return -drawn / 1000, drawn % 7 > 0


@given(st.lists(st.tuples(token_lists, token_lists), max_size=25), st.integers(1, 9), st.integers(1, 3))
def test_every_request_is_answered_by_what_was_asked_after_the_text_that_the_place_sees(pairs, batch, multiple):
    pairs = [(before, continuation[:CONTEXT]) for before, continuation in pairs]
    families = find_families(rows_of(pairs), 2 * CONTEXT)
    answered = {}
    for one in batches(
        families, batch * CONTEXT, context=CONTEXT, most=2 * CONTEXT, compile_tokens=50.0, pad=0, multiple=multiple
    ):
        values, best = np.zeros(one.at.shape), np.zeros(one.at.shape, bool)
        count, length = one.tokens.shape
        for part, column in np.ndindex(*one.at.shape):
            row, place = divmod(part * (count // len(one.at)) * length + one.at[part, column], length)
            own = np.isin(one.segments[row], [one.segments[row, place], one.parents[row, place]])
            text = one.tokens[row][own & (one.positions[row] <= one.positions[row, place])]
            values[part, column], best[part, column] = answer(tuple(text.tolist()), int(one.targets[part, column]))
        answered |= dict(one.answers(values, best))
    for index, (before, continuation) in enumerate(pairs):
        whole = (before + continuation)[-(CONTEXT + 1) :]
        start = len(whole) - len(continuation)
        expected = [answer(tuple(whole[:at]), whole[at]) for at in range(start, len(whole))]
        value, greedy = answered[index]
        assert abs(value - sum(one for one, _ in expected)) < 1e-6
        assert greedy == all(one for _, one in expected)


def test_the_length_of_rows_is_the_one_that_leaves_least_padding():
    for length, fitting in ((50, (5, 256)), (90, (2, 192)), (63, (2, 128))):
        families = [Family(0, (Row((1,) * length, 1, [2], [[i]]),)) for i in range(40)]
        made = batches(families, 10**6, context=512, most=256, compile_tokens=50.0, pad=0, multiple=1)
        assert {(len(row), one.tokens.shape[1]) for one in made for row in one.rows} == {fitting}


def test_kinds_that_cannot_be_joined_have_rows_of_their_own():
    made = batches(
        alone(3, 9, 30, 31, 5), 99, context=CONTEXT, most=80, compile_tokens=1, pad=0, multiple=1, packed=False
    )
    assert all(len(row) == 1 for one in made for row in one.rows) and not any(one.joined for one in made)
    assert max(one.tokens.shape[1] for one in made) <= CONTEXT
