"""Paired differences: items found again by their hash, intervals as scipy's, real changes told from noise."""

import json

import numpy as np
import pytest
from scipy import stats

from affinage.errors import UserError
from affinage.evaluation.benchmarks import JULIAN
from affinage.evaluation.compare import compare
from affinage.evaluation.published import headline_metrics, published


def write(folder, task, rows):
    (folder / "items").mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"id": n, "hash": key, "acc": value}) + "\n" for n, (key, value) in enumerate(rows)]
    (folder / "items" / f"{task}.jsonl").write_text("".join(lines))
    return folder


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
    assert found.stderr == pytest.approx(test._standard_error if hasattr(test, "_standard_error") else found.stderr)
    assert found.difference / found.stderr == pytest.approx(test.statistic)
    low, high = stats.norm.interval(0.95, found.difference, found.stderr)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-6)


def test_a_small_change_of_the_same_items_is_seen_where_two_error_bars_would_overlap(tmp_path):
    right = [int(n % 2) for n in range(400)]
    better = [1 if n % 40 == 0 else value for n, value in enumerate(right)]  # ten items more, none fewer
    keys = [str(n) for n in range(400)]
    one = write(tmp_path / "a", "boolq", zip(keys, right))
    two = write(tmp_path / "b", "boolq", zip(keys, better))
    (found,) = compare(one, two)
    assert found.is_real and found.difference == pytest.approx(0.025)
    assert 2 * np.sqrt(0.25 / 400) > found.difference, "unpaired, it would drown"
    (same,) = compare(one, one)
    assert not same.is_real and same.difference == 0


def test_equal_items_are_told_apart_by_their_order(tmp_path):
    one = write(tmp_path / "a", "t", [("x", 0), ("x", 1), ("y", 1)])
    two = write(tmp_path / "b", "t", [("x", 0), ("x", 0), ("y", 1)])
    assert compare(one, two)[0].difference == pytest.approx(-1 / 3)


def test_nothing_in_common_is_said(tmp_path):
    one, two = write(tmp_path / "a", "t", [("x", 0)]), write(tmp_path / "b", "u", [("x", 0)])
    with pytest.raises(UserError, match="no item of a benchmark in common"):
        compare(one, two)
    with pytest.raises(UserError, match="no results"):
        compare(one, tmp_path / "c")


def test_published_results_are_shares_of_known_tasks_with_a_source():
    assert len(published()) == 13 and set(headline_metrics()) == set(JULIAN)
    for model in published():
        assert set(model.scores) <= set(JULIAN) and all(0.1 < score < 0.8 for score in model.scores.values())
        assert model.source and model.tokens >= 10e9 and 1e8 < model.parameters < 2e9
    julian = next(model for model in published() if model.name == "Julian-600M SFT-30K")
    assert julian.tokens == 41e9 and julian.scores["boolq"] == 0.606 and "hellaswag" in julian.notes
