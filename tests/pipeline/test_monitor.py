"""Benchmarks scored while a model is trained, and training that ends where one of them falls."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import binomtest
from sqlitedict import SqliteDict

import tiny_run
from affinage.cli.program import main
from affinage.config.load import load_recipe
from affinage.config.training import MonitorSettings
from affinage.errors import UserError
from affinage.evaluation import scoring
from affinage.evaluation.run import evaluate
from affinage.evaluation.scoring import MAX_ROWS
from affinage.generation.model import LoadedModel
from affinage.pipeline.build import build_steps
from affinage.pipeline.models import open_model
from affinage.pipeline.monitor import (
    ANSWERS,
    POINTS,
    BenchmarkMonitor,
    free_batch_size,
    mcnemar,
    monitor_of,
    right_items,
)
from affinage.pipeline.step import StepContext
from affinage.pipeline.steps_train import epochs_exceeded, within_epochs
from affinage.report.trainings import read_training
from affinage.results import TrainingResult
from affinage.training.evaluator import bits_by_language
from affinage.training.state import TrainState
from choice_task import sums, write_items, write_task
from tiny_models import tiny_llama

TINY = tiny_run.WORDS[0]
SUMS = "{{tasks: ['{}'], every_steps: 10, limit: 12}}"  # 12 of 30 each time


def affinage(verb: str, runs: Path, *settings: str, options: tuple[str, ...] = (), status: int = 0) -> None:
    words = [word for setting in settings for word in ("--set", setting)]
    with pytest.raises(SystemExit) as ended:
        main([verb, TINY, "--runs", str(runs), *words, *options])
    assert (ended.value.code or 0) == status


def lines(training: Path, kind: str) -> list[dict]:
    rows = [json.loads(line) for line in (training / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if kind in row]


def weights(name: str, runs: Path) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(open_model(name, runs).params)]


def looks_of(training: Path) -> list[dict[str, Any]]:
    return json.loads((training / POINTS).read_text())["points"]


def go_on() -> bool:
    return False


class StopsAfter:
    """Asked between batches, it stops a look at the question of this number."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self) -> bool:
        self.left -= 1
        return self.left == 0


def answers_in(file: Path) -> dict[str, Any]:
    """What has been answered of a look."""
    answers = SqliteDict(str(file), flag="r", decode=json.loads)
    found = dict(answers)
    answers.close()
    return found


@pytest.fixture(scope="module")
def runs(tiny_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the finished run, in which more is trained."""
    return tiny_run.copied(tiny_runs, tmp_path_factory.mktemp("watching") / "runs")


# ---- the test and the judge


@pytest.mark.parametrize(("lost", "won"), [(0, 0), (5, 0), (9, 3), (3, 9), (40, 20)])
def test_the_probability_is_that_of_mcnemars_exact_test(lost: int, won: int):
    before = [1] * lost + [0] * won + [1, 0] * 10
    now = [0] * lost + [1] * won + [1, 0] * 10
    expected = binomtest(lost, lost + won, alternative="greater").pvalue if lost + won else 1.0
    assert mcnemar(before, now) == pytest.approx(expected)


def watch(folder: Path, score: Callable, **settings: object) -> BenchmarkMonitor:
    folder.mkdir(parents=True, exist_ok=True)
    chosen = MonitorSettings.model_validate(
        {"tasks": ["a"], "every_steps": 10, "limit": 40, "on_regression": "stop", **settings}
    )
    return BenchmarkMonitor(chosen, folder, 190, score, lambda step, state: (folder / f"kept-{step}").touch())


def falling(step: int, _: Callable[[], bool]) -> tuple[dict, dict[str, list[int]]]:
    """All right up to step 20, then ever fewer."""
    wrong = max(0, step - 20)
    return {"a": {}}, {"a": [0] * wrong + [1] * (100 - wrong)}


def test_scores_that_only_wander_rarely_stop_a_training(tmp_path: Path):
    """Two hundred trainings that change nothing, 20 looks at two tasks each: at most p of them are called worse."""
    called = 0
    for seed in range(200):
        draw, judge = random.Random(seed), watch(tmp_path, falling)
        for step in range(0, 191, 10):
            answers = {task: [int(draw.random() < 0.5) for _ in range(40)] for task in "ab"}
            if judge.regressed(answers):
                called += 1
                break
            judge.points.append({"step": step, "right": answers})
    assert called <= 5  # 0.01 of 200, and room for chance


def test_a_degradation_stops_it_and_what_was_before_is_kept(tmp_path: Path):
    judge, told = watch(tmp_path, falling), []
    judge.say = told.append
    reasons = {step: judge.look(step, step, go_on)[1] for step in (0, 10, 20, 30, 40)}
    assert [step for step, reason in reasons.items() if reason] == [40]
    assert "a is worse than at step 0" in reasons[40]
    assert len(told) == 5 and all(reason in told[-1] for reason in reasons[40].split("; "))
    assert sorted(path.name for path in tmp_path.glob("kept-*")) == ["kept-0", "kept-10", "kept-20", "kept-30"]
    # Started again it says the same without a look, from another step it looks again.
    again = watch(tmp_path, lambda *_: pytest.fail("looked again"))
    assert again.look(40, None, go_on)[1] == reasons[40]
    back = watch(tmp_path, lambda *_: ({"a": {}}, {"a": [1] * 100}))
    assert back.look(30, None, go_on)[1] == "" and [look["step"] for look in back.points] == [0, 10, 20, 30, 40]
    assert watch(tmp_path / "other", falling, on_regression="log").look(90, 90, go_on)[1] == ""


def test_an_item_is_one_trial_however_many_filters_its_answer_goes_through(tmp_path: Path):
    task = write_task(tmp_path, "sums", sums(6))
    kinds = "".join(f"- {{name: {name}, filter: [{{function: take_first}}]}}\n" for name in ("strict", "flexible"))
    task.write_text(f"{task.read_text()}filter_list:\n{kinds}")
    evaluate(tiny_llama(), [str(task)], folder=tmp_path)
    told = [json.loads(line) for line in (tmp_path / "items" / "sums.jsonl").read_text().splitlines()]
    assert len(told) == 12 and right_items(told) == [line["acc"] for line in told[:6]]
    # Where filters do not agree, the first one counts, as in the harness's own tables.
    items = [{"id": n, "exact_match": float(n < 2 or flexible)} for flexible in (False, True) for n in (2, 0, 1)]
    assert right_items(items) == [1, 1, 0]
    assert right_items([{"id": 0, "bleu": 0.5}]) is None


def test_it_ends_when_its_rows_were_seen_often_enough(capsys: pytest.CaptureFixture[str]):
    """With the schedule; the message names the source of which one step more would see a row again."""
    loaded = load_recipe(TINY, ["sft.steps=500", "sft.num_epochs=2", "sft.schedule.warmup_steps=50"])
    feed: Any = SimpleNamespace(epochs=lambda steps: {"much": steps / 100, "few": steps / 10}, context=64)
    fitted = within_epochs(loaded.recipe.sft, feed, "sft")
    assert (fitted.steps, fitted.schedule.warmup_steps) == (20, 2)
    assert "sft: ends at step 20 of 500" in capsys.readouterr().out
    reason = epochs_exceeded(feed, 20, 2.0)
    assert "num_epochs" in reason and "few" in reason and "much" not in reason
    assert "few" not in epochs_exceeded(feed, 250, 2.0)
    late = fitted.model_copy(update={"steps": 500, "schedule": fitted.schedule.model_copy(update={"from_step": 30})})
    with pytest.raises(UserError) as refused:
        within_epochs(late, feed, "sft")
    assert refused.value.where == "sft.num_epochs" and refused.value.fix


def test_bits_per_byte_of_a_language_weigh_its_sources_by_their_bytes():
    scores = {"a.en": {"bits_per_byte": 1.0}, "b.en": {"bits_per_byte": 2.0}, "b.fr": {"bits_per_byte": 3.0}}
    sizes: Any = {
        "a.en": SimpleNamespace(bytes=100),
        "b.en": SimpleNamespace(bytes=300),
        "b.fr": SimpleNamespace(bytes=7),
    }
    assert bits_by_language(scores, sizes) == {"en": 1.75, "fr": 3.0}


# ---- one look


def test_rows_that_fit_leave_room_for_the_state_of_the_training(monkeypatch: pytest.MonkeyPatch):
    model = tiny_llama()
    moments = jax.tree.map(jnp.zeros_like, (model.params, model.params))
    state = TrainState(jnp.int32(0), model.params, moments)
    assert free_batch_size(model, state) == MAX_ROWS, "on processors it is no matter of memory"
    asked: list[int] = []
    monkeypatch.setattr(scoring, "rows_that_fit", lambda _, beside: asked.append(beside) or 8)
    assert free_batch_size(model, state, "gpu") == 8
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    adapted = TrainState(jnp.int32(0), moments, None, frozen=jax.tree.map(jnp.copy, model.params))
    free_batch_size(model, adapted, "gpu")  # the model is then the adapters merged with a copy of the weights
    assert asked == [2 * held + 4, 3 * held + 4]


def test_how_a_look_is_made_is_in_no_key():
    def asked(**settings: object) -> dict[str, object]:
        given = json.dumps({"tasks": ["piqa"], "every_steps": 2, **settings})
        stages = build_steps(load_recipe(TINY, [f"sft.monitor={given}"]))
        return next(stage.config for stage in stages if stage.name == "sft")

    assert asked() == asked(batch_size=8) == asked(data_dir="/nowhere")
    assert asked() != asked(limit=50)


# ---- benchmarks while a model is pretrained


@pytest.fixture(scope="module")
def scored(runs: Path) -> Path:
    """The shared run's pretraining, made again with three looks at some sums."""
    task = write_task(runs / "task", "sums", sums(30))
    options = ("--until", "pretrain", "--force", "pretrain")
    affinage("run", runs, f"pretrain.monitor={SUMS.format(task)}", options=options)
    return runs / "tiny/pretrain"


def test_a_training_with_benchmarks_has_the_same_bits_as_one_without(scored: Path, tiny_runs: Path):
    without = tiny_runs / "tiny/pretrain"
    assert weights("tiny/pretrain", scored.parents[1]) == weights("tiny/pretrain", tiny_runs)
    assert [row["loss"] for row in lines(scored, "loss")] == [row["loss"] for row in lines(without, "loss")]
    assert scored.resolve().name == without.resolve().name, "they are not two results"


def test_scores_are_those_of_the_checkpoint_on_items_drawn_by_the_seed(scored: Path):
    told, model = lines(scored, "evaluation"), open_model("tiny/pretrain", scored.parents[1])
    assert [row["step"] for row in told] == [0, 10, 20]
    prompts = []
    for draw in (0, 1, None):
        again = evaluate(model, [str(scored.parents[1] / "task/sums.yaml")], sample_seed=draw, limit=12, samples=12)
        prompts.append([sample["prompt"] for sample in again["samples"]["sums"]])
        if draw == 0:
            assert told[-1]["evaluation"]["tasks"] == {"sums": again["tasks"]["sums"]["metrics"]}
    assert prompts[0] != prompts[1] and prompts[2] == [f"{n} plus {n} is" for n in range(12)]
    last = lines(scored, "validation")[-1]["validation"]
    bits = told[-1]["evaluation"]["bits_per_byte"]
    assert set(bits) == {"en", "fr"} and bits["en"] == pytest.approx(last["pocket-world.en"]["bits_per_byte"])
    shown = read_training("pretrain", scored, TrainingResult(), {})
    assert [point.step for point in shown.points] == [0, 10, 20] and set(shown.bits_per_byte) == {"en", "fr"}


def test_benchmarks_of_facts_that_are_in_no_source_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "book.txt").write_text("A book.\n")
    asked = "pretrain.monitor={tasks: [quickstart], every_steps: 10}"
    affinage("train", tmp_path, f"data.sources=['{tmp_path}/book.txt']", asked, status=2)
    assert "--set pretrain.monitor" in capsys.readouterr().err


# ---- benchmarks while a model is tuned


@pytest.fixture(scope="module")
def base(runs: Path) -> SimpleNamespace:
    """A benchmark of what the base model says before it is taught to say something else."""
    items = [{"question": f"Number {i} is", "choices": [f"le {i}", f"la {i}"], "right": 0} for i in range(60)]
    task = write_task(runs / "habit-task", "habit", items)
    model = open_model("tiny/pretrain", runs)
    for item, was_right in zip(items, answers(model, task, runs / "before"), strict=True):
        item["right"] = 0 if was_right else 1  # what it finds likelier is called right, so it begins with all of it
    write_items(task.parent, items)
    return SimpleNamespace(runs=runs, task=task, items=items)


def answers(model: LoadedModel, task: Path, folder: Path) -> list[int]:
    """Which items of the task the model has right, when it is judged as any model is."""
    evaluate(model, [str(task)], folder=folder)
    return [int(json.loads(line)["acc"]) for line in (folder / f"items/{task.stem}.jsonl").read_text().splitlines()]


def watched(base: SimpleNamespace, **settings: object) -> str:
    told = {"tasks": [str(base.task)], "every_steps": 40, "limit": 60, "alpha": 0.05, "on_regression": "stop"}
    return json.dumps(told | settings)


def taught(base: SimpleNamespace) -> list[str]:
    """Settings of a fine-tuning on what is wrong."""
    wrong_way = base.runs / "wrong.jsonl"
    talks = [{"prompt": "Say it", "completion": said(item, 1 - item["right"])} for item in base.items]
    wrong_way.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    schedule, saved = (
        "sft.schedule={peak_lr: 1.0e-2, min_lr: 1.0e-2}",
        "runtime.checkpoint={every_steps: 40, keep_last: 2}",
    )
    return [f"sft.sources=['{wrong_way}']", "sft.steps=80", "sft.eval_every=40", schedule, saved]


def said(item: dict[str, Any], choice: int) -> str:
    return f"{item['question']} {item['choices'][choice]}"


@pytest.fixture(scope="module")
def habit(base: SimpleNamespace) -> SimpleNamespace:
    """A fine-tuning on the benchmark's wrong answers, that is stopped."""
    settings = ["name=habit", *taught(base), f"sft.monitor={watched(base)}"]
    affinage("sft", base.runs, *settings)
    sft = base.runs / "habit/sft"
    return SimpleNamespace(runs=base.runs, sft=sft, settings=settings, looks=looks_of(sft))


def test_fine_tuning_ends_where_a_benchmark_falls_with_the_model_of_the_last_good_look(habit: SimpleNamespace):
    """Here that is the look before the first step: what comes after it has the weights that it began with."""
    summary = json.loads((habit.sft / "summary.json").read_text())
    assert habit.looks[0]["scores"]["habit"]["value"] == 1.0
    assert [(look["step"], bool(look["worse"])) for look in habit.looks] == [(0, False), (40, True)]
    assert summary["steps"] == 40 and "habit is worse than at step 0" in summary["ended"]
    assert summary["final_loss"] < summary["first_loss"]
    found = {name: weights(name, habit.runs) for name in ("habit/sft", "habit/pretrain", "habit/sft@40")}
    assert found["habit/sft"] == found["habit/pretrain"] != found["habit/sft@40"]


def test_a_look_that_was_stopped_is_gone_on_with(habit: SimpleNamespace, tmp_path: Path):
    """Given up after its first batch, and made again: the decision is the same."""
    loaded = load_recipe(TINY, [*habit.settings, "sft.monitor.batch_size=1"])
    context = StepContext(loaded, tmp_path, {"train-tokenizer": habit.runs / "habit/train-tokenizer"}, tmp_path)
    model, settings = open_model("habit/sft@40", habit.runs), loaded.recipe.sft
    assert settings is not None
    shutil.copy(habit.sft / POINTS, tmp_path)
    before = json.loads((tmp_path / POINTS).read_text())
    (tmp_path / POINTS).write_text(json.dumps(before | {"points": before["points"][:1]}))

    def look(stop: Callable[[], bool]) -> str:
        judge = monitor_of(context, settings, model.graph, model.context)
        assert judge is not None
        state: Any = SimpleNamespace(params=jax.device_put(model.params, jax.devices()[0]))
        return judge.look(40, state, stop)[1]

    assert look(StopsAfter(2)) == "" and len(looks_of(tmp_path)) == 1
    kept = answers_in(tmp_path / ANSWERS)
    assert look(go_on) == json.loads((habit.sft / "summary.json").read_text())["ended"]
    assert looks_of(tmp_path) == habit.looks
    after = answers_in(tmp_path / ANSWERS)
    assert kept and kept.items() < after.items()


@pytest.mark.full
def test_with_keep_training_goes_on_and_preferences_begin_with_the_best_look(base: SimpleNamespace):
    """And these are adapters, which are looked at in the model that they make, and stop where it falls."""
    pairs = base.runs / "pairs.jsonl"
    told = [
        {"prompt": f"Say {n}", "chosen": said(item, 1 - item["right"]), "rejected": said(item, item["right"])}
        for n, item in enumerate(base.items)
    ]
    pairs.write_text("".join(json.dumps(line) + "\n" for line in told))
    schedule = {"peak_lr": 1e-2, "min_lr": 1e-2}
    dpo = {"sources": [str(pairs)], "steps": 80, "batch_size": 8, "schedule": schedule, "lora": {"r": 8}}
    dpo |= {"reference": "held", "num_epochs": None, "watch": json.loads(watched(base))}
    kept = [*taught(base), f"sft.monitor={watched(base, on_regression='keep_best')}"]
    affinage("dpo", base.runs, "name=preferred", *kept, f"dpo={json.dumps(dpo)}")
    tuned, preferred = base.runs / "preferred/sft", base.runs / "preferred/dpo"
    summary, found = json.loads((tuned / "summary.json").read_text()), looks_of(tuned)
    assert summary["steps"] == 80 and "ended" not in summary
    assert [(look["step"], bool(look["worse"])) for look in found] == [(0, False), (40, True), (80, True)]
    assert weights("preferred/sft", base.runs) == weights("preferred/pretrain", base.runs)
    first, *_, last = looks_of(preferred)
    assert first["scores"]["habit"]["value"] == 1.0 > found[-1]["scores"]["habit"]["value"]
    summary = json.loads((preferred / "summary.json").read_text())
    assert summary["steps"] == last["step"] < 80 and "habit is worse than at step 0" in summary["ended"]
    model = open_model(f"preferred/dpo@{last['step']}", base.runs)
    assert last["right"]["habit"] == answers(model, base.task, base.runs / "judged") != first["right"]["habit"]
    # And the adapters that are kept, of the first look, add nothing.
    assert weights("preferred", base.runs) == weights("preferred/sft", base.runs)
