"""Rows that begin alike are joined: each still sees its own tokens alone, and is asked what it was asked."""

from affinage.evaluation.families import find_families
from affinage.evaluation.rows import group_requests


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
    assert joined.asked == 3 + 2 + 1 + 3 and alone.asked == 2, "three tokens that all choices begin with are asked once"


def test_a_family_is_no_longer_than_two_of_its_rows_nor_than_it_is_told():
    long = [([1] * 200, [end, *range(2, 72)]) for end in range(100, 110)]
    rows = group_requests(long, 999)
    assert [family.length for family in find_families(rows, 999)] == [200 + 4 * 70, 200 + 4 * 70, 200 + 2 * 70]
    assert [family.length for family in find_families(rows, 350)] == [200 + 2 * 70] * 5
    assert [len(family.rows) for family in find_families(rows, 270)] == [1] * 10, "no room for a second one"
