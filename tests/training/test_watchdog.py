"""The watchdog reports what does not end, with all stacks, and leaves the process where somebody starts it again."""

import queue
import time
from pathlib import Path

import pytest

import tiny
from affinage.config.recipe import RuntimeSettings
from affinage.stopping import StopSignals
from affinage.training import train, watchdog
from affinage.training.watchdog import Watchdog
from waiting import PATIENCE, until


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
