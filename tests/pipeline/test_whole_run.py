"""A whole run, from text to a released model: every step has its result, and the last model is the one that is used."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

import tiny
import tiny_run
from affinage.pipeline.models import is_chat
from affinage.pipeline.opening import open_model
from affinage.pipeline.store import Store, read_request
from affinage.results import RESULTS, Result, read_json
from run_affinage import run


def summary(runs: Path, step: str) -> dict:
    return read_json(runs / "tiny" / step / "result.json")


def weights(name: str, runs: Path) -> dict:
    return open_model(name, runs).params


def test_every_step_has_a_whole_result(tiny_runs: Path):
    store = Store(tiny_runs / "store")
    for folder in filter(Path.is_dir, (tiny_runs / "tiny").iterdir()):  # which those are: test_versions.py
        request, step = read_request(folder), folder.name
        assert request.step == step and store.is_complete(request)
        assert all(store.find(*made).exists() for made in request.inputs.items())
        RESULTS.get(step, Result).model_validate(summary(tiny_runs, step))  # raises if a fact has another form


def test_a_finished_run_has_nothing_to_do(own_runs: Path, capsys: pytest.CaptureFixture[str]):
    """From a copy elsewhere: where the results are is in no key."""
    before = {path: path.read_bytes() for path in own_runs.rglob("*") if path.is_file()}
    run("run", *tiny_run.WORDS, "--runs", str(own_runs))
    assert "Nothing to do" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in own_runs.rglob("*") if path.is_file()} == before


def test_documents_are_counted_through_the_data_steps(tiny_runs: Path):
    data = {step: summary(tiny_runs, step) for step in ("ingest", "filter", "dedup", "split", "tokenize")}
    for before, step in itertools.pairwise(("ingest", "filter", "dedup", "split")):
        assert data[step]["documents_in"] == data[before]["documents_out"]
        held_out = data[step].get("validation_documents", 0)
        removed = sum(data[step]["removed"].values())
        assert data[step]["documents_in"] == data[step]["documents_out"] + removed + held_out
    assert data["filter"]["removed"] and data["dedup"]["removed"]
    assert data["tokenize"]["train"]["documents"] == data["split"]["documents_out"]
    tokenizer = summary(tiny_runs, "train-tokenizer")
    assert tokenizer["vocabulary"] == 512 and tokenizer["round_trip"]["exact"] == tokenizer["round_trip"]["documents"]


def test_preferences_begin_undecided_and_log_their_rewards(tiny_runs: Path):
    lines = tiny.lines(tiny_runs / "tiny/dpo")
    rows = [line for line in lines if "loss" in line]
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)  # the model is its own reference
    assert rows[0]["rewards/margins"] == pytest.approx(0, abs=1e-5) and rows[-1]["rewards/margins"] > 0
    for row in rows:
        assert row["rewards/margins"] == pytest.approx(row["rewards/chosen"] - row["rewards/rejected"], abs=1e-5)
    validation = [line["validation"] for line in lines if "validation" in line][-1]["pocket-world"]
    assert {"loss", "rewards/accuracies"} <= set(validation) and "bits_per_byte" not in validation


def test_the_last_model_is_the_one_that_is_used_and_released(tiny_runs: Path):
    """It has the adapters of the last training in its weights, and nothing else of the one before is changed."""
    assert is_chat((tiny_runs / "tiny/dpo").resolve()) and open_model("tiny", tiny_runs).system_prompt == ""
    last, before, base = (weights(name, tiny_runs) for name in ("tiny", "tiny/sft", "tiny/pretrain"))
    np.testing.assert_array_equal(last["embed"]["embedding"], before["embed"]["embedding"])
    assert not np.allclose(before["embed"]["embedding"], base["embed"]["embedding"], atol=1e-7)
    query = [each["blocks"]["attention"]["query"]["kernel"] for each in (last, before)]
    assert not np.allclose(*query, atol=1e-7)
    assert open_model("tiny", tiny_runs).graph == open_model("tiny/sft@4", tiny_runs).graph
    released = weights(str(tiny_runs / "tiny/export/model"), tiny_runs)
    np.testing.assert_allclose(released["blocks"]["attention"]["query"]["kernel"], query[0], atol=1e-6)
    assert "Preferences" in (tiny_runs / "tiny/report.html").read_text()


def test_each_model_is_judged_on_the_same_tasks(tiny_runs: Path):
    base, *chats = (summary(tiny_runs, f"evaluate-{model}")["tasks"] for model in ("base", "sft", "dpo"))
    for chat in chats:
        assert base.keys() < chat.keys() and {name.split("_")[1] for name in chat.keys() - base.keys()} == {"chat"}
    assert all(task["items"] == 4 for task in (base | chats[0]).values())


def test_only_adapters_are_exported_and_the_user_names_their_base(own_runs: Path, tmp_path: Path):
    for words, base in (([], None), (["--base", "me/base"], "me/base")):
        to = tmp_path / f"adapter-{base is None}"
        run("export", "tiny", "--runs", str(own_runs), "--adapter", "--to", str(to), *words)
        config = json.loads((to / "adapter_config.json").read_text())
        assert config["r"] == 4 and config["base_model_name_or_path"] == base


def test_an_export_of_the_training_before_is_not_taken_for_that_of_the_last(own_runs: Path):
    words = ["--runs", str(own_runs), "--until"]
    run("run", *tiny_run.WORDS, "--set", "dpo=null", *words, "export")
    run("run", *tiny_run.WORDS, *words, "dpo")
    run("export", "tiny", "--runs", str(own_runs))
    assert "dpo" in json.loads((own_runs / "tiny" / "export" / "request.json").read_text())["inputs"]
