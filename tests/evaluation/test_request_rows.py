"""Rows built from requests: nothing lost, nothing scored twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from affinage.evaluation.rows import group_requests

token_lists = st.lists(st.integers(1, 4), min_size=1, max_size=12)


@given(st.lists(st.tuples(token_lists, token_lists), min_size=1, max_size=25))
def test_every_request_is_answered_by_a_row_that_says_its_tokens(pairs):
    rows = group_requests(pairs, context=16)
    answered = {}
    for row in rows:
        for candidate, requests in zip(row.candidates, row.requests, strict=True):
            for request in requests:
                assert request not in answered
                answered[request] = (*row.tokens, candidate), row.scored
    for index, (before, continuation) in enumerate(pairs):
        tokens, scored = answered[index]
        assert list(tokens) == (before + continuation)[-17:]
        assert scored == len(continuation)


def test_continuations_that_differ_in_their_last_token_share_a_row():
    pairs = [([1, 2], [3]), ([1, 2], [4]), ([1, 2], [3]), ([1], [2, 4]), ([1, 2], [5, 6])]
    rows = group_requests(pairs, context=8)
    assert [(row.tokens, row.scored, row.candidates, row.requests) for row in rows] == [
        ((1, 2), 1, [3, 4], [[0, 2], [1]]),
        ((1, 2), 2, [4], [[3]]),
        ((1, 2, 5), 2, [6], [[4]]),
    ]


@pytest.mark.parametrize("pair", [([], [1]), ([1], []), ([1], [2] * 9)])
def test_pairs_that_cannot_be_scored_are_refused(pair):
    with pytest.raises(ValueError):
        group_requests([pair], context=8)
