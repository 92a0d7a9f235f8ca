"""Requests become rows, rows families, families batches: nothing is lost, seen by another, or asked twice."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from affinage.evaluation.buckets import bucket_lengths, round_up
from affinage.evaluation.families import Family, find_families
from affinage.evaluation.packing import batches
from affinage.evaluation.rows import Row, group_requests

CONTEXT = 40
token_lists = st.lists(st.integers(1, 2), min_size=1, max_size=30)
many_pairs = st.lists(st.tuples(token_lists, token_lists), max_size=25)


def rows_of(pairs):
    return group_requests([(before, continuation[:CONTEXT]) for before, continuation in pairs], CONTEXT)


def packed(families, batch, multiple=1):
    told = {"context": CONTEXT, "most": 2 * CONTEXT, "compile_tokens": 50.0, "pad": 0, "multiple": multiple}
    return batches(families, batch * CONTEXT, **told)


@given(many_pairs.filter(bool))
def test_every_request_is_answered_by_a_row_that_says_its_tokens(pairs):
    answered = {}
    for row in group_requests(pairs, context=30):
        for candidate, requests in zip(row.candidates, row.requests, strict=True):
            assert not answered.keys() & set(requests)
            answered |= dict.fromkeys(requests, ((*row.tokens, candidate), row.scored))
    for index, (before, continuation) in enumerate(pairs):
        assert answered[index] == (tuple((before + continuation)[-31:]), len(continuation))


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


def test_choices_of_a_question_and_beginnings_of_choices_are_shared():
    question, begun = list(range(1, 21)), [30, 31, 32]
    ends = ([40, 50], [41], [42, 51, 52])
    pairs = [*((question, [*begun, *end]) for end in ends), ([7] * 9, [8, 9])]
    joined, alone = sorted(find_families(group_requests(pairs, 99), 198), key=lambda family: -len(family.rows))
    assert joined.shared == 23 and len(joined.rows) == 3 and joined.length == 23 + 1 + 0 + 2
    assert alone.shared == 0 and alone.length == 10
    assert joined.asked == 3 + 2 + 1 + 3 and alone.asked == 2, "three tokens that all choices begin with are asked once"


def test_a_family_is_no_longer_than_two_of_its_rows_nor_than_it_is_told():
    rows = group_requests([([1] * 200, [end, *range(2, 72)]) for end in range(100, 110)], 999)
    assert [family.length for family in find_families(rows, 999)] == [200 + 4 * 70, 200 + 4 * 70, 200 + 2 * 70]
    assert [family.length for family in find_families(rows, 350)] == [200 + 2 * 70] * 5
    assert [len(family.rows) for family in find_families(rows, 270)] == [1] * 10, "no room for a second one"


@settings(max_examples=25)
@given(many_pairs, st.integers(1, 9), st.integers(1, 3))
def test_each_row_of_a_batch_sees_its_own_tokens_alone(pairs, batch, multiple):
    rows = rows_of(pairs)
    found = find_families(rows, 2 * CONTEXT)
    assert sum(family.length for family in found) <= sum(len(row.tokens) for row in rows)
    made = packed(found, batch, multiple)
    assert [one.tokens.size for one in made] == sorted((one.tokens.size for one in made), reverse=True)
    seen = []
    for one in made:
        count, length = one.tokens.shape
        assert count % multiple == 0 and len(one.rows) <= count and len(one.at) in (multiple, count)
        assert count == multiple or count * length <= batch * CONTEXT * min(1, CONTEXT / length)
        for index, families in enumerate(one.rows):
            number = 0
            for family in families:
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


@settings(max_examples=25)
@given(many_pairs, st.integers(1, 9), st.integers(1, 3))
def test_every_request_is_answered_by_what_was_asked_after_the_text_that_the_place_sees(pairs, batch, multiple):
    answered = {}
    for one in packed(find_families(rows_of(pairs), 2 * CONTEXT), batch, multiple):
        values, best = np.zeros(one.at.shape), np.zeros(one.at.shape, bool)
        count, length = one.tokens.shape
        for part, column in np.ndindex(*one.at.shape):
            row, place = divmod(part * (count // len(one.at)) * length + one.at[part, column], length)
            own = np.isin(one.segments[row], [one.segments[row, place], one.parents[row, place]])
            text = one.tokens[row][own & (one.positions[row] <= one.positions[row, place])]
            values[part, column], best[part, column] = answer(tuple(text.tolist()), int(one.targets[part, column]))
        answered |= dict(one.answers(values, best))
    for index, (before, continuation) in enumerate(pairs):
        whole = (before + continuation[:CONTEXT])[-(CONTEXT + 1) :]
        start = len(whole) - len(continuation[:CONTEXT])
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
    families = [Family(0, (row,)) for row in rows_of([([1] * (n - 1), [2, 3]) for n in (3, 9, 30, 31, 5)])]
    told = {"context": CONTEXT, "most": 80, "compile_tokens": 1, "pad": 0, "multiple": 1}
    made = batches(families, 99, packed=False, **told)
    assert all(len(row) == 1 for one in made for row in one.rows) and not any(one.joined for one in made)
    assert max(one.tokens.shape[1] for one in made) <= CONTEXT


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.sampled_from([0.0, 5.0, 40.0, 1e6]))
def test_no_other_choice_of_bucket_lengths_is_cheaper(lengths, compile_tokens):
    def cost(buckets):
        return sum(round_up(length, buckets) for length in lengths) + compile_tokens * len(buckets)

    chosen = bucket_lengths(lengths, compile_tokens=compile_tokens, longest=60)
    sizes = sorted({min(-(-length // 8) * 8, 60) for length in lengths})
    others = [[*some, sizes[-1]] for count in range(len(sizes)) for some in combinations(sizes[:-1], count)]
    assert chosen == sorted(set(chosen)) and chosen[-1] == sizes[-1]
    assert cost(chosen) == min(map(cost, others))


def test_nothing_needs_no_bucket():
    assert bucket_lengths([], compile_tokens=1, longest=8) == []
