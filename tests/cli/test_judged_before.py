"""`compare` does not pass off answers of what a model was for those of what it is."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from affinage.stages.judged import state_of
from choice_task import sums, write_task

TINY = str(Path(__file__).parents[1] / "recipes" / "tiny.yaml")
Said = Callable[..., tuple[int, str, str]]
OLD = "has changed since it gave these answers"


@pytest.fixture
def run(affinage: Said, tmp_path: Path) -> Callable[..., None]:
    """A verb on the tiny recipe, with a number of steps of its pretraining."""
    task = write_task(tmp_path / "task", "sums", sums(12))

    def run(verb: str, steps: int) -> None:
        settings = [
            "data.sources=[{path: pocket-world, megabytes: 0.05}]",
            "model.nodes.blocks.repeat=1",
            "sft=null",
            "export=null",
            "report={prompts: [], questions: []}",
            f"evaluate={{tasks: ['{task}']}}",
            f"pretrain.steps={steps}",
        ]
        words = [word for setting in settings for word in ("--set", setting)]
        assert affinage(verb, TINY, "--runs", str(tmp_path / "runs"), *words)[0] == 0

    return run


def test_answers_of_a_run_that_was_trained_again_are_told_with_how_to_have_new_ones(
    run: Callable[..., None], affinage: Said, tmp_path: Path
):
    runs = str(tmp_path / "runs")

    def compared(*names: str) -> list[dict]:
        status, out, _ = affinage("compare", *names, "--runs", runs, "--json")
        assert status == 0
        return json.loads(out)["runs"]

    run("run", 2)
    shutil.copytree(tmp_path / "runs" / "tiny" / "evaluate-base" / "items", tmp_path / "other" / "items")
    other = str(tmp_path / "other")
    assert not any("judged_before" in one for one in compared("tiny", other))
    assert not any("judged_before" in one for one in compared("tiny/pretrain", other)), "what its own stage has"
    assert affinage("eval", "tiny/pretrain", "--runs", runs)[0] == 0, "the benchmarks are its recipe's"
    assert not any("judged_before" in one for one in compared("tiny/pretrain", "tiny"))

    run("train", 4)
    (named, of_run, folder) = compared("tiny/pretrain", "tiny", other)
    assert named["judge_anew"] == "affinage eval tiny/pretrain --tasks ..."
    assert of_run["judge_anew"].startswith("affinage run ")
    assert "judged_before" not in folder, "a folder of answers is what it is"
    status, out, _ = affinage("compare", "tiny", other, "--runs", runs, "--html", str(tmp_path / "page.html"))
    assert status == 0 and OLD in " ".join(out.split()) and OLD in (tmp_path / "page.html").read_text()

    # What judges the run as it is now comes before a stage that judged what it was.
    assert affinage("eval", "tiny", "--runs", runs)[0] == 0
    assert not any("judged_before" in one for one in compared("tiny", other))
    run("run", 4)
    assert not any("judged_before" in one for one in compared("tiny/evaluate-base", other))


def test_who_has_no_answers_is_told_how_to_have_ones_that_can_be_compared(affinage: Said, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run, tasks in (("one", ["exam.yaml"]), ("two", ["exam.yaml"]), ("bare", [])):
        (tmp_path / "runs" / run / "pretrain").mkdir(parents=True)
        (tmp_path / "runs" / run / "recipe.json").write_text(json.dumps({"name": run, "evaluate": {"tasks": tasks}}))
    (tmp_path / "answers" / "items").mkdir(parents=True)
    (tmp_path / "answers" / "items" / "boolq.jsonl").write_text("")

    def told(*names: str) -> str:
        status, _, said = affinage("compare", *names)
        assert status == 2 and "julian" not in said
        return " ".join(said.split())

    assert "affinage eval one; affinage eval two" in told("one", "two")
    assert told("one/pretrain", "two").endswith("Make them: affinage eval one/pretrain")
    assert told("bare/pretrain", "answers").endswith("affinage eval bare/pretrain --tasks boolq")
    assert told("bare/pretrain", "one").endswith("affinage eval bare/pretrain --tasks exam.yaml")


def test_a_hugging_face_folder_is_another_when_weights_or_tokenizer_are_and_not_when_its_card_is(tmp_path: Path):
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "README.md"):
        (model / name).write_text(name)
    before = state_of(str(model), tmp_path / "runs")
    (model / "README.md").write_text("A better card.")
    assert state_of(str(model), tmp_path / "runs") == before
    for name in ("model.safetensors", "tokenizer.json"):
        (model / name).write_text("another")
        assert state_of(str(model), tmp_path / "runs") != before
        before = state_of(str(model), tmp_path / "runs")


def test_the_report_has_what_was_judged_by_hand_of_the_models_that_the_run_has_now(
    run: Callable[..., None], affinage: Said, tmp_path: Path
):
    runs, words = str(tmp_path / "runs"), "Judged by affinage eval"
    more = write_task(tmp_path / "more", "more_sums", sums(6))

    def reported() -> str:
        assert affinage("report", str(tmp_path / "runs" / "tiny"), "--runs", runs)[0] == 0
        return (tmp_path / "runs" / "tiny" / "report.html").read_text()

    run("run", 2)
    assert words not in reported()
    for model in ("tiny/pretrain", "tiny/pretrain@1"):
        status, _, said = affinage("eval", model, "--tasks", str(more), "--runs", runs)
        assert status == 0 or (model.endswith("@1") and "there is no checkpoint" in said), said
    page = reported()
    assert words in page and "more_<wbr>sums" in page
    run("run", 4)
    assert words not in reported(), "of a model that the run has no more"
