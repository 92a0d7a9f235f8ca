"""When documents are cleared of benchmarks, of which, and what makes the stage run again."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from affinage.config.data import DecontaminateSettings
from affinage.config.load import load_recipe
from affinage.data.decontaminate import BenchmarkItem
from affinage.pipeline.build import build_steps
from affinage.pipeline.runner import PipelineRunner, ProgressListener
from affinage.pipeline.steps_eval import contamination_search
from choice_task import write_items, write_task
from source_forms import rows_of, write_lines

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
    write_lines(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
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
    assert [row["text"] for row in rows_of(folder)] == ["Something else entirely."]
    matches = pq.read_table(folder / "matches.parquet").to_pylist()
    found = [(match["benchmark"], match["item"], match["text"]) for match in matches]
    assert found == [("harbours", "0", QUESTION.lower()[:-1]), ("mine.txt", "2", answer)]
    assert all(step.complete for step in runner().plan())
    write_items(tmp_path, [ITEM | {"question": "Another question"}])
    reasons = {step.name: step.reason for step in runner().plan()}
    assert reasons["dedup"] == "complete" and "items.jsonl" in reasons["decontaminate"]


def test_the_text_that_a_model_was_trained_on_is_searched_for_items(tiny_runs: Path):
    run = tiny_runs / "tiny"
    text = rows_of(run / "split/train")[0]["text"]
    items = [BenchmarkItem("quiz", "0", (" ".join(text.split()[:7]),))]
    items.append(BenchmarkItem("quiz", "1", ("Who counted forty two grey gulls today?",)))
    for training in ("pretrain", "sft"):
        for n_grams, found in ((6, {("quiz", "0")}), (8, set())):
            seen = contamination_search((run / training).resolve(), DecontaminateSettings(n_grams=n_grams))
            assert seen is not None and seen(items).found == found
