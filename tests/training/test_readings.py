"""Traces of steps, the lines that people read, every second of a run in one account, and steps that do not end."""

import gzip
import json
import os
import queue
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import tiny
from affinage.config.recipe import RuntimeSettings
from affinage.errors import UserWarned
from affinage.stopping import StopSignals
from affinage.training import metrics, train, watchdog
from affinage.training.metrics import ACCOUNTS, GoodputTimer, step_line
from affinage.training.watchdog import Watchdog
from run_affinage import refused
from waiting import PATIENCE, python, until

TRACED = "import sys, tiny; from pathlib import Path; from affinage.training import train; "
TRACED += "train(tiny.job(Path(sys.argv[1]), profile=(5, 4)))"


def test_a_trace_has_the_steps_asked_for(tmp_path: Path):
    # In a process of its own: JAX's profiler crashes where libtpu was loaded for its compiler alone.
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    python(TRACED, str(tmp_path), check=True, timeout=550, env={**os.environ, "PYTHONPATH": path})
    [perfetto] = (tmp_path / "profile").rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(perfetto.read_bytes()))["traceEvents"]
    assert {int(event["args"]["step_num"]) for event in events if event.get("name") == "train"} == {4, 5}
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))  # what TensorBoard's profiler opens


def test_a_training_whose_disk_is_too_small_is_warned_of_and_one_whose_folder_is_deleted_ends(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    delete = lambda step, _: shutil.rmtree(folder) if step == 4 else None  # noqa: E731
    with pytest.warns(UserWarned, match=r"a checkpoint takes .* GB, of [0-9]+ at once"):  # before the first step
        ended = refused(lambda: train(tiny.job(folder, 40, delete)), match="deleted or moved")
    assert str(folder) in ended.where and "--runs" in ended.fix and not folder.exists()


@pytest.mark.parametrize("by_heart", [True, False])
def test_a_validation_loss_that_has_risen_since_its_lowest_is_reported(tmp_path, capsys, monkeypatch, by_heart: bool):
    feed, how = tiny.RandomFeed(), {"schedule": {"peak_lr": 1e-2, "min_lr": 1e-2}}
    if by_heart:
        monkeypatch.setattr(feed, "batch", lambda step: tiny.RandomFeed().batch(0))
    summary = train(tiny.job(tmp_path, 60, feed=feed, validation={"held": tiny.HeldOut()}, **how))
    losses = {line["step"]: line["validation"]["held"]["loss"] for line in tiny.lines(tmp_path) if "validation" in line}
    assert len(losses) == 6 and ("has risen" in capsys.readouterr().out) == by_heart
    if by_heart:
        best = min(losses, key=losses.__getitem__)
        expected = {"lowest": losses[best], "lowest_step": best, "last": losses[60], "last_step": 60}
        assert best < 60 and summary["validation_rise"] == {"held": expected}


def test_a_line_has_the_speed_and_the_time_left():
    row = {"step": 10, "loss": 0.5, "grad_norm": 1.0, "learning_rate": 1e-3, "mfu": None, "skipped": 0.0}
    line = step_line({**row, "tokens": 640, "tokens_per_second": 32.0, "mfu": 0.25}, steps=100)
    assert "32 tok/s" in line and "25" in line
    assert "ETA 3 min 00 s" in line  # 90 steps of 64 at 32 a second
    assert "not finite" in step_line({**row, "tokens": 1, "tokens_per_second": 1.0, "grad_norm": None}, steps=10)


def test_accounts_inside_of_others_are_not_counted_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = SimpleNamespace(now=100.0, perf_counter=lambda: clock.now, time=lambda: clock.now)
    monkeypatch.setattr(metrics, "time", clock)
    accounts = GoodputTimer()
    with accounts.account("compute"):
        clock.now += 1
        with accounts.account("save"):
            clock.now += 8
        clock.now += 2
    clock.now += 0.5
    expected = {**dict.fromkeys(ACCOUNTS, 0.0), "compute": 3.0, "save": 8.0, "idle": 0.5}
    assert accounts.seconds() == expected
    accounts.lose_since({"seconds": {"compute": 0.25}})
    assert accounts.seconds() == {**expected, "compute": 0.25, "save": 0.0, "lost": 10.75}

    (tmp_path / "written").touch()
    os.utime(tmp_path / "written", (60.0, 60.0))  # the start before was saved at 50, and ended at 60
    accounts = GoodputTimer(tmp_path / "written")
    accounts.resume({"seconds": {"compute": 5.0}, "clock": 50.0})
    assert accounts.seconds() == {**dict.fromkeys(ACCOUNTS, 0.0), **{"compute": 5.0, "lost": 10.0, "paused": 51.5}}
    accounts.resume({"seconds": {"compute": 1e3, "paused": -1e3}, "clock": clock.now + 57})  # this clock is behind
    assert accounts.seconds()["paused"] == 51.5 - 1e3 and accounts.goodput == 1  # the checkpoint is of an older version


# ---- the watchdog reports what does not end, with all stacks, and leaves the process where it is started again


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> "queue.SimpleQueue[str]":
    """Why this process would have been left."""
    why: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(watchdog, "leave", why.put)
    monkeypatch.setattr(StopSignals, "current", StopSignals())
    monkeypatch.setenv("AFFINAGE_PARENT", "1")
    return why


def watched(folder: Path) -> Watchdog:
    return Watchdog("train", folder, RuntimeSettings(hang_timeout=0.2))


def reported(folder: Path) -> str:
    return (folder / "hang.txt").read_text() if (folder / "hang.txt").is_file() else ""


def test_a_step_that_does_not_end_is_reported_with_all_stacks_and_one_that_is_slow_is_not(tmp_path: Path):
    def stuck_in_this_hook(step: int, state: object) -> None:
        if step == 7:
            until(lambda: "in stuck_in_this_hook" in reported(tmp_path).partition("step 7 has not ended for")[2])

    train(tiny.job(tmp_path, 10, stuck_in_this_hook, hang_timeout=0.3))
    train(tiny.job(tmp_path / "slow", 10, lambda step, state: time.sleep(0.03), hang_timeout=300))
    assert not reported(tmp_path / "slow")
    speeds = [line["tokens_per_second"] for line in tiny.lines(tmp_path / "slow")[1:]]
    assert max(speeds) < 10 * min(speeds), "also of lines that are written together"


@pytest.mark.parametrize("leaves", [True, False])
def test_a_process_is_left_where_somebody_starts_it_again(tmp_path: Path, left, leaves: bool, monkeypatch):
    if not leaves:
        monkeypatch.delenv("AFFINAGE_PARENT")
    with watched(tmp_path) as dog:
        dog.beat("the restore")
        until(lambda: "Thread 0x" in reported(tmp_path))
        if leaves:
            assert "train: the restore has not ended" in left.get(timeout=PATIENCE)
        else:
            time.sleep(0.3)
            assert left.empty()
    assert reported(tmp_path).count("the restore has not ended") == 1


def test_what_may_take_long_is_waited_for(tmp_path: Path, left):
    with watched(tmp_path) as dog:
        dog.beat("the restore", at_most=600)
        time.sleep(0.5)
        assert left.empty() and not reported(tmp_path)
        dog.step(1)
        assert "step 1 has not ended" in left.get(timeout=PATIENCE)
        dog.step(2)  # as long as five times the one before
        time.sleep(0.5)
        assert "step 2" not in reported(tmp_path)
