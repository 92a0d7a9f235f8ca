"""Every second of a run is in one account, and a step that does not end is told of."""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny

from affinage.errors import Preempted
from affinage.training import TrainJob, ledger, train
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


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times, in seconds since 1970, at which accounts were read; the last time is that of the summary."""
    times, rounded = [], Ledger.rounded

    def timed(accounts: Ledger) -> dict[str, float]:
        found = rounded(accounts)
        times.append(time.time())
        return found

    monkeypatch.setattr(Ledger, "rounded", timed)
    return times


def test_the_accounts_are_the_wall_clock_also_over_a_failure_and_a_pause(tmp_path: Path, looked_at: list[float]):
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
    wall = looked_at[-1] - began
    seconds = summary["seconds"]
    assert seconds["total"] == pytest.approx(sum(seconds[name] for name in ACCOUNTS), abs=0.01)
    assert seconds["total"] == pytest.approx(wall, rel=0.005)
    assert sum(summary["percent"].values()) == pytest.approx(100, abs=0.5)
    assert seconds["paused"] >= restarted - paused - 0.05
    assert 0.06 <= seconds["lost"] <= wall - 0.5  # three steps of 0.02 s were made after the last save
    # Ten batches of 0.05 s for steps of a few milliseconds; on a busy machine most of these may take as long.
    assert seconds["data"] > 0.05
    assert all(seconds[name] > 0 for name in ("compute", "compile", "validation", "save", "restore"))
    # Those of the steps 5, 15 and 20: what step 10 cost is not in its own checkpoint, from which the run went on.
    assert summary["saves"]["count"] == 3 and 0 < summary["saves"]["stall_mean"] <= summary["saves"]["stall_most"]


def test_the_accounts_are_the_wall_clock_over_preemptions_and_a_failure(tmp_path: Path, looked_at: list[float]):
    summary = None
    for stopped_at in (7, 12, 16, 0):

        def stop(step: int, state: object, at: int = stopped_at) -> None:
            if step == at == 12:
                raise RuntimeError("the machine fails")
            if step == at:
                signal.raise_signal(signal.SIGTERM)

        with contextlib.nullcontext() if not stopped_at else pytest.raises((Preempted, RuntimeError)):
            summary = train(job(tmp_path, stop))
        time.sleep(0.1)
    assert summary is not None and summary["resumed_at"] == [7, 10, 16]
    wall = looked_at[-1] - float((tmp_path / "alive").read_text())
    assert summary["seconds"]["total"] == pytest.approx(wall, rel=0.01)
    assert sum(summary["percent"].values()) == pytest.approx(100, abs=0.5)
    assert summary["seconds"]["paused"] >= 0.3 and summary["seconds"]["lost"] > 0
    assert set(summary["percent"]) == set(ACCOUNTS)


def test_the_accounts_are_the_wall_clock_where_only_the_checkpoints_are_left(tmp_path: Path, looked_at: list[float]):
    def fail(step: int, state: object) -> None:
        time.sleep(0.1)
        if step == 13:
            raise RuntimeError("the machine fails")

    with pytest.raises(RuntimeError):
        train(job(tmp_path / "one machine", fail))
    began = float((tmp_path / "one machine" / "alive").read_text())
    shutil.copytree(tmp_path / "one machine" / "checkpoints", tmp_path / "another" / "checkpoints")
    time.sleep(0.5)
    summary = train(job(tmp_path / "another"))
    assert summary["resumed_at"] == [10]
    assert summary["seconds"]["total"] == pytest.approx(looked_at[-1] - began, rel=0.01)
    assert summary["seconds"]["lost"] == 0 and summary["seconds"]["paused"] >= 0.8  # three steps, and the pause


def test_accounts_inside_of_others_are_not_counted_twice(monkeypatch: pytest.MonkeyPatch):
    clock = SimpleNamespace(now=100.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(ledger, "time", clock)
    accounts = Ledger()
    with accounts.account("compute"):
        clock.now += 1
        with accounts.account("save"):
            clock.now += 8
        clock.now += 2
    clock.now += 0.5
    expected = {**dict.fromkeys(ACCOUNTS, 0.0), "compute": 3.0, "save": 8.0, "idle": 0.5, "total": 11.5}
    assert accounts.rounded() == expected
    accounts.lose_since({"compute": 0.25})
    assert accounts.rounded() == {**expected, "compute": 0.25, "save": 0.0, "lost": 10.75}


def wait_for(true: Callable[[], bool]) -> None:
    late = time.monotonic() + 300
    while not true():
        assert time.monotonic() < late
        time.sleep(0.01)


def of_step_7(told: str) -> str:
    """What is told with it; on a busy machine earlier steps may seem stuck, too."""
    return told.partition("train: step 7 has not ended for")[2]


def test_a_step_that_does_not_end_is_told_with_all_stacks(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    stuck = tmp_path / "stuck.txt"

    def stuck_in_this_hook(step: int, state: object) -> None:
        if step == 7:
            wait_for(lambda: stuck.exists() and "in stuck_in_this_hook" in of_step_7(stuck.read_text()))

    train(job(tmp_path, stuck_in_this_hook, survival={"stuck_seconds": 0.3}, validate_every=99))
    assert "step 7 has not ended" in capfd.readouterr().err


def test_a_disk_that_does_not_answer_keeps_no_stacks_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said = tmp_path / "said.txt"

    def stuck_in_this_hook(step: int, state: object) -> None:
        if step == 7:
            wait_for(lambda: "in stuck_in_this_hook" in of_step_7(said.read_text()))

    os.mkfifo(tmp_path / "stuck.txt")  # opening it waits for a reader
    # Of lines that come while pytest takes those before it may lose some.
    with said.open("w") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", file)
        train(job(tmp_path, stuck_in_this_hook, survival={"stuck_seconds": 0.3}, validate_every=99))
    os.close(os.open(tmp_path / "stuck.txt", os.O_RDONLY | os.O_NONBLOCK))
    assert "all stacks are here" in of_step_7(said.read_text())


def test_a_slow_run_is_not_called_stuck(tmp_path: Path):
    train(job(tmp_path, lambda step, state: time.sleep(0.03), survival={"stuck_seconds": 300}))
    assert not (tmp_path / "stuck.txt").exists()
    assert json.loads((tmp_path / "summary.json").read_text())["health"]["sick"] == []
