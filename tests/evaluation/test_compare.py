"""Paired differences: items found again by their hash, intervals as scipy's, real changes told from noise."""

import numpy as np
import pytest
from scipy import stats

from affinage.evaluation.results import compare, read_answers
from run_affinage import refused
from source_forms import write_lines


def lines(folder, task, *rows):
    """A folder of results with one task, whose items have these lines."""
    write_lines(folder / "items" / f"{task}.jsonl", rows)
    return read_answers(folder)


def write(folder, task, rows):
    return lines(folder, task, *({"id": n, "hash": key, "acc": value} for n, (key, value) in enumerate(rows)))


def test_differences_are_paired_over_the_items_that_both_have(tmp_path):
    random = np.random.default_rng(0)
    a, b = random.integers(0, 2, 200), random.integers(0, 2, 200)
    keys = [f"h{n}" for n in range(200)]
    one = write(tmp_path / "a", "piqa", [*zip(keys, a.tolist()), ("only a", 1)])
    order = random.permutation(200)
    two = write(tmp_path / "b", "piqa", [(keys[n], int(b[n])) for n in order])
    (found,) = compare(one, two)
    assert (found.items, found.unmatched) == (200, 1)
    test = stats.ttest_rel(b, a)
    assert found.difference == pytest.approx((b - a).mean()) and found.b - found.a == pytest.approx(found.difference)
    assert found.difference / found.stderr == pytest.approx(test.statistic)
    assert (found.low, found.high) == pytest.approx(tuple(test.confidence_interval(0.95)), abs=1e-6)
    better, worse = int(((b - a) > 0).sum()), int(((b - a) < 0).sum())
    assert found.p == pytest.approx(stats.binomtest(better, better + worse).pvalue)  # McNemar's exact test


def test_a_few_items_prove_little_and_identical_answers_differ_in_nothing(tmp_path):
    all_right, all_wrong = [(f"{n}", 1) for n in range(2)], [(f"{n}", 0) for n in range(2)]
    (found,) = compare(write(tmp_path / "a", "t", all_wrong), write(tmp_path / "b", "t", all_right))
    assert found.difference == 1 and found.p == pytest.approx(0.5) and not found.is_real
    (same,) = compare(write(tmp_path / "c", "t", all_right), write(tmp_path / "d", "t", all_right))
    assert same.difference == same.stderr == 0 and not same.is_real


def test_answers_read_by_two_filters_are_two_scores_of_the_same_items(tmp_path):
    def of(name, **right):
        scored = ((n, kind, value) for kind, values in right.items() for n, value in enumerate(values))
        rows = ({"hash": f"{n}", "filter": kind, "exact_match": value} for n, kind, value in scored)
        return lines(tmp_path / name, "gsm8k", *rows)

    found = compare(of("a", strict=(0, 0, 1), flexible=(1, 1, 1)), of("b", strict=(1, 0, 1), flexible=(1, 1, 1)))
    differences = {each.metric: (each.items, each.difference) for each in found}
    assert differences == {"exact_match,strict": (3, pytest.approx(1 / 3)), "exact_match,flexible": (3, 0)}


def test_tasks_that_were_not_asked_alike_are_named(tmp_path):
    def of(folder, task, prompts, answer="t"):
        rows = [{"hash": str(n), "prompt_hash": p, "target_hash": answer, "acc": 1} for n, p in enumerate(prompts)]
        return lines(tmp_path / folder, task, *rows)

    def asked_otherwise(other):
        return [(each.task, each.asked_otherwise) for each in compare(zero, other)]

    zero = of("zero", "boolq", ["a", "b", "c"])
    assert asked_otherwise(zero) == [("boolq", 0)]
    assert asked_otherwise(of("few", "boolq", ["a", "more b", "more c"])) == [("boolq", 2)]
    assert asked_otherwise(of("mended", "boolq", ["a", "b", "c"], answer="u")) == [("boolq", 3)]


def test_what_cannot_be_compared_is_refused(tmp_path):
    one, two = write(tmp_path / "a", "t", [("x", 0)]), write(tmp_path / "b", "u", [("x", 0)])
    unscored = lines(tmp_path / "c", "t", *({"hash": str(n), "filter": "none", "bleu": None} for n in range(3)))
    for wrong in (lambda: compare(one, two), lambda: compare(unscored, unscored), lambda: read_answers(tmp_path / "d")):
        assert refused(wrong).fix
