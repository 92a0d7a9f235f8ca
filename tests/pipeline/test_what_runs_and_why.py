"""What is complete is left alone, what runs again has a reason, and only settings that decide are in a key."""

import os
import shutil
from pathlib import Path

import pytest

from affinage.checkpoint.remote import RemoteFolder
from affinage.config.load import LoadedRecipe, load_recipe
from affinage.errors import UserError
from affinage.pipeline.build import build_steps
from affinage.pipeline.runner import PipelineRunner, ProgressListener
from affinage.pipeline.step import Step, StepContext
from affinage.results import read_json
from run_affinage import refused

RECIPE = """\
name: small
model: {inputs: [tokens], nodes: {embed: {kind: embedding, in: tokens}}}
data: {sources: [pocket-world, texts], filters: {min_characters: 3}}
pretrain: {steps: 20, batch_size: 8, schedule: {peak_lr: 1e-3, min_lr: 1e-4}}
sft: {steps: 5, batch_size: 8, schedule: {peak_lr: 1e-3, min_lr: 1e-4}, sources: [chat.jsonl]}
evaluate: {tasks: [pocket-world]}
export: {}
"""
ROAD = [
    "synthesize", "ingest", "filter", "dedup", "split", "train-tokenizer", "tokenize", "sft-data", "pretrain", "sft",
    "evaluate-base", "evaluate-sft", "export", "report",
]  # fmt: skip


def write_text(context: StepContext) -> dict:
    (context.folder / "text").write_text("+".join(sorted(context.inputs)) or "start")
    with open(context.run_folder.parent / "log", "a") as log:
        log.write(context.folder.name.split("-")[0] + " ")
    return {"files": 1}


def fail_once(context: StepContext) -> dict:
    if (context.folder / "half").exists():
        return {"went_on": True}
    (context.folder / "half").write_text("x")
    raise KeyboardInterrupt


def refuse(context: StepContext) -> dict:
    (context.folder / "metrics.jsonl").touch()
    raise UserError("this cannot be trained")


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("a")
    (tmp_path / "chat.jsonl").write_text("{}")
    (tmp_path / "r.yaml").write_text(RECIPE)
    return lambda *overrides: load_recipe("r.yaml", overrides)


def toy(settings: dict | None = None) -> list[Step]:
    """Three stages that do almost nothing; the last reads the other two."""
    return [
        Step("one", write_text, settings or {"a": {"b": 1}}),
        Step("two", write_text, {"c": [1, 2]}, ("one",), sources={"my.txt": "print"}),
        Step("three", write_text, {}, ("one", "two")),
    ]


def toy_run(load, tmp_path, road: list[Step], **options) -> tuple[dict[str, str], list[str]]:
    """({stage: reason} before, stages that ran)."""
    runner = PipelineRunner(load(), tmp_path / "runs", road, **options)
    reasons = {step.name: step.reason for step in runner.plan()}
    return reasons, list(runner.run(ProgressListener()))


def test_once_is_enough(load, tmp_path):
    reasons, ran = toy_run(load, tmp_path, toy())
    assert set(reasons.values()) == {"never ran"} and ran == ["one", "two", "three"]
    reasons, ran = toy_run(load, tmp_path, toy())
    assert set(reasons.values()) == {"complete"} and ran == []
    assert (tmp_path / "runs/log").read_text() == "one two three "
    run = tmp_path / "runs/small"
    assert (run / "three/text").read_text() == "one+two"
    assert os.readlink(run / "one").startswith("../store/one-")
    assert '"min_characters": 3' in (run / "recipe.json").read_text()


def test_a_complete_run_whose_results_are_copied_needs_no_network(load, tmp_path, monkeypatch, capfd):
    toy_run(load, tmp_path, toy())

    def silent(*_: object) -> None:
        raise UserError("no network")

    def copy() -> str:
        runner = PipelineRunner(load(f"runtime.remote=file://{tmp_path}/remote"), tmp_path / "runs", toy())
        assert runner.run(ProgressListener()) == {}
        return capfd.readouterr().out

    with monkeypatch.context() as without:
        without.setattr(RemoteFolder, "write", silent)
        assert "no network; run it again" in copy()
    assert copy() == "" and len(list((tmp_path / "remote").glob("*/manifest.json"))) == 3
    for name in ("__init__", "read", "write"):
        monkeypatch.setattr(RemoteFolder, name, silent)
    assert copy() == ""


def test_reasons(load, tmp_path):
    toy_run(load, tmp_path, toy())
    reasons, _ = toy_run(load, tmp_path, toy({"a": {"b": 2}, "d": "new"}))
    changed = {"one": "settings changed: a.b, d", "two": "input changed: one", "three": "input changed: one, two"}
    assert reasons == changed
    assert toy_run(load, tmp_path, toy())[1] == [], "the former results are still there"
    road = toy()
    road[1] = Step("two", write_text, {"c": [1, 2]}, ("one",), sources={"my.txt": "other"})
    assert toy_run(load, tmp_path, road)[0]["two"] == "files changed: my.txt"
    road[0] = Step("one", fail_once, {"a": {"b": 1}})
    assert toy_run(load, tmp_path, road[:1])[1] == [], "the function itself is no part of the key"
    road[0] = Step("one", write_text, {"a": {"b": 1}}, version=2)
    assert toy_run(load, tmp_path, road[:1])[0]["one"] == "version changed"


def test_damage_and_force(load, tmp_path):
    toy_run(load, tmp_path, toy())
    (tmp_path / "runs/small/two/text").write_text("not what it was")
    reasons, ran = toy_run(load, tmp_path, toy())
    assert reasons["two"].startswith("damaged: text has") and ran == ["two"]
    reasons, ran = toy_run(load, tmp_path, toy(), force=["two"])
    assert (reasons["two"], reasons["three"], ran) == ("forced", "forced by two", ["two", "three"])
    refused(toy_run, load, tmp_path, toy(), force=["too"], match="no step `too`")


def test_a_result_whose_folder_is_deleted_is_none(load, tmp_path):
    def deleted(context):
        shutil.rmtree(context.folder)
        (context.folder / "checkpoints").mkdir(parents=True)  # as a save does
        return {}

    with pytest.raises(UserError, match="deleted or moved"):
        toy_run(load, tmp_path, [Step("train", deleted, {}, has_progress=True, resumable=True)])
    assert not list(tmp_path.glob("*/store/*/manifest.json"))


def test_until(load, tmp_path):
    assert toy_run(load, tmp_path, toy(), until=["two"])[1] == ["one", "two"]
    refused(toy_run, load, tmp_path, toy(), until=["for"], match="`for`")


@pytest.mark.parametrize("resumable", [False, True])
def test_an_interrupted_training_resumes_and_any_other_step_begins_again(load, tmp_path, resumable: bool):
    road = [Step("train", fail_once, {}, resumable=resumable)]
    with pytest.raises(KeyboardInterrupt):
        toy_run(load, tmp_path, road)
    if not resumable:
        with pytest.raises(KeyboardInterrupt):
            toy_run(load, tmp_path, road)
        assert PipelineRunner(load(), tmp_path / "runs", road).plan()[0].reason == "not finished; starts again"
        return
    assert toy_run(load, tmp_path, road) == ({"train": "not finished; resumes"}, ["train"])
    made = tmp_path / "runs/small/train"
    assert read_json(made / "result.json") == {"went_on": True}
    (made / "half").write_text("longer than it was")
    reasons, ran = toy_run(load, tmp_path, road)
    assert reasons["train"].startswith("damaged: half") and ran == ["train"]
    assert (made / "half").read_text() == "longer than it was", "it resumed from what was there"


def test_a_training_that_is_refused_before_its_first_step_leaves_the_run_as_it_was(load, tmp_path):
    train = Step("train", refuse, {}, resumable=True, has_progress=True)
    refused(toy_run, load, tmp_path, [train], match="cannot be trained")
    toy_run(load, tmp_path, [Step("train", write_text, {"a": 1})])
    before = os.readlink(tmp_path / "runs/small/train")
    refused(toy_run, load, tmp_path, [train], match="cannot be trained")
    assert os.readlink(tmp_path / "runs/small/train") == before


def keys(loaded: LoadedRecipe) -> dict[str, str]:
    """Keys of the real road."""
    runner = PipelineRunner(loaded, Path("runs"), build_steps(loaded))
    return {step.name: step.request.key for step in runner.plan()}


def changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return [name for name in after if after[name] != before.get(name)]


@pytest.mark.parametrize(
    ("override", "first", "untouched"),
    [
        ("sft.steps=6", "sft", ["evaluate-base", "pretrain", "sft-data"]),
        ("sft.system_prompt=x", "sft-data", ["pretrain", "evaluate-base"]),
        ("pretrain.steps=21", "pretrain", ["tokenize", "sft-data"]),
        ("packing.seq_len=64", "tokenize", ["train-tokenizer"]),
        ("tokenizer.vocab_size=400", "train-tokenizer", ["split"]),
        ("data.filters.min_characters=4", "filter", ["ingest", "synthesize"]),
        ("data.sources=[{path: pocket-world, max_bytes: 1MB}, texts]", "synthesize", []),
        ("evaluate.limit=3", "evaluate-base", ["sft", "sft-data"]),
        ("export.dtype=bfloat16", "export", ["sft", "evaluate-sft"]),
        ("report.language=fr", "report", ROAD[:-1]),
        ("seed=1", "synthesize", []),
    ],
)
def test_a_setting_changes_the_stages_that_read_it_and_those_after(load, override, first, untouched):
    before = keys(load())
    assert list(before) == ROAD
    after = changed(before, keys(load(override)))
    assert (after[0], after[-1]) == (first, "report")
    assert not set(after) & set(untouched)


@pytest.mark.parametrize(
    "override",
    [
        "mesh={data: 2}", "runtime.checkpoint.every_steps=3", "pretrain.log_every=1",
        "pretrain.gradient_accumulation_steps=2",
        "pretrain.eval_every=7", "runtime.checkpoint.keep_last=5", "data.executor=ray", "data.ray_address=h:1",
        "data.workers=3",
    ],
)  # fmt: skip
def test_how_a_step_is_carried_out_is_in_no_key(load, override):
    assert changed(keys(load()), keys(load(override))) == []


def test_changed_user_files_are_noticed(load, tmp_path):
    before = keys(load())
    (tmp_path / "texts/b.txt").write_text("b")
    after = keys(load())
    assert changed(before, after)[0] == "ingest"
    (tmp_path / "chat.jsonl").write_text("{} ")
    assert changed(after, keys(load()))[0] == "sft-data"


def test_sections_left_out_have_no_stages(load):
    road = build_steps(load("sft=null", "evaluate=null", "export=null", "data.sources=[texts]"))
    names = [stage.name for stage in road]
    assert names == ["ingest", "filter", "dedup", "split", "train-tokenizer", "tokenize", "pretrain", "report"]
    assert "dedup" not in [stage.name for stage in build_steps(load("data.dedup=null"))]
    assert build_steps(load("data=null")) == []


def test_what_was_made_from_a_former_result_is_no_part_of_the_run(load, tmp_path):
    toy_run(load, tmp_path, toy())
    toy_run(load, tmp_path, toy({"a": 2}), until=["one"])
    run = tmp_path / "runs/small"
    assert {entry.name for entry in run.iterdir() if entry.is_symlink()} == {"one"}
    assert toy_run(load, tmp_path, toy())[1] == [] and (run / "three/text").read_text() == "one+two"
