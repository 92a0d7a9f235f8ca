"""Rows that begin alike are joined: each still sees its own tokens alone, and is asked what it was asked."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from affinage.evaluation.families import find_families
from affinage.evaluation.rows import Row, group_requests

CONTEXT = 40
token_lists = st.lists(st.integers(1, 2), min_size=1, max_size=30)


def rows_of(pairs: list[tuple[list[int], list[int]]]) -> list[Row]:
    return group_requests([(before, continuation[:CONTEXT]) for before, continuation in pairs], CONTEXT)


@given(st.lists(st.tuples(token_lists, token_lists), min_size=1, max_size=25))
def test_every_request_has_the_sum_of_what_its_tokens_got(pairs):
    rows = rows_of(pairs)
    answered = {}
    for family in find_families(rows, 2 * CONTEXT):
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


def test_choices_of_a_question_and_beginnings_of_choices_are_shared():
    question, begun = list(range(1, 21)), [30, 31, 32]
    pairs = [
        (question, [*begun, 40, 50]),
        (question, [*begun, 41]),
        ([7] * 9, [8, 9]),
        (question, [*begun, 42, 51, 52]),
    ]
    joined, alone = sorted(find_families(group_requests(pairs, 99), 198), key=lambda family: -len(family.rows))
    assert joined.shared == 23 and len(joined.rows) == 3 and joined.length == 23 + 1 + 0 + 2
    assert alone.shared == 0 and alone.length == 10


def test_a_family_is_no_longer_than_two_of_its_rows_nor_than_it_is_told():
    long = [([1] * 200, [end, *range(2, 72)]) for end in range(100, 110)]
    rows = group_requests(long, 999)
    assert [family.length for family in find_families(rows, 999)] == [200 + 4 * 70, 200 + 4 * 70, 200 + 2 * 70]
    assert [family.length for family in find_families(rows, 350)] == [200 + 2 * 70] * 5
    assert [len(family.rows) for family in find_families(rows, 270)] == [1] * 10, "no room for a second one"
