"""Benchmarks scored while a model is pretrained: what is written, and that the training does not notice."""

import contextlib
import io
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from affinage.checkpoint import CheckpointStore
from affinage.cli.program import main
from affinage.evaluation import packing, scoring
from affinage.evaluation.run import evaluate
from affinage.recipe.load import load_recipe
from affinage.report import write_report
from affinage.report.trainings import read_training
from affinage.stages import looks
from affinage.stages.in_loop import InLoop, by_language
from affinage.stages.models import open_model
from affinage.stages.stage import StageContext
from choice_task import sums, write_task

TINY = str(Path(__file__).parents[1] / "recipes" / "tiny.yaml")


def pretrain(runs: Path, *settings: str) -> Path:
    common = ["data.sources=[{path: pocket-world, megabytes: 0.05}]", "evaluate=null", "sft=null", "export=null"]
    words = [word for setting in (*common, *settings) for word in ("--set", setting)]
    with pytest.raises(SystemExit) as ended:
        main(["train", TINY, "--runs", str(runs), *words])
    assert ended.value.code == 0
    return runs / "tiny" / "pretrain"


def asked(folder: Path) -> str:
    """The setting that has a benchmark of 30 sums scored, 12 of them each time."""
    task = write_task(folder, "sums", sums(30))
    return f"pretrain.evaluate={{tasks: ['{task}'], every_steps: 10, items: 12, batch: 4}}"


def weights(training: Path) -> list[bytes]:
    state = CheckpointStore(training / "checkpoints").restore(20, {"params": None})
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state["params"])]


def lines(training: Path, kind: str) -> list[dict]:
    rows = [json.loads(line) for line in (training / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if kind in row]


def line_of(step: int, scores: dict) -> str:
    """What the terminal says of a look at the sums."""
    value, error = (100 * scores["tasks"]["sums"]["acc"][part] for part in ("value", "stderr"))
    return f"step {step}/20  benchmarks: sums {value:.1f} ± {error:.1f} %"


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("with")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        training = pretrain(folder / "runs", asked(folder / "task"))
    (folder / "said").write_text(said.getvalue())
    return training


def test_each_look_is_a_line_in_the_terminal(evaluated: Path):
    said = (evaluated.parents[2] / "said").read_text().splitlines()
    told = [f"pretrain: {line_of(row['step'], row['evaluation'])}" for row in lines(evaluated, "evaluation")]
    assert [line for line in said if "benchmarks: " in line] == told and len(told) == 3


def test_a_training_with_benchmarks_has_the_same_bits_as_one_without(evaluated: Path, tmp_path: Path):
    without = pretrain(tmp_path)
    assert weights(evaluated) == weights(without)
    assert [row["loss"] for row in lines(evaluated, "loss")] == [row["loss"] for row in lines(without, "loss")]
    assert evaluated.resolve().name == without.resolve().name, "they must not be two results"


def test_scores_are_those_of_the_checkpoint_on_items_drawn_by_the_seed(evaluated: Path):
    told = lines(evaluated, "evaluation")
    assert [row["step"] for row in told] == [0, 10, 20]
    model = open_model("tiny/pretrain", evaluated.parents[1])
    task = str(evaluated.parents[2] / "task" / "sums.yaml")
    prompts = []
    for draw in (0, 1, None):
        again = evaluate(model, [task], draw=draw, limit=12, samples=12)
        prompts.append([sample["prompt"] for sample in again["samples"]["sums"]])
        if draw == 0:
            assert told[-1]["evaluation"]["tasks"] == {"sums": again["tasks"]["sums"]["metrics"]}
    assert [len(set(each)) for each in prompts] == [12, 12, 12]
    assert prompts[0] != prompts[1] and prompts[2] == [f"{n} plus {n} is" for n in range(12)]
    last = lines(evaluated, "validation")[-1]["validation"]
    bits = told[-1]["evaluation"]["bits_per_byte"]
    assert set(bits) == {"en", "fr"} and bits["en"] == pytest.approx(last["pocket-world.en"]["bits_per_byte"])


def test_bits_per_byte_of_a_language_weigh_its_sources_by_their_bytes():
    scores = {"a.en": {"bits_per_byte": 1.0}, "b.en": {"bits_per_byte": 2.0}, "b.fr": {"bits_per_byte": 3.0}}
    sizes = {"a.en": SimpleNamespace(bytes=100), "b.en": SimpleNamespace(bytes=300), "b.fr": SimpleNamespace(bytes=7)}
    assert by_language(scores, sizes) == {"en": 1.75, "fr": 3.0}  # type: ignore[arg-type]


def test_what_a_stop_leaves_of_them_is_gone_on_with(evaluated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Given up after its first batch, and asked again: no answer is computed twice, and the scores are the same."""
    loaded = load_recipe(TINY, [asked(evaluated.parents[2] / "task")])
    store = evaluated.resolve().parent
    inputs = {name: next(store.glob(f"{name}-*")) for name in ("rows", "tokenizer")}
    context = StageContext(loaded, tmp_path, inputs, tmp_path)
    model, settings = open_model("tiny/pretrain", evaluated.parents[1]), loaded.recipe.pretrain
    assert settings is not None
    state = SimpleNamespace(params=model.params)
    looked: list[int] = []
    monkeypatch.setattr(packing, "_ROOMS", (16,))  # so that not all of them are one batch
    monkeypatch.setitem(scoring._MOST_TOKENS, "cpu", 16)

    def stop() -> bool:
        looked.append(1)
        return len(looked) > 1

    told: list[str] = []
    first = InLoop(context, settings, model.graph, model.context, {})
    first.say = told.append
    assert first.scores(20, state, {}, stop) is None  # type: ignore[arg-type]
    kept = (tmp_path / looks.ANSWERS).read_text()
    again = InLoop(context, settings, model.graph, model.context, {})
    again.say = told.append
    scores = again.scores(20, state, {}, lambda: False)  # type: ignore[arg-type]
    assert scores is not None and scores["tasks"] == lines(evaluated, "evaluation")[-1]["evaluation"]["tasks"]
    assert told == [line_of(20, scores)], "of one that was given up nothing is told"
    answers = (tmp_path / looks.ANSWERS).read_text()
    assert answers.startswith(kept) and 1 < len(kept.splitlines()) < len(answers.splitlines())
    keys = [json.loads(line)[0] for line in answers.splitlines()[1:]]
    assert len(keys) == len(set(keys))


def test_they_are_in_the_report(evaluated: Path, tmp_path: Path):
    training = read_training("pretrain", evaluated, {})
    assert [look.step for look in training.looks] == [0, 10, 20] and not training.watched
    assert set(training.bits_per_byte) == {"en", "fr"}
    write_report(evaluated.parent, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Benchmarks on the way" in page and "bits per byte of validation text" in page


def test_benchmarks_of_facts_that_are_in_no_source_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "book.txt").write_text("A book.\n")
    settings = [f"data.sources=['{tmp_path}/book.txt']", "pretrain.evaluate={tasks: [quickstart], every_steps: 10}"]
    with pytest.raises(SystemExit) as ended:
        main(["train", TINY, "--runs", str(tmp_path), "--set", settings[0], "--set", settings[1]])
    assert ended.value.code == 2 and "pocket world" in capsys.readouterr().err
