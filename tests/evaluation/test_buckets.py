"""The chosen bucket lengths are the cheapest ones, checked against every possible choice."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from affinage.evaluation.buckets import bucket_lengths, round_up


def cost(buckets, lengths, compile_tokens):
    return sum(round_up(length, buckets) for length in lengths) + compile_tokens * len(buckets)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.sampled_from([0.0, 5.0, 40.0, 1e6]))
def test_no_other_choice_is_cheaper(lengths, compile_tokens):
    chosen = bucket_lengths(lengths, compile_tokens=compile_tokens, longest=60)
    sizes = sorted({min(-(-length // 8) * 8, 60) for length in lengths})
    others = [[*some, sizes[-1]] for count in range(len(sizes)) for some in combinations(sizes[:-1], count)]
    best = min(cost(other, lengths, compile_tokens) for other in others)
    assert chosen == sorted(set(chosen)) and chosen[-1] == sizes[-1]
    assert cost(chosen, lengths, compile_tokens) == best


def test_cheap_compilations_give_many_buckets_and_dear_ones_a_single_bucket():
    lengths = [8] * 100 + [64] * 100
    assert bucket_lengths(lengths, compile_tokens=10, longest=64) == [8, 64]
    assert bucket_lengths(lengths, compile_tokens=1e9, longest=64) == [64]
    assert bucket_lengths([], compile_tokens=1, longest=8) == []
