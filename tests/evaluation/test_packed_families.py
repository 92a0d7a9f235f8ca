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
        assert len(one.at) == multiple
        column, of_part = 0, len(one.tokens) // multiple
        for index, packed in enumerate(one.rows):
            part, number = index // of_part, 0
            column = 0 if index % of_part == 0 else column
            before = index % of_part * one.tokens.shape[1]
            for family in packed:
                number += 1
                parent = number
                for row in family.rows:
                    number += 1
                    mine = np.flatnonzero(np.isin(one.segments[index], [number, parent]))
                    assert (one.parents[index, mine] == parent).all()
                    assert one.tokens[index, mine].tolist() == list(row.tokens)
                    assert one.positions[index, mine].tolist() == list(range(len(row.tokens)))
                    asked = slice(column, column + row.scored - 1 + len(row.candidates))
                    following = [*row.tokens[len(row.tokens) - row.scored + 1 :], *row.candidates]
                    assert one.targets[part, asked].tolist() == following
                    places = list(range(len(row.tokens) - row.scored, len(row.tokens)))
                    places += places[-1:] * (len(row.candidates) - 1)
                    at = one.at[part, asked] - before
                    assert one.positions[index, at].tolist() == places
                    assert np.isin(at, mine).all()
                    column = asked.stop
                    seen.append((row.tokens, row.scored))
    assert sorted(seen) == sorted((row.tokens, row.scored) for row in rows)


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
