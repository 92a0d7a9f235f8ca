"""The watchdog tells what does not end, with all stacks, and leaves it, whoever reads what it says."""

import math
import queue
import time
from pathlib import Path

import pytest
import tiny

from affinage.config.runtime import RuntimeSettings
from affinage.hardware import beats, standstill
from affinage.hardware.beats import Beats, Doing
from affinage.hardware.hosts import Hosts
from affinage.hardware.missed import missed_by
from affinage.stopping import OwnProcess
from affinage.training import train, watchdog
from affinage.training.ledger import LifeSign
from affinage.training.watchdog import Watchdog
from hosts_in_memory import Coordinator, HostInMemory
from waiting import PATIENCE, until


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> "queue.SimpleQueue[str]":
    """Why this process would have been left."""
    why: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(watchdog, "leave", why.put)
    monkeypatch.setattr(watchdog, "LAST_WORDS", 0.0)
    monkeypatch.setattr(OwnProcess, "current", OwnProcess())
    return why


def of_a_start(folder: Path, leave: bool | None = True, hang_timeout: float = 0.2) -> Watchdog:
    settings = RuntimeSettings(hang_timeout=hang_timeout, exit_on_hang=leave)
    return Watchdog("train", folder, settings, LifeSign(None))


def of_a_step(folder: Path, **how: bool | float | None) -> Watchdog:
    found = of_a_start(folder, **how)
    found.step_begins(1)
    return found


def told(folder: Path) -> str:
    """As the file has it: of lines that come while pytest takes those before it may lose some."""
    return (folder / "stuck.txt").read_text() if (folder / "stuck.txt").is_file() else ""


def test_a_step_that_does_not_end_is_told_with_all_stacks_and_one_that_is_slow_is_not(tmp_path: Path):
    def stuck_in_this_hook(step: int, state: object) -> None:
        if step == 7:
            until(lambda: "in stuck_in_this_hook" in told(tmp_path).partition("step 7 has not ended for")[2])

    train(tiny.job(tmp_path, 10, stuck_in_this_hook, hang_timeout=0.3))
    train(tiny.job(tmp_path / "slow", 10, lambda step, state: time.sleep(0.03), hang_timeout=300))
    assert not told(tmp_path / "slow")


def test_a_save_beside_the_steps_that_does_not_end_is_told_once_with_all_stacks_and_not_left(tmp_path: Path, left):
    with of_a_start(tmp_path, hang_timeout=9.0) as dog:
        for step, seconds in enumerate([0.0, 3.0, 6.0, 0.0, 3.0, 29.0, 31.0, 40.0, 0.0, 9.0]):
            dog.step_begins(step)
            dog.save_lasts(seconds)
        until(lambda: "Thread 0x" in told(tmp_path))
    # A save of 6 s came before, so that 29 s are none to speak of; one of 40 came before the last.
    assert told(tmp_path).count("the save beside the steps has not ended for 31 s") == 1 and left.empty()


@pytest.mark.parametrize(
    ("leave", "by", "seconds"),
    [
        (True, "", 0),
        (False, "AFFINAGE_PARENT", math.inf),
        (None, "AFFINAGE_PARENT", 0),
        (None, "", 3600),
    ],
)
def test_a_process_is_left_at_once_where_somebody_starts_it_again_and_else_late(
    leave: bool | None, by: str, seconds: float, monkeypatch: pytest.MonkeyPatch
):
    for name in ("AFFINAGE_PARENT", "AFFINAGE_COORDINATOR"):
        monkeypatch.delenv(name, raising=False)
    if by:
        monkeypatch.setenv(by, "1")
    found = standstill.stays_when_stuck(RuntimeSettings(exit_on_hang=leave), Hosts.current)
    assert found == seconds


def test_what_may_take_long_is_told_in_time_and_left_late(tmp_path: Path, left):
    with of_a_start(tmp_path) as dog:
        dog.begins("the restore", told_after=1, left_after=1, may_take=600)
        until(lambda: "the restore has not ended" in told(tmp_path))
        time.sleep(0.3)
        assert left.empty()
        dog.begins("the restore", told_after=1, left_after=1, may_take=0.3)
        assert "the restore has not ended" in left.get(timeout=PATIENCE)


def test_the_first_steps_have_as_long_as_their_arithmetic_may_take(tmp_path: Path, left):
    with of_a_start(tmp_path) as dog:
        dog.expects(600)
        dog.step_begins(1)
        dog.step_begins(2)  # the devices compute the first, and whoever gave it to them knows no time of it
        assert dog.limit == 600
        time.sleep(0.5)
        assert left.empty() and not told(tmp_path)
        for step in range(3, 60):
            dog.step_begins(step)
        assert dog.limit < 600
        assert "step 59 has not ended" in left.get(timeout=PATIENCE)


def test_a_host_that_shows_no_sign_of_life_is_named_and_left(tmp_path: Path, left, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(beats, "SILENT_FOR_LONG", 2.0)
    coordinator = Coordinator()
    first, other = (HostInMemory(host, 2, coordinator=coordinator) for host in range(2))
    monkeypatch.setattr(Hosts, "current", first)
    its_beats = Beats(other, lambda: Doing(2, "the compilation", late=False))
    with of_a_start(tmp_path, hang_timeout=2) as dog:
        dog.begins("the compilation", told_after=1e6)
        until(lambda: "affinage/beat/1" in coordinator.words)
        its_beats.close()
        why = ""
        while "host 1 shows no sign of life" not in why or "last at the compilation" not in why:
            why = left.get(timeout=PATIENCE)  # on a busy machine this one may seem silent, too
    assert "Thread 0x" in told(tmp_path)
    assert missed_by(f"Stopped: {why}. Run the same command to go on.") == (1, "shows no sign of life")
