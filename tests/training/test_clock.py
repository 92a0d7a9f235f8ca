"""Every second of a run is in one account, and a step that does not end is told of."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest
import tiny

from affinage.errors import Preempted
from affinage.training import TrainJob, train
from affinage.training.ledger import ACCOUNTS, Ledger


def job(folder: Path, hook=None, feed=None, **settings: object) -> TrainJob:
    return TrainJob(
        graph=tiny.graph(layers=1),
        settings=tiny.settings(20, **settings),
        mesh={"data": 1},
        seed=1,
        feed=feed or tiny.RandomFeed(),
        folder=folder,
        validation={"x": tiny.HeldOut()},
        on_step=(hook,) if hook else (),
    )


class SlowFeed(tiny.RandomFeed):
    def iterate(self, start_step: int):
        for batch in super().iterate(start_step):
            time.sleep(0.05)
            yield batch


def test_the_accounts_are_the_wall_clock_also_over_a_failure_and_a_pause(tmp_path: Path):
    def fail(step: int, state: object) -> None:
        time.sleep(0.02)
        if step == 13:
            raise RuntimeError("the machine fails")

    with pytest.raises(RuntimeError):
        train(job(tmp_path, fail))
    paused = time.perf_counter()
    time.sleep(0.5)
    restarted = time.perf_counter()
    summary = train(job(tmp_path, feed=SlowFeed()))
    began = float((tmp_path / "alive").read_text())
    wall = (tmp_path / "summary.json").stat().st_mtime - began
    seconds = summary["seconds"]
    assert seconds["total"] == pytest.approx(sum(seconds[name] for name in ACCOUNTS), abs=0.01)
    assert seconds["total"] == pytest.approx(wall, rel=0.005)
    assert sum(summary["percent"].values()) == pytest.approx(100, abs=0.5)
    assert seconds["idle"] >= restarted - paused - 0.05
    assert 0.06 <= seconds["lost"] <= wall - 0.5  # three steps of 0.02 s were made after the last save
    assert seconds["data"] > 0.2  # ten batches of 0.05 s for steps of a few milliseconds
    assert all(seconds[name] > 0 for name in ("compute", "compile", "validation", "save", "restore"))
    # Those of the steps 5, 15 and 20: what step 10 cost is not in its own checkpoint, from which the run went on.
    assert summary["saves"]["count"] == 3 and 0 < summary["saves"]["stall_mean"] <= summary["saves"]["stall_most"]


def test_the_accounts_are_the_wall_clock_over_preemptions_and_a_failure(tmp_path: Path):
    began, summary = time.time(), None
    for stopped_at in (7, 12, 16, 0):

        def stop(step: int, state: object, at: int = stopped_at) -> None:
            if step == at == 12:
                raise RuntimeError("the machine fails")
            if step == at:
                os.kill(os.getpid(), signal.SIGTERM)

        with contextlib.nullcontext() if not stopped_at else pytest.raises((Preempted, RuntimeError)):
            summary = train(job(tmp_path, stop))
        time.sleep(0.1)
    assert summary is not None and summary["resumed_at"] == [7, 10, 16]
    wall = (tmp_path / "summary.json").stat().st_mtime - began
    assert summary["seconds"]["total"] == pytest.approx(wall, rel=0.01)
    assert sum(summary["percent"].values()) == pytest.approx(100, abs=0.5)
    assert summary["seconds"]["idle"] >= 0.3 and summary["seconds"]["lost"] > 0
    assert set(summary["percent"]) == set(ACCOUNTS)


def test_accounts_inside_of_others_are_not_counted_twice():
    ledger = Ledger()
    with ledger.account("compute"):
        time.sleep(0.02)
        with ledger.account("save"):
            time.sleep(0.05)
    seconds = ledger.rounded()
    assert 0.02 <= seconds["compute"] < 0.05 <= seconds["save"]
    ledger.lose_since({"compute": 0.01})
    lost = ledger.rounded()
    assert lost["compute"] == 0.01 and lost["save"] == 0
    assert lost["lost"] == pytest.approx(seconds["compute"] - 0.01 + seconds["save"], abs=0.002)


def test_a_step_that_does_not_end_is_told_with_all_stacks(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    def stuck_in_this_hook(step: int, state: object) -> None:
        if step == 7:
            time.sleep(2.0)

    train(job(tmp_path, stuck_in_this_hook, survival={"stuck_seconds": 0.3}, validate_every=99))
    told = (tmp_path / "stuck.txt").read_text()
    assert "train: step 7 has not ended for" in told and "stuck_in_this_hook" in told
    assert "step 7 has not ended" in capfd.readouterr().err


def test_a_disk_that_does_not_answer_keeps_no_stacks_to_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    def stuck_in_this_hook(step: int, state: object) -> None:
        if step == 7:
            time.sleep(3.0)

    os.mkfifo(tmp_path / "stuck.txt")  # opening it waits for a reader
    train(job(tmp_path, stuck_in_this_hook, survival={"stuck_seconds": 0.3}, validate_every=99))
    os.close(os.open(tmp_path / "stuck.txt", os.O_RDONLY | os.O_NONBLOCK))
    told = capfd.readouterr().err
    assert "step 7 has not ended" in told and "all stacks are here" in told and "in stuck_in_this_hook" in told


def test_a_slow_run_is_not_called_stuck(tmp_path: Path):
    train(job(tmp_path, lambda step, state: time.sleep(0.03), survival={"stuck_seconds": 60}))
    assert not (tmp_path / "stuck.txt").exists()
    assert json.loads((tmp_path / "summary.json").read_text())["health"]["sick"] == []
