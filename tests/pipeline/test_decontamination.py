"""When documents are cleared of benchmarks, of which, and what makes the stage run again."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from affinage.config.data import DecontaminateSettings
from affinage.config.load import load_recipe
from affinage.data.documents import document_files, read_documents
from affinage.data.overlap import BenchmarkItem
from affinage.pipeline.build import build_steps
from affinage.pipeline.eval_results import contamination_search
from affinage.pipeline.runner import PipelineRunner, ProgressListener
from choice_task import write_items, write_task

RECIPE = """\
name: small
model: {inputs: [tokens], nodes: {embed: {kind: embedding, in: tokens}}}
data: {sources: [texts.jsonl], filters: {min_characters: 3, language_threshold: 0}}
pretrain: {steps: 20, batch_size: 8, schedule: {peak_lr: 1e-3, min_lr: 1e-4}}
evaluate: {tasks: [%s]}
"""
QUESTION = "Which of the five harbours on the northern coast was rebuilt after the storm, and by whom was it done?"
ITEM = {"question": QUESTION, "choices": ["a", "b"], "right": 0}


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = [f"I was asked: {QUESTION.lower()} I did not know.", "Something else entirely."]
    texts.append("The answer is in the book over there.")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    write_task(tmp_path, "harbours", [ITEM])

    def load(tasks: str, *overrides: str):
        (tmp_path / "r.yaml").write_text(RECIPE % tasks)
        return load_recipe("r.yaml", overrides)

    return load


def stage_of(loaded):
    return next((stage for stage in build_steps(loaded) if stage.name == "decontaminate"), None)


def test_the_stage_is_there_if_there_is_something_to_look_for(load):
    assert stage_of(load("pocket-world")) is None  # its facts are its text
    assert stage_of(load("")) is None
    assert stage_of(load("pocket-world, harbours.yaml", "data.decontaminate=null")) is None
    assert stage_of(load("harbours.yaml", "data.decontaminate.benchmarks=false")) is None
    named = stage_of(load("pocket-world, hellaswag, harbours.yaml"))
    assert named.config["evaluate"] == {"tasks": ["hellaswag", "harbours.yaml"]}
    mine = "data.decontaminate={benchmarks: false, benchmark_files: [mine.txt]}"
    assert "evaluate" not in stage_of(load("hellaswag", mine)).config
    split = next(stage for stage in build_steps(load("harbours.yaml")) if stage.name == "split")
    assert split.inputs == ("decontaminate",)


def test_documents_are_cleared_of_tasks_and_files(load, tmp_path):
    answer = "The answer is in the book over there"
    (tmp_path / "mine.txt").write_text(f"{answer}, and the book is on the table.\n{answer}.")
    asked = "pocket-world, harbours.yaml", "data.decontaminate.benchmark_files=[mine.txt]"
    stage = stage_of(load(*asked))
    assert stage.files[0] == "harbours.yaml" and len(stage.files) == 3

    def runner():
        loaded = load(*asked)
        return PipelineRunner(loaded, tmp_path / "runs", build_steps(loaded), until=["decontaminate"])

    runner().run(ProgressListener())
    folder = tmp_path / "runs" / "small" / "decontaminate"
    kept = [row["text"] for batch in read_documents(folder) for row in batch.to_pylist()]
    assert kept == ["Something else entirely."]
    matches = pq.read_table(folder / "matches.parquet").to_pylist()
    found = [(match["benchmark"], match["item"], match["text"]) for match in matches]
    assert found == [("harbours", "0", QUESTION.lower()[:-1]), ("mine.txt", "2", answer)]
    assert all(step.complete for step in runner().plan())
    write_items(tmp_path, [ITEM | {"question": "Another question"}])
    reasons = {step.name: step.reason for step in runner().plan()}
    assert reasons["dedup"] == "complete" and "items.jsonl" in reasons["decontaminate"]


# ---- what was found in a text is a result of its own, made once for all models that were trained on that text


SETTINGS = DecontaminateSettings(n_grams=6)
UNSEEN = BenchmarkItem("quiz", "1", ("Who counted forty two grey gulls today?",))


def found(training: Path, items: list[BenchmarkItem], settings: DecontaminateSettings = SETTINGS) -> set[str]:
    seen = contamination_search(training, settings)
    assert seen is not None
    return {item for _, item in seen(items).found}


def in_text(run: Path) -> BenchmarkItem:
    text = next(row["text"] for batch in read_documents(run / "split/train") for row in batch.to_pylist())
    return BenchmarkItem("quiz", "0", (" ".join(text.split()[:7]),))


def test_a_text_is_looked_through_once_for_the_same_items(own_runs: Path):
    run = own_runs / "tiny"
    items = [in_text(run), UNSEEN]
    pretrain, tuned = ((run / training).resolve() for training in ("pretrain", "sft"))
    assert found(pretrain, items) == {"0"}
    assert len(list((own_runs / "store").glob("contamination-*"))) == 1
    assert found(pretrain, items, DecontaminateSettings(n_grams=8)) == set()  # runs of other lengths
    assert len(list((own_runs / "store").glob("contamination-*"))) == 2
    for path in document_files(run / "split/train"):
        path.unlink()
    assert found(pretrain, items) == found(tuned, items) == {"0"}, "no text is read again"
    assert found(pretrain, items[:1]) == set(), "other items are looked for, in what is left"
