"""Training that stops by benchmarks: the test by itself, the judge by itself, and both on the road."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest

from affinage.cli.program import main
from affinage.evaluation.run import evaluate
from affinage.recipe.tuning import WatchSettings
from affinage.stages.models import open_model
from affinage.stages.watching import Watch, worse
from choice_task import write_items, write_task

TINY = str(Path(__file__).parents[1] / "recipes" / "tiny.yaml")


@pytest.mark.parametrize(("lost", "won"), [(0, 0), (5, 0), (9, 3), (3, 9), (40, 20)])
def test_the_probability_is_that_of_mcnemars_exact_test(lost: int, won: int):
    before = [1] * lost + [0] * won + [1, 0] * 10
    now = [0] * lost + [1] * won + [1, 0] * 10
    expected = binomtest(lost, lost + won, alternative="greater").pvalue if lost + won else 1.0
    assert worse(before, now) == pytest.approx(expected)


def test_scores_that_only_wander_rarely_stop_a_training(tmp_path: Path):
    """Four hundred trainings that change nothing, 20 looks at two tasks each: at most p of them are called worse."""
    called = 0
    for seed in range(400):
        draw, judge = random.Random(seed), watch(tmp_path, falling)
        for step in range(0, 191, 10):
            answers = {task: [int(draw.random() < 0.5) for _ in range(40)] for task in "ab"}
            if judge._worse(answers):
                called += 1
                break
            judge.looks.append({"step": step, "right": answers})
    assert called <= 8  # 0.01 of 400, and room for chance


def watch(folder: Path, score, **settings) -> Watch:  # type: ignore[no-untyped-def]
    folder.mkdir(parents=True, exist_ok=True)
    chosen = WatchSettings.model_validate({"tasks": ["a"], "every_steps": 10, "items": 40, **settings})
    return Watch(chosen, folder, 190, score, lambda step, state: (folder / f"kept-{step}").touch() if step else None)


def falling(step: int) -> dict[str, list[int]]:
    """All right up to step 20, then ever fewer."""
    wrong = max(0, step - 20)
    return {"a": [0] * wrong + [1] * (100 - wrong)}


def test_a_degradation_stops_it_and_what_was_before_is_kept(tmp_path: Path):
    judge = watch(tmp_path, falling)
    reasons = [(step, judge.look(step, step)) for step in (0, 10, 20, 30, 40)]  # type: ignore[arg-type]
    assert [step for step, reason in reasons if reason] == [40]
    assert "a is worse than at step 0" in reasons[-1][1]
    assert (tmp_path / "kept-30").exists() and not (tmp_path / "kept-40").exists()
    # Started again it says the same without a look, from another step it looks again.
    again = watch(tmp_path, lambda _: pytest.fail("looked again"))
    assert again.look(40, None) == reasons[-1][1]  # type: ignore[arg-type]
    back = watch(tmp_path, lambda _: {"a": [1] * 100})
    assert back.look(30, None) == "" and [look["step"] for look in back.looks] == [0, 10, 20, 30, 40]  # type: ignore[arg-type]
    assert watch(tmp_path / "other", falling, when_worse="tell").look(90, 90) == ""  # type: ignore[arg-type]


def run(runs: Path, *settings: str) -> None:
    common = ["data.sources=[{path: pocket-world, megabytes: 0.05}]", "pretrain.steps=2", "evaluate=null"]
    words = [word for setting in (*common, *settings) for word in ("--set", setting)]
    with pytest.raises(SystemExit) as ended:
        main(["sft", TINY, "--runs", str(runs), *words])
    assert ended.value.code == 0


def test_fine_tuning_ends_where_a_benchmark_falls(tmp_path: Path):
    """A benchmark of what the model says before it is taught to say something else."""
    run(tmp_path / "runs", "sft.steps=1")
    model = open_model("tiny/pretrain", tmp_path / "runs")
    # What the base model finds likelier is called right, so it begins with all of it.
    items = [{"question": f"Number {i} is", "choices": [f"the {i}th", f"une {i}"], "right": 0} for i in range(60)]
    task = write_task(tmp_path, "habit", items)
    evaluate(model, [str(task)], folder=tmp_path / "before")
    right = [json.loads(line)["acc"] for line in (tmp_path / "before/items/habit.jsonl").read_text().splitlines()]
    for item, was_right in zip(items, right, strict=True):
        item["right"] = 0 if was_right else 1
    write_items(tmp_path, items)

    wrong_way = tmp_path / "wrong.jsonl"
    talks = [
        {"prompt": "Say it", "completion": f"{item['question']} {item['choices'][1 - item['right']]}"} for item in items
    ]
    wrong_way.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    watched = f"sft.watch={{tasks: ['{task}'], every_steps: 20, items: 60, p: 0.05}}"
    teach = [f"sft.sources=['{wrong_way}']", "sft.steps=200", "sft.schedule={peak: 1.0e-2, floor: 1.0e-2}", watched]
    run(tmp_path / "runs", *teach)
    sft = tmp_path / "runs/tiny/sft"
    told = json.loads((sft / "watch.json").read_text())["looks"]
    summary = json.loads((sft / "summary.json").read_text())
    assert told[0]["scores"]["habit"]["value"] == 1.0 and told[-1]["worse"]
    assert summary["steps"] == told[-1]["step"] < 200 and "habit is worse than at step" in summary["ended"]
    losses = [json.loads(line) for line in (sft / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    assert losses[-1].get("loss", 0) < losses[0]["loss"]


def test_it_ends_when_its_rows_were_seen_once(tmp_path: Path):
    run(tmp_path / "runs", "sft.steps=500", "sft.max_epochs=1", "sft.held_out=0", "sft.sample=0.1")
    summary = json.loads((tmp_path / "runs/tiny/sft/summary.json").read_text())
    rows = sum(len(np.load(path)) for path in (tmp_path / "runs/tiny/conversations/train").rglob("rows-*.npy"))
    assert summary["steps"] == rows // 8 and "max_epochs" in summary["ended"]
