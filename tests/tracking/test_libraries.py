"""What trackers write, read back by their own libraries, after a training that was stopped and went on."""

import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import tiny
from affinage import tracking
from affinage.tracking import TrackedRun, Trackers, trackers_of
from affinage.training import train

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs: a training of 10 steps that failed after step 8 and went on from step 5."""
    folder = tmp_path_factory.mktemp("runs")
    os.environ["WANDB_API_KEY"] = "a" * 40  # pretends to be a key; offline, nobody looks at it
    of = {"validation": {"pocket-world.en": tiny.HeldOut()}, "name": "sft", "eval_every": 5}
    of["trackers"] = trackers_of({name: {} for name in ("tensorboard", "wandb", "trackio", "mlflow")})
    of["tracked"] = TrackedRun("tiny/sft", "tiny", folder)
    with pytest.MonkeyPatch.context() as patch:
        long = dict.fromkeys(tracking.TO_CLOSE, 500.0)  # MLflow makes a database of forty tables
        patch.setattr(tracking, "TO_CLOSE", long)
        with pytest.raises(RuntimeError):
            train(tiny.job(folder / "stage", 10, tiny.fails_at(8), **of))
        train(tiny.job(folder / "stage", 10, **of))
    return folder


def losses(runs: Path) -> Any:
    return pytest.approx({row["step"]: row["loss"] for row in tiny.lines(runs / "stage") if "loss" in row})


def ids(runs: Path) -> dict[str, str]:
    return {file.stem.removeprefix("tracker-"): file.read_text() for file in (runs / "stage").glob("tracker-*.id")}


def test_tensorboard_reads_one_curve_of_every_step(runs: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert ids(runs)["tensorboard"] == str(runs / "tensorboard" / "tiny" / "sft")
    read = EventAccumulator(ids(runs)["tensorboard"])
    read.Reload()
    assert {event.step: event.value for event in read.Scalars("train/loss")} == losses(runs)
    assert len(read.Scalars("train/loss")) == 10  # what was written of step 6 before the stop is hidden
    assert {event.step for event in read.Scalars("validation/pocket-world.en/bits_per_byte")} == {5, 10}


def test_wandb_has_two_offline_parts_of_one_run(runs: Path):
    files = sorted((runs / "wandb").glob("offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{ids(runs)['wandb']}.wandb"] * 2
    assert all(file.read_bytes().count(b"train/loss") >= 5 for file in files)  # lines


def test_trackio_has_every_step(runs: Path):
    [database] = (runs / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select run_name, step, metrics from metrics").fetchall()
    assert {row[0] for row in rows} == {ids(runs)["trackio"]}
    read = [(step, json.loads(metrics).get("train/loss")) for _, step, metrics in rows]
    assert {step: loss for step, loss in read if loss is not None} == losses(runs)


def test_mlflow_has_every_step_the_settings_and_how_it_ended(runs: Path):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{runs / 'mlflow.db'}")
    run = client.get_run(ids(runs)["mlflow"])
    assert run.info.status == "FINISHED" and run.data.params["settings/schedule/peak_lr"] == "0.01"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert {point.step: point.value for point in history} == losses(runs)
    assert client.get_metric_history(run.info.run_id, "validation/pocket-world.en/loss")


def test_no_key_is_in_anything_that_was_written(runs: Path):
    files = [path for path in runs.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert not [path for path in files if b"a" * 40 in path.read_bytes()]


def test_an_mlflow_server_that_does_not_answer_is_reported_before_the_trackers_are_left(tmp_path: Path):
    reports: list[str] = []
    with Trackers(
        trackers_of({"mlflow": {"uri": "http://127.0.0.1:9"}}), TrackedRun("t", "t"), tmp_path, reports.append
    ):
        pass
    assert len(reports) == 1 and "mlflow fails" in reports[0]
