"""Benchmarks scored while a model is trained, and training that ends where one of them falls."""

import json
import random
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from scipy.stats import binomtest

import tiny
import tiny_run
from affinage.checkpoint import CheckpointStore
from affinage.config.load import load_recipe
from affinage.data.dataloader import DataLoader
from affinage.errors import UserWarned
from affinage.evaluation.run import evaluate
from affinage.generation.engine import LoadedModel
from affinage.pipeline.models import KEPT
from affinage.pipeline.monitor import POINTS, BenchmarkMonitor, mcnemar, right_items
from affinage.pipeline.opening import open_model
from affinage.pipeline.step import StepContext
from affinage.pipeline.steps_train import within_epochs
from affinage.report.facts import read_training
from affinage.results import TrainingResult
from affinage.training.state import TrainState
from choice_task import sums, write_task
from run_affinage import refused, run, set_words
from source_forms import write_lines
from tiny_models import tiny_llama

TINY = tiny_run.WORDS[0]


def lines(training: Path, kind: str) -> list[dict]:
    return [row for row in tiny.lines(training) if kind in row]


def weights(name: str, runs: Path) -> list[bytes]:
    return tiny.bits(open_model(name, runs).params)


def points_of(training: Path) -> list[dict[str, Any]]:
    return json.loads((training / POINTS).read_text())["points"]


@pytest.fixture(scope="module")
def runs(tiny_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the finished run, in which more is trained."""
    return tiny_run.copied(tiny_runs, tmp_path_factory.mktemp("monitor") / "runs")


# ---- the decision


def test_the_probability_is_that_of_mcnemars_exact_test():
    for lost, won in ((0, 0), (5, 0), (9, 3), (3, 9), (40, 20)):
        before, now = ([first] * lost + [1 - first] * won + [1, 0] * 10 for first in (1, 0))
        expected = binomtest(lost, lost + won, alternative="greater").pvalue if lost + won else 1.0
        assert mcnemar(before, now) == pytest.approx(expected)


def monitor(folder: Path, score: Callable, **settings: object) -> BenchmarkMonitor:
    folder.mkdir(parents=True, exist_ok=True)
    chosen = {"tasks": ["a"], "every_steps": 10, "limit": 40, "on_regression": "stop", **settings}
    training = load_recipe(TINY, ["sft.steps=190", f"sft.monitor={json.dumps(chosen)}"]).recipe.sft
    tried = BenchmarkMonitor(SimpleNamespace(folder=folder, saves_to=folder), training, None, 8)
    tried.score, tried.keep = score, lambda step, state: (folder / f"kept-{step}").touch()
    return tried


def falling(step: int, _: Callable[[], bool] = bool) -> tuple[dict, dict[str, list[int]]]:
    """All right up to step 20, then ever fewer."""
    wrong = max(0, step - 20)
    return {"a": {}}, {"a": [0] * wrong + [1] * (100 - wrong)}


def test_scores_that_only_wander_rarely_stop_a_training(tmp_path: Path):
    """Two hundred trainings that change nothing, 20 points of two tasks each: at most `alpha` of them are stopped."""
    stopped, tried = 0, monitor(tmp_path, falling)
    for seed in range(200):
        draw, tried.points = random.Random(seed), []
        for step in range(0, 191, 10):
            answers = {task: [int(draw.random() < 0.5) for _ in range(40)] for task in "ab"}
            if tried.regressed(answers):
                stopped += 1
                break
            tried.points.append({"step": step, "right": answers})
    assert stopped <= 5  # 0.01 of 200, and room for chance


def test_a_degradation_stops_it_and_what_was_before_is_kept(tmp_path: Path):
    tried, shown = monitor(tmp_path, falling), []
    tried.say = shown.append
    reasons = {step: tried.look(step, step, bool)[1] for step in (0, 10, 20, 30, 40)}
    assert [step for step, reason in reasons.items() if reason] == [40]
    assert "a is worse than at step 0" in reasons[40] and len(shown) == 5 and reasons[40].split("; ")[0] in shown[-1]
    assert sorted(path.name for path in tmp_path.glob("kept-*")) == ["kept-0", "kept-10", "kept-20", "kept-30"]
    # Started again it decides the same without a score; from another step it scores again.
    assert monitor(tmp_path, lambda *_: pytest.fail("scored again")).look(40, None, bool)[1] == reasons[40]
    back = monitor(tmp_path, lambda *_: falling(0))
    assert back.look(30, None, bool)[1] == "" and [point["step"] for point in back.points] == [0, 10, 20, 30, 40]
    assert monitor(tmp_path / "other", falling, on_regression="log").look(90, 90, bool)[1] == ""


def test_after_a_rollback_the_scores_and_the_model_of_the_way_not_taken_are_gone(tmp_path: Path):
    tried, kept = monitor(tmp_path, lambda state, _: falling(0)), CheckpointStore(tmp_path / KEPT)
    del tried.keep  # the class's own
    states = {step: TrainState(np.int32(step), {"w": jax.numpy.full(2, step)}, ()) for step in (0, 10, 15, 20)}
    assert not any(tried.look(step, states[step], bool)[1] for step in (0, 10, 20))
    tried.rolled_back(15, states[15])
    assert [point["step"] for point in points_of(tmp_path)] == [0, 10] and kept.steps() == [15]
    tried.look(20, states[10], bool)
    assert kept.steps() == [20] and tiny.bits(kept.restore(20, kept.abstract(20))) == tiny.bits(states[10].params)


def test_an_item_is_one_trial_however_many_filters_its_answer_goes_through(tmp_path: Path):
    task = write_task(tmp_path, "sums", sums(6))
    kinds = "".join(f"- {{name: {name}, filter: [{{function: take_first}}]}}\n" for name in ("strict", "flexible"))
    task.write_text(f"{task.read_text()}filter_list:\n{kinds}")
    evaluate(tiny_llama(), [str(task)], folder=tmp_path)
    found = tiny.lines(tmp_path / "items", "sums.jsonl")
    assert len(found) == 12 and right_items(found) == [line["acc"] for line in found[:6]]
    # Where filters do not agree, the first one counts, as in the harness's own tables.
    items = [{"id": n, "exact_match": float(n < 2 or flexible)} for flexible in (False, True) for n in (2, 0, 1)]
    assert right_items(items) == [1, 1, 0] and right_items([{"id": 0, "bleu": 0.5}]) is None


def test_a_training_ends_when_its_rows_were_seen_often_enough_or_is_warned_of(tiny_runs: Path, answer):
    """With the schedule; and a plan says the same."""
    loaded = load_recipe(TINY, ["sft.steps=500", "sft.num_epochs=2", "sft.schedule.warmup_steps=50"]).recipe
    feed: Any = DataLoader.__new__(DataLoader)
    feed.epochs = lambda steps: {"much": steps / 100, "few": steps / 10}
    with pytest.warns(UserWarned, match=r"sft makes 20 of 500 steps.*set sft.num_epochs=50, or null"):
        fitted = within_epochs(loaded.sft, feed, "sft")
    assert (fitted.steps, fitted.schedule.warmup_steps) == (20, 2)
    warned = pytest.warns(UserWarned, match="pretrain reads its data 226 times")
    for often, seen in ((40, nullcontext()), (226, warned)):
        feed = SimpleNamespace(epochs=lambda steps, often=often: {"much": 1.0, "few": often})
        with seen:
            assert within_epochs(loaded.pretrain, feed, "pretrain") == loaded.pretrain
    often, half = ["pretrain.steps=6000", "pretrain.mixture={fr: 1}"], ["sft.steps=500", "sft.num_epochs=0.5"]
    words = "plan", "tiny", "--runs", str(tiny_runs), "--on", "v5e-1"
    for name, rows, given in (("pretrain", "tokenize", often), ("sft", "sft-data", half)):
        told, asked = answer(*words, "--training", name, *set_words(*given)), load_recipe(TINY, given).recipe
        mixture = [(0, {"fr": 1})] if name == "pretrain" else None
        feed = DataLoader(tiny_runs / "tiny" / rows / "train", seed=0, batch=8, mixture=mixture)
        with pytest.warns(UserWarned, match=told["warnings"][0].partition(":")[0]):
            steps = within_epochs(getattr(asked, name), feed, name).steps
        assert told["facts"]["steps"] == steps and told["facts"]["epochs"] == max(feed.epochs(steps).values())
    # Of a mixture of other rows, which are still to be made.
    assert answer(*words, *set_words("pretrain.mixture={elsewhere: 1}"))["facts"]["epochs"] is None


# ---- pretraining


def test_a_training_with_benchmarks_has_the_bits_of_one_without_and_scores_its_checkpoints(runs: Path, tiny_runs: Path):
    """The shared run's pretraining, made again, with sums scored at three steps: 12 of 30, drawn by the seed."""
    task = write_task(runs / "task", "sums", sums(30))
    setting = f"pretrain.monitor={{tasks: ['{task}'], every_steps: 10, limit: 12}}"
    run("run", TINY, "--runs", runs, "--until", "pretrain", "--force", "pretrain", settings=[setting])
    scored, without = (each / "tiny/pretrain" for each in (runs, tiny_runs))
    assert weights("tiny/pretrain", runs) == weights("tiny/pretrain", tiny_runs)
    assert [row["loss"] for row in lines(scored, "loss")] == [row["loss"] for row in lines(without, "loss")]
    assert scored.resolve().name == without.resolve().name, "they are not two results"

    rows = lines(scored, "evaluation")
    assert [row["step"] for row in rows] == [0, 10, 20] == [point["step"] for point in points_of(scored)]
    again = evaluate(open_model("tiny/pretrain", runs), [str(task)], sample_seed=0, limit=12)
    assert rows[-1]["evaluation"]["tasks"] == {"sums": again["tasks"]["sums"]["metrics"]}
    assert [point.step for point in read_training("pretrain", scored, TrainingResult(), {}).points] == [0, 10, 20]


# ---- tuning


@pytest.fixture(scope="module")
def base(runs: Path) -> SimpleNamespace:
    """A benchmark of what the base model says before it is taught to say something else."""
    items = [{"question": f"Number {i} is", "choices": [f"le {i}", f"la {i}"], "right": 0} for i in range(60)]
    task = write_task(runs / "habit-task", "habit", items)
    for item, was_right in zip(items, answers(open_model("tiny/pretrain", runs), task, runs / "before"), strict=True):
        item["right"] = 0 if was_right else 1  # what it finds likelier is called right, so it begins with all of it
    write_lines(task.with_name("items.jsonl"), items)
    return SimpleNamespace(runs=runs, task=task, items=items)


def answers(model: LoadedModel, task: Path, folder: Path) -> list[int]:
    """Which items of the task the model has right, when it is evaluated as any model is."""
    evaluate(model, [str(task)], folder=folder)
    return [int(row["acc"]) for row in tiny.lines(folder / "items", f"{task.stem}.jsonl")]


def watched(base: SimpleNamespace, **settings: object) -> dict[str, object]:
    chosen = {"tasks": [str(base.task)], "every_steps": 40, "limit": 60, "alpha": 0.05, "on_regression": "stop"}
    return chosen | settings


def said(item: dict[str, Any], choice: int) -> str:
    return f"{item['question']} {item['choices'][choice]}"


def taught(base: SimpleNamespace, **settings: object) -> list[str]:
    """Settings of a fine-tuning on what is wrong."""
    talks = [{"prompt": "Say it", "completion": said(item, 1 - item["right"])} for item in base.items]
    write_lines(base.runs / "wrong.jsonl", talks)
    schedule, saved = "{peak_lr: 1.0e-2, min_lr: 1.0e-2}", "runtime.checkpoint={every_steps: 40, keep_last: 2}"
    words = [f"sft.sources=['{base.runs}/wrong.jsonl']", "sft.steps=80", "sft.eval_every=40"]
    return [*words, f"sft.schedule={schedule}", saved, f"sft.monitor={json.dumps(watched(base, **settings))}"]


@pytest.fixture(scope="module")
def habit(base: SimpleNamespace) -> SimpleNamespace:
    """A fine-tuning on the benchmark's wrong answers, that is stopped."""
    settings = ["name=habit", *taught(base)]
    run("sft", TINY, "--runs", base.runs, settings=settings)
    return SimpleNamespace(runs=base.runs, sft=base.runs / "habit/sft", settings=settings)


def test_fine_tuning_ends_where_a_benchmark_falls_with_the_model_of_the_last_good_score(habit: SimpleNamespace):
    """Here that is the score before the first step: what comes after it has the weights that it began with."""
    summary, points = json.loads((habit.sft / "summary.json").read_text()), points_of(habit.sft)
    assert points[0]["scores"]["habit"]["value"] == 1.0
    assert [(point["step"], bool(point["worse"])) for point in points] == [(0, False), (40, True)]
    assert summary["steps"] == 40 and summary["ended"] == "monitor"
    assert summary["final_loss"] < summary["first_loss"]
    found = {name: weights(name, habit.runs) for name in ("habit/sft", "habit/pretrain", "habit/sft@40")}
    assert found["habit/sft"] == found["habit/pretrain"] != found["habit/sft@40"]


def test_an_evaluation_that_was_stopped_is_repeated_with_the_same_decision(habit, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("affinage.evaluation.run.default_batch", lambda _: 1)
    loaded = load_recipe(TINY, habit.settings)
    context = StepContext(loaded, tmp_path, {"train-tokenizer": habit.runs / "habit/train-tokenizer"}, tmp_path)
    model, before, left = open_model("habit/sft@40", habit.runs), points_of(habit.sft), [2]
    shutil.copy(habit.sft / POINTS, tmp_path)
    (tmp_path / POINTS).write_text(json.dumps({"points": before[:1]}))

    def after_the_first_batch() -> bool:
        left[0] -= 1
        return left[0] == 0

    def look(stop: Callable[[], bool], settings: Any = loaded.recipe.sft) -> str:
        tried = BenchmarkMonitor(context, settings, model.graph, model.context)
        state = jax.device_put(TrainState(np.int32(40), model.params, ()), jax.devices()[0])
        return tried.look(40, state, stop)[1]

    assert look(after_the_first_batch) == "" and len(points_of(tmp_path)) == 1
    assert "habit is worse than at step 0" in look(bool)
    assert points_of(tmp_path) == before
    (tmp_path / POINTS).unlink()
    gone = load_recipe(TINY, [*habit.settings, "sft.monitor.tasks=[gone.yaml]"]).recipe.sft
    assert refused(look, bool, gone).where == f"{context.step}.monitor.tasks: gone.yaml"
    talk = write_task(tmp_path / "talk", "talk", sums(4), tag=["chat"])
    chat = load_recipe(TINY, [*habit.settings, f"sft.monitor.tasks=['{talk}']"]).recipe.sft
    assert look(bool, chat) == "" and list(points_of(tmp_path)[0]["right"]) == ["talk"], "a chat model answers it"


@pytest.mark.full
def test_with_keep_best_training_goes_on_and_preferences_begin_with_the_best_score(base: SimpleNamespace):
    """And these are adapters, which are scored in the model that they make, and stop where it falls."""
    pairs = [
        {"prompt": f"Say {n}", "chosen": said(item, 1 - item["right"]), "rejected": said(item, item["right"])}
        for n, item in enumerate(base.items)
    ]
    write_lines(base.runs / "pairs.jsonl", pairs)
    dpo = {"sources": [str(base.runs / "pairs.jsonl")], "steps": 80, "batch_size": 8, "lora": {"r": 8}}
    dpo |= {"schedule": {"peak_lr": 1e-2, "min_lr": 1e-2}, "num_epochs": None}
    settings = [*taught(base, on_regression="keep_best"), f"dpo={json.dumps(dpo | {'monitor': watched(base)})}"]
    run("dpo", TINY, "--runs", base.runs, settings=["name=preferred", *settings])
    tuned, preferred = base.runs / "preferred/sft", base.runs / "preferred/dpo"
    summary = json.loads((tuned / "summary.json").read_text())
    assert summary["steps"] == 80 and summary["ended"] == ""
    assert [(each["step"], bool(each["worse"])) for each in points_of(tuned)] == [(0, False), (40, True), (80, True)]
    assert weights("preferred/sft", base.runs) == weights("preferred/pretrain", base.runs)
    first, *_, last = points_of(preferred)
    assert first["scores"]["habit"]["value"] == 1.0 > last["scores"]["habit"]["value"]
    summary = json.loads((preferred / "summary.json").read_text())
    assert summary["steps"] == last["step"] < 80 and summary["ended"] == "monitor"
    model = open_model(f"preferred/dpo@{last['step']}", base.runs)
    assert last["right"]["habit"] == answers(model, base.task, base.runs / "scored") != first["right"]["habit"]
    # And the adapters that are kept, of the first score, add nothing.
    assert weights("preferred", base.runs) == weights("preferred/sft", base.runs)
