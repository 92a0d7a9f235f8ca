"""Rows that begin alike are joined: each still sees its own tokens alone, and is asked what it was asked."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from affinage.evaluation import families
from affinage.evaluation.families import Family, batches, find_families
from affinage.evaluation.rows import Row, group_requests

CONTEXT = 40
token_lists = st.lists(st.integers(1, 2), min_size=1, max_size=30)


def rows_of(pairs: list[tuple[list[int], list[int]]]) -> list[Row]:
    return group_requests([(before, continuation[:CONTEXT]) for before, continuation in pairs], CONTEXT)


@given(st.lists(st.tuples(token_lists, token_lists), max_size=25), st.integers(1, 9), st.integers(1, 3))
def test_a_batch_says_of_every_row_what_it_is_and_what_is_asked(pairs, batch, multiple):
    rows = rows_of(pairs)
    found = find_families(rows)
    assert sum(family.length for family in found) <= sum(len(row.tokens) for row in rows)
    made = batches(found, batch * CONTEXT, context=CONTEXT, compile_tokens=50.0, pad=0, multiple=multiple)
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


@given(st.lists(st.tuples(token_lists, token_lists), min_size=1, max_size=25))
def test_every_request_has_the_sum_of_what_its_tokens_got(pairs):
    rows = rows_of(pairs)
    answered = {}
    for family in find_families(rows):
        values, best = -np.arange(1.0, family.asked + 1), np.arange(family.asked) % 5 > 0
        start = 0
        for row in family.rows:
            for at, requests in enumerate(row.requests):
                mine = [*range(start, start + row.scored - 1), start + row.scored - 1 + at]
                expected = {request: (values[mine].sum(), bool(best[mine].all())) for request in requests}
                answered |= expected
            start += row.scored - 1 + len(row.candidates)
        assert dict(family.answers(values, best)).items() <= answered.items()
    assert sorted(answered) == list(range(len(pairs)))


def test_choices_of_a_question_and_beginnings_of_choices_are_shared(monkeypatch: pytest.MonkeyPatch):
    question, begun = list(range(1, 21)), [30, 31, 32]
    pairs = [
        (question, [*begun, 40, 50]),
        (question, [*begun, 41]),
        ([7] * 9, [8, 9]),
        (question, [*begun, 42, 51, 52]),
    ]
    joined, alone = sorted(find_families(group_requests(pairs, 99)), key=lambda family: -len(family.rows))
    assert joined.shared == 23 and len(joined.rows) == 3 and joined.length == 23 + 1 + 0 + 2
    assert alone.shared == 0 and alone.length == 10
    monkeypatch.setattr(families, "_ROOM", 0)
    long = [(question * 3, [end, *range(100, 115)]) for end in (40, 41, 42, 43)]
    assert [len(family.rows) for family in find_families(group_requests(long, 999))] == [2, 2], (
        "the longest row and a quarter"
    )


def test_kinds_that_cannot_be_joined_have_rows_of_their_own():
    rows = rows_of([([1] * length, [2, 3]) for length in (3, 9, 30, 31, 5)])
    made = batches(
        [Family(0, (row,)) for row in rows], 99, context=CONTEXT, compile_tokens=1, pad=0, multiple=1, packed=False
    )
    assert all(len(row) == 1 for one in made for row in one.rows) and not any(one.joined for one in made)
    assert max(one.tokens.shape[1] for one in made) <= CONTEXT
