"""Training that stops by benchmarks: the test by itself, the judge by itself, and both on the road."""

import json
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import binomtest

from affinage.cli.program import main
from affinage.errors import UserError
from affinage.evaluation import batch_size, packing, scoring
from affinage.evaluation.batch_size import MOST
from affinage.evaluation.run import evaluate
from affinage.generation.model import LoadedModel
from affinage.recipe.load import load_recipe
from affinage.recipe.tuning import WatchSettings
from affinage.stages import looks
from affinage.stages.models import open_model
from affinage.stages.road import road_of
from affinage.stages.stage import StageContext
from affinage.stages.watching import LOOKS, Watch, _right, judge_of, seen_enough, worse
from affinage.training.state import TrainState
from benchmark_fixtures import ITEMS
from choice_task import sums, write_items, write_task
from tiny_models import tiny_llama

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
    return Watch(chosen, folder, 190, score, lambda step, state: (folder / f"kept-{step}").touch())


def go_on() -> bool:
    return False


def falling(step: int, _: Callable[[], bool]) -> dict[str, list[int]]:
    """All right up to step 20, then ever fewer."""
    wrong = max(0, step - 20)
    return {"a": [0] * wrong + [1] * (100 - wrong)}


def test_a_degradation_stops_it_and_what_was_before_is_kept(tmp_path: Path):
    judge, told = watch(tmp_path, falling), []
    judge.say = told.append
    reasons = [(step, judge.look(step, step, go_on)) for step in (0, 10, 20, 30, 40)]  # type: ignore[arg-type]
    assert [step for step, reason in reasons if reason] == [40]
    assert "a is worse than at step 0" in reasons[-1][1]
    assert told[0] == "step 0/190  watched: a 100.0 ± 0.0 %" and len(told) == 5
    assert told[3].startswith("step 30/190  watched: a 90.0 ± 3.0 %")
    assert "a is worse than at step 0" in told[4]
    assert sorted(path.name for path in tmp_path.glob("kept-*")) == ["kept-0", "kept-10", "kept-20", "kept-30"]
    # Started again it says the same without a look, from another step it looks again.
    again = watch(tmp_path, lambda *_: pytest.fail("looked again"))
    assert again.look(40, None, go_on) == reasons[-1][1]  # type: ignore[arg-type]
    back = watch(tmp_path, lambda *_: {"a": [1] * 100})
    assert back.look(30, None, go_on) == "" and [look["step"] for look in back.looks] == [0, 10, 20, 30, 40]  # type: ignore[arg-type]
    assert watch(tmp_path / "other", falling, when_worse="tell").look(90, 90, go_on) == ""  # type: ignore[arg-type]


def run(runs: Path, *settings: str, until: str = "sft") -> None:
    common = ["data.sources=[{path: pocket-world, megabytes: 0.05}]", "pretrain.steps=2", "evaluate=null"]
    words = [word for setting in (*common, *settings) for word in ("--set", setting)]
    with pytest.raises(SystemExit) as ended:
        main([until, TINY, "--runs", str(runs), *words])
    assert ended.value.code == 0


def test_an_item_is_one_trial_however_many_filters_its_answer_goes_through(tmp_path: Path):
    task = write_task(tmp_path, "sums", sums(6))
    kinds = "".join(f"- {{name: {name}, filter: [{{function: take_first}}]}}\n" for name in ("strict", "flexible"))
    task.write_text(f"{task.read_text()}filter_list:\n{kinds}")
    evaluate(tiny_llama(), [str(task)], folder=tmp_path)
    told = [json.loads(line) for line in (tmp_path / "items" / "sums.jsonl").read_text().splitlines()]
    assert len(told) == 12 and _right("sums", told, "sft.watch") == [line["acc"] for line in told[:6]]
    # Where filters do not agree, the first one counts, as in the harness's own tables.
    lines = [{"id": n, "exact_match": float(n < 2 or flexible)} for flexible in (False, True) for n in (2, 0, 1)]
    assert _right("sums", lines, "sft.watch") == [1, 1, 0]


def test_rows_that_fit_leave_room_for_the_state_of_the_training(monkeypatch: pytest.MonkeyPatch):
    model = tiny_llama()
    moments = jax.tree.map(jnp.zeros_like, (model.params, model.params))
    state = TrainState(jnp.int32(0), model.params, moments)
    assert looks._rows(model, state) == MOST, "on processors it is no matter of memory"
    asked: list[int] = []
    monkeypatch.setattr(looks, "_PROCESSORS", "none")
    monkeypatch.setattr(batch_size, "rows_that_fit", lambda _, beside: asked.append(beside) or 8)
    assert looks._rows(model, state) == 8
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    adapted = TrainState(jnp.int32(0), moments, None, frozen=jax.tree.map(jnp.copy, model.params))
    looks._rows(model, adapted)  # the model is then the adapters merged with a copy of the weights
    assert asked == [2 * weights + 4, 3 * weights + 4]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert looks._rows(model, state) == 8, "of many hosts, too"


def test_a_look_writes_nothing_but_its_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither the tokenizer nor results, which nobody would read, in some folder for temporary files."""
    task = write_task(tmp_path / "task", "sums", sums(6))
    context = StageContext(load_recipe(TINY), tmp_path / "sft-0123", {}, tmp_path)
    watch, state, model = WatchSettings(tasks=(str(task),), every_steps=10), SimpleNamespace(), tiny_llama()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    lines: list[tuple[str, int]] = []
    told = looks.evaluated(
        context, watch, "sft.watch", model, state, go_on, world=None,  # type: ignore[arg-type]
        answered=lambda task, line: lines.append((task, line["id"])),
    )  # fmt: skip
    assert told is not None and "fingerprint" not in told and lines == [("sums", number) for number in range(6)]
    assert [path.name for path in context.folder.iterdir()] == [looks.ANSWERS]


def test_without_a_network_the_setting_is_named_that_would_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    context = StageContext(load_recipe(TINY), tmp_path / "sft-0123", {}, tmp_path)
    watch, state = WatchSettings(tasks=("piqa",), every_steps=10), SimpleNamespace()
    with pytest.raises(UserError, match="cannot be fetched") as told:
        looks.evaluated(context, watch, "sft.watch", tiny_llama(), state, go_on, world=None)  # type: ignore[arg-type]
    assert told.value.where == "sft.watch.tasks" and "`data_dir`" in told.value.fix


def test_a_look_in_smaller_batches_or_from_files_elsewhere_is_the_same_look():
    def asked(**settings: object) -> dict[str, object]:
        given = json.dumps({"tasks": ["piqa"], "every_steps": 2, **settings})
        stages = road_of(load_recipe(TINY, [f"sft.watch={given}"]))
        return next(stage.settings for stage in stages if stage.name == "sft")

    assert asked() == asked(batch=8) == asked(data_dir="/nowhere")
    assert asked() != asked(items=50)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A model, and a benchmark of what it says before it is taught to say something else."""
    folder = tmp_path_factory.mktemp("habit")
    run(folder / "runs", "sft.steps=1")
    model = open_model("tiny/pretrain", folder / "runs")
    # What the base model finds likelier is called right, so it begins with all of it.
    items = [{"question": f"Number {i} is", "choices": [f"le {i}", f"la {i}"], "right": 0} for i in range(60)]
    task = write_task(folder, "habit", items)
    for item, was_right in zip(items, answers(model, task, folder / "before"), strict=True):
        item["right"] = 0 if was_right else 1
    write_items(folder, items)
    return SimpleNamespace(folder=folder, runs=folder / "runs", task=task, items=items)


def answers(model: LoadedModel, task: Path, folder: Path) -> list[int]:
    """Which items of the task the model has right, when it is judged as any model is."""
    evaluate(model, [str(task)], folder=folder)
    return [int(json.loads(line)["acc"]) for line in (folder / f"items/{task.stem}.jsonl").read_text().splitlines()]


def watched(base: SimpleNamespace, **settings: object) -> str:
    return json.dumps({"tasks": [str(base.task)], "every_steps": 40, "items": 60, "p": 0.05, **settings})


def taught(base: SimpleNamespace) -> list[str]:
    """Settings of a fine-tuning on what is wrong."""
    wrong_way = base.folder / "wrong.jsonl"
    talks = [{"prompt": "Say it", "completion": said(item, 1 - item["right"])} for item in base.items]
    wrong_way.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    schedule, saved = "sft.schedule={peak: 1.0e-2, floor: 1.0e-2}", "sft.checkpoint={every_steps: 40, keep_last: 2}"
    return [f"sft.sources=['{wrong_way}']", "sft.steps=80", "sft.validate_every=40", schedule, saved]


def said(item: dict[str, Any], choice: int) -> str:
    return f"{item['question']} {item['choices'][choice]}"


def looks_of(training: Path) -> list[dict[str, Any]]:
    return json.loads((training / LOOKS).read_text())["looks"]


def weights_of(name: str, runs: Path) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(open_model(name, runs).params)]


@pytest.fixture(scope="module")
def habit(base: SimpleNamespace) -> SimpleNamespace:
    """A fine-tuning on the benchmark's wrong answers, that is stopped."""
    settings = [*taught(base), f"sft.watch={watched(base)}"]
    run(base.runs, *settings)
    sft = base.runs / "tiny/sft"
    return SimpleNamespace(runs=base.runs, sft=sft, settings=settings, looks=looks_of(sft))


@pytest.fixture(scope="module")
def preferred(base: SimpleNamespace) -> SimpleNamespace:
    """Fine-tuned on the wrong answers to the end, the best weights kept; then adapters that are to prefer these."""
    pairs = base.folder / "pairs.jsonl"
    lines = [
        {"prompt": f"Say {n}", "chosen": said(item, 1 - item["right"]), "rejected": said(item, item["right"])}
        for n, item in enumerate(base.items)
    ]
    pairs.write_text("".join(json.dumps(line) + "\n" for line in lines))
    dpo = {
        "sources": [str(pairs)],
        "steps": 80,
        "batch": 8,
        "schedule": {"peak": 1e-2, "floor": 1e-2},
        "lora": {"rank": 8},
        "reference": "held",
        "max_epochs": None,
        "watch": json.loads(watched(base)),
    }
    kept = [*taught(base), f"sft.watch={watched(base, when_worse='keep')}"]
    run(base.runs, "name=preferred", *kept, f"dpo={json.dumps(dpo)}", until="dpo")
    return SimpleNamespace(sft=base.runs / "preferred/sft", dpo=base.runs / "preferred/dpo")


def test_fine_tuning_ends_where_a_benchmark_falls(habit: SimpleNamespace):
    summary = json.loads((habit.sft / "summary.json").read_text())
    assert habit.looks[0]["scores"]["habit"]["value"] == 1.0 and habit.looks[-1]["worse"]
    assert summary["steps"] == habit.looks[-1]["step"] < 80 and "habit is worse than at step" in summary["ended"]
    losses = [json.loads(line) for line in (habit.sft / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    assert losses[-1].get("loss", 0) < losses[0]["loss"]


def test_the_model_is_that_of_the_last_look_at_which_nothing_was_worse(habit: SimpleNamespace):
    """Here that is the look before the first step: what comes after it has the weights that it began with."""
    assert [(look["step"], bool(look["worse"])) for look in habit.looks] == [(0, False), (40, True)]
    weights = {name: weights_of(name, habit.runs) for name in ("tiny/sft", "tiny/pretrain", "tiny/sft@40")}
    assert weights["tiny/sft"] == weights["tiny/pretrain"] != weights["tiny/sft@40"]


def test_with_keep_training_goes_on_and_what_comes_after_has_the_best_look(
    preferred: SimpleNamespace, base: SimpleNamespace
):
    summary = json.loads((preferred.sft / "summary.json").read_text())
    assert summary["steps"] == 80 and "ended" not in summary
    looks = looks_of(preferred.sft)
    assert [(look["step"], bool(look["worse"])) for look in looks] == [(0, False), (40, True), (80, True)]
    weights = {name: weights_of(f"preferred/{name}", base.runs) for name in ("sft", "pretrain", "sft@80")}
    assert weights["sft"] == weights["pretrain"] != weights["sft@80"]
    # The preferences began with those: with a model that has all of it right, as the last step's has not.
    assert looks_of(preferred.dpo)[0]["scores"]["habit"]["value"] == 1.0 > looks[-1]["scores"]["habit"]["value"]


def test_preferences_end_where_a_benchmark_falls(preferred: SimpleNamespace):
    summary = json.loads((preferred.dpo / "summary.json").read_text())
    assert summary["steps"] == looks_of(preferred.dpo)[-1]["step"] < 80
    assert "habit is worse than at step 0" in summary["ended"] and summary["final_loss"] < summary["first_loss"]


def test_adapters_are_looked_at_in_the_model_that_they_make(preferred: SimpleNamespace, base: SimpleNamespace):
    first, *_, last = looks_of(preferred.dpo)
    model = open_model(f"preferred/dpo@{last['step']}", base.runs)
    assert last["right"]["habit"] == answers(model, base.task, base.folder / "judged") != first["right"]["habit"]
    # And those that are kept, of the first look, add nothing.
    assert weights_of("preferred", base.runs) == weights_of("preferred/sft", base.runs)


def test_a_look_that_was_stopped_is_gone_on_with(
    habit: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Given up after its first batch, and made again: no answer is computed twice, and the decision is the same."""
    loaded = load_recipe(TINY, habit.settings)
    context = StageContext(loaded, tmp_path, {"tokenizer": habit.runs / "tiny/tokenizer"}, tmp_path)
    model, settings = open_model("tiny/sft@40", habit.runs), loaded.recipe.sft
    assert settings is not None
    shutil.copy(habit.sft / LOOKS, tmp_path)
    before = json.loads((tmp_path / LOOKS).read_text())
    (tmp_path / LOOKS).write_text(json.dumps(before | {"looks": before["looks"][:1]}))
    monkeypatch.setattr(packing, "_ROOMS", (16,))  # so that not all of it is one batch
    monkeypatch.setitem(scoring._MOST_TOKENS, "cpu", 16)
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) == 2

    def look(stop: Callable[[], bool]) -> str:
        judge = judge_of(context, settings, settings.steps, model.graph, SimpleNamespace(context=model.context), "")  # type: ignore[arg-type]
        assert judge is not None
        params = jax.device_put(model.params, jax.devices()[0])  # which batches are split over; of one row each
        return judge.look(40, SimpleNamespace(params=params), stop)  # type: ignore[arg-type]

    assert look(stop) == "" and len(json.loads((tmp_path / LOOKS).read_text())["looks"]) == 1
    kept = (tmp_path / looks.ANSWERS).read_text()
    assert look(go_on) == json.loads((habit.sft / "summary.json").read_text())["ended"]
    assert json.loads((tmp_path / LOOKS).read_text())["looks"] == habit.looks
    answers = (tmp_path / looks.ANSWERS).read_text()
    assert answers.startswith(kept) and 1 < len(kept.splitlines()) < len(answers.splitlines())
    keys = [json.loads(line)[0] for line in answers.splitlines()[1:]]
    assert len(keys) == len(set(keys))


def test_it_ends_when_its_rows_were_seen_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run(tmp_path / "runs", "sft.steps=500", "sft.max_epochs=1", "sft.held_out=0", "sft.sample=0.1")
    summary = json.loads((tmp_path / "runs/tiny/sft/summary.json").read_text())
    rows = sum(len(np.load(path)) for path in (tmp_path / "runs/tiny/conversations/train").rglob("rows-*.npy"))
    why = "its rows have been seen as often as `max_epochs: 1` allows"
    assert summary["steps"] == rows // 8 and summary["ended"] == why
    said = " ".join(capsys.readouterr().out.split())
    assert f"sft: ends at step {rows // 8} of 500, when {why}; null lets it go on" in said
    lines = map(json.loads, (tmp_path / "runs/tiny/sft/metrics.jsonl").read_text().splitlines())
    rates = [line["learning_rate"] for line in lines if "learning_rate" in line]
    assert rates[-1] < rates[len(rates) // 2] < max(rates)


def test_which_rows_were_seen_enough_is_named():
    """Of a mixture, the source of which one step more would see a row again."""
    feed = SimpleNamespace(epochs=lambda steps: {"much": steps / 100, "few": steps / 10})
    assert seen_enough(feed, 10, 1.0) == "the rows of few have been seen as often as `max_epochs: 1` allows"  # type: ignore[arg-type]
    assert seen_enough(feed, 150, 1.5).startswith("its rows")  # type: ignore[arg-type]


def test_a_watch_of_which_nothing_is_said_looks_at_winogrande_and_arc_challenge(tmp_path: Path):
    for name in ("winogrande", "arc_challenge"):
        item, _ = ITEMS[name]
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(item)}\n" * 4)
    run(tmp_path / "runs", "sft.watch={}", f"sft.watch.data_dir={tmp_path}")
    looks = json.loads((tmp_path / "runs/tiny/sft" / LOOKS).read_text())["looks"]
    assert [look["step"] for look in looks] == [0, 5]  # before the first step, and after the last
    assert {task: len(right) for task, right in looks[0]["right"].items()} == {"winogrande": 4, "arc_challenge": 4}
