"""Scores with and without the items that a model has seen."""

import json
from pathlib import Path

import pytest

from affinage.data.decontaminate import Contamination
from affinage.evaluation.results import contamination_of
from affinage.evaluation.run import evaluate
from choice_task import write_task
from tiny_models import tiny_llama

FACTS = [
    "the old harbour master counted forty two grey gulls on the wall before the storm came in",
    "every second tuesday the baker of the lower town gives away his last three loaves of rye",
    "nobody in the valley remembers why the clock of the chapel has been nine minutes late since",
]


def task(folder: Path) -> str:
    told = [{"question": f"Is it true that {fact}?", "choices": ["yes", "no"], "right": 0} for fact in FACTS]
    told += [{"question": f"{n} plus {n} is", "choices": ["one", "two"], "right": n % 2} for n in range(6)]
    return str(write_task(folder, "quiz", told))


def test_scores_without_the_items_found_are_those_of_the_others(tmp_path: Path):
    name = task(tmp_path)
    asked: list[str] = []

    def seen(items) -> Contamination:  # type: ignore[no-untyped-def]
        asked.extend(item.id for item in items)
        found = frozenset({("quiz", "1"), ("quiz", "2"), ("quiz", "8")})
        common = frozenset({("quiz", "5")})
        return Contamination(frozenset({"quiz"}), 5, found, common)

    results = evaluate(tiny_llama(), [name], folder=tmp_path / "out", seen=seen, limit=8)
    assert asked == [str(n) for n in range(9)]
    told = results["contamination"]["tasks"]["quiz"]
    assert told["found"] == [1, 2] and told["items"] == 8, "the item 8 was not asked"
    assert told["common"] == [5]
    right = [json.loads(line)["acc"] for line in (tmp_path / "out/items/quiz.jsonl").read_text().splitlines()]
    rest = [value for number, value in enumerate(right) if number not in (1, 2, 5)]
    assert told["without"]["acc"]["value"] == pytest.approx(sum(rest) / 5)


ITEMS = [
    {"doc_id": n, "filter": f, "acc": 1.0 * (n != 1), "perplexity": log, "bleu": n, "exact_match": n * (f == "lower")}
    for f in ("none", "lower")
    for n, log in enumerate([-1.5, -4.0, -2.5, -3.5])
]


@pytest.mark.parametrize(
    ("found", "metric", "value", "rest"),
    [
        ("1", "acc", 0.75, (1.0, 0.0)),
        ("0123", "acc", 0.75, (None, None)),
        ("1", "bleu", 1.6, None),  # is not told by single items
        ("1", "perplexity", 17.7, None),
        ("0", "exact_match,none", 0.0, (0.0, 0.0)),
        ("0", "exact_match,lower", 1.5, (2.0, 1 / 3**0.5)),
    ],
)
def test_a_score_without_the_items_found_is_of_the_others(found: str, metric: str, value: float, rest: tuple | None):
    seen = Contamination(frozenset({"quiz"}), 1, frozenset(("quiz", one) for one in found))
    metrics, items = {metric: {"value": value, "stderr": 0.5}}, ITEMS if "," in metric else ITEMS[:4]
    told = contamination_of(seen, {"quiz": {"metrics": metrics}}, {"quiz": items})["tasks"]["quiz"]
    assert told["items"] == 4
    left = told["without"].get(metric)
    assert left == rest if rest is None else (left["value"], left["stderr"]) == pytest.approx(rest)
