"""Scores with and without the items that a model has seen."""

import json
from pathlib import Path

import pytest

from affinage.cli.program import main
from affinage.data.contamination import Contamination
from affinage.evaluation.results import contamination_of
from affinage.evaluation.run import evaluate
from choice_task import write_task
from tiny_models import tiny_llama

TINY = str(Path(__file__).parents[1] / "recipes" / "tiny.yaml")
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
        return Contamination(found, {"quiz": 6}, frozenset({"quiz"}), 5, common=common, items={"quiz": 9})

    results = evaluate(tiny_llama(), [name], folder=tmp_path / "out", seen=seen, limit=8)
    assert asked == [str(n) for n in range(9)]
    told = results["contamination"]["tasks"]["quiz"]
    assert told["found"] == [1, 2] and told["items"] == 8, "the item 8 was not asked"
    assert told["common"] == [5] and (told["too_short"], told["too_short_of"]) == (6, 9)
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
    seen = Contamination(frozenset(("quiz", one) for one in found), {}, frozenset({"quiz"}), 1)
    metrics, items = {metric: {"value": value, "stderr": 0.5}}, ITEMS if "," in metric else ITEMS[:4]
    told = contamination_of(seen, {"quiz": {"metrics": metrics}}, {"quiz": items})["tasks"]["quiz"]
    assert told["items"] == 4
    left = told["without"].get(metric)
    assert left == rest if rest is None else (left["value"], left["stderr"]) == pytest.approx(rest)


@pytest.mark.full
def test_a_run_tells_which_questions_its_documents_and_conversations_hold(tmp_path: Path, capsys):
    name = task(tmp_path)
    story = f"In the evening they tell each other stories. One of them says that {FACTS[0]}, and nobody believes it. "
    (tmp_path / "text.jsonl").write_text(json.dumps({"id": "a", "text": story + "Then they all go home and sleep."}))
    talks = [{"prompt": "Tell me of the town", "completion": f"Well: {FACTS[1]}."}] * 2
    talks += [{"prompt": f"Verse {n}", "completion": f"It is {n}. {FACTS[2]}."} for n in range(11)]
    talks += [{"prompt": f"Say {n}", "completion": f"{n} it is"} for n in range(20)]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    settings = [
        f"data.sources=[{{path: pocket-world, max_bytes: 0.05MB}}, '{tmp_path}/text.jsonl']",
        "data.split={validation_fraction: 0.02}",
        "data.decontaminate=null",
        "packing.seq_len=256",
        f"sft.sources=['{tmp_path}/talks.jsonl']",
        "sft.validation_fraction=0",
        "pretrain.steps=2",
        "sft.steps=1",
        "export=null",
        f"evaluate={{tasks: ['{name}'], batch_size: 16}}",
    ]
    words = [word for setting in settings for word in ("--set", setting)]
    with pytest.raises(SystemExit) as ended:
        main(["run", TINY, "--runs", str(tmp_path / "runs"), *words])
    assert ended.value.code == 0, capsys.readouterr().err
    run = tmp_path / "runs" / "tiny"
    found = {}
    for stage in ("evaluate-base", "evaluate-sft"):
        told = json.loads((run / stage / "results.json").read_text())["contamination"]["tasks"]["quiz"]
        found[stage] = told["found"], told["common"]
    assert found == {"evaluate-base": ([0], []), "evaluate-sft": ([0, 1], [2])}
    assert "3 / 4" in (run / "report.html").read_text()
