"""The watchdog leaves what does not end, whoever reads what it says; and nothing that has ended."""

import contextlib
import math
import os
import queue
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny

from affinage.hardware import beats, stacks, standstill
from affinage.hardware.beats import Beats, Doing
from affinage.hardware.hosts import Hosts
from affinage.hardware.missed import missed_by
from affinage.recipe.training import SurvivalSettings
from affinage.stopping import OwnProcess
from affinage.training import TrainJob, train, watchdog
from affinage.training.ledger import LifeSign
from affinage.training.program import Program
from affinage.training.watchdog import Watchdog
from hosts_in_memory import Coordinator, HostInMemory


@pytest.fixture(autouse=True)
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine's, which is given the time to take all stacks."""
    monkeypatch.setattr(stacks, "_DISK", 60.0)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> "queue.SimpleQueue[str]":
    """Why this process would have been left."""
    why: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(watchdog, "leave", why.put)
    monkeypatch.setattr(OwnProcess, "current", OwnProcess())
    return why


@pytest.fixture
def stop_the_other(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes this the first of two hosts; silences the other, once it has shown a sign of life."""
    for name, seconds in (("_EVERY", 0.05), ("SILENT_FOR_LONG", 0.6)):
        monkeypatch.setattr(beats, name, seconds)
    coordinator = Coordinator()
    first, other = (HostInMemory(host, 2, coordinator=coordinator) for host in range(2))
    monkeypatch.setattr(Hosts, "current", first)
    its_beats = Beats(other, lambda: Doing(2, "the compilation", late=False))

    def stop() -> None:
        while "affinage/beat/1" not in coordinator.words:
            time.sleep(0.01)
        its_beats.close()

    return stop


def of_a_start(folder: Path, leave: bool | None = True) -> Watchdog:
    return Watchdog("train", folder, SurvivalSettings(stuck_seconds=0.2, leave_when_stuck=leave), LifeSign(None))


def of_a_step(folder: Path, leave: bool | None = True) -> Watchdog:
    found = of_a_start(folder, leave)
    found.step_begins(1)
    return found


def until_told(what: str, folder: Path) -> None:
    """As the file has it: of lines that come while pytest takes those before it may lose some."""
    late, told = time.monotonic() + 300, ""
    while what not in told:
        assert time.monotonic() < late, told
        time.sleep(0.01)
        with contextlib.suppress(FileNotFoundError):
            told = (folder / "stuck.txt").read_text()


def test_it_leaves_though_nobody_reads_what_it_says(tmp_path: Path, left, monkeypatch: pytest.MonkeyPatch):
    reads, writes = os.pipe()
    os.close(reads)
    monkeypatch.setattr(watchdog, "LAST_WORDS", 0.0)
    monkeypatch.setattr(sys, "stderr", os.fdopen(writes, "w"))
    with of_a_step(tmp_path):
        assert left.get(timeout=300).startswith("train: step 1 has not ended for")


def test_a_training_that_ends_while_it_is_about_to_be_left_is_not_left(
    tmp_path: Path, left, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watchdog, "LAST_WORDS", 600.0)
    with of_a_step(tmp_path):
        until_told("step 1 has not ended", tmp_path)
    assert left.empty()


def test_a_save_beside_the_steps_that_does_not_end_is_told_once_with_all_stacks_and_not_left(
    tmp_path: Path, left, capfd: pytest.CaptureFixture[str]
):
    with Watchdog("train", tmp_path, SurvivalSettings(stuck_seconds=9.0, leave_when_stuck=True), LifeSign(None)) as dog:
        for step, seconds in enumerate([0.0, 3.0, 6.0, 0.0, 3.0, 29.0, 31.0, 40.0, 0.0, 9.0]):
            dog.step_begins(step)
            dog.save_lasts(seconds)
    # A save of 6 s came before, so that 29 s are none to speak of; one of 40 came before the last.
    assert capfd.readouterr().err.count("the save beside the steps has not ended for 31 s; all stacks are in") == 1
    assert (tmp_path / "stuck.txt").read_text().count("the save beside") == 1
    assert "Thread 0x" in (tmp_path / "stuck.txt").read_text() and left.empty()


def test_it_leaves_without_standard_error(tmp_path: Path, left, monkeypatch: pytest.MonkeyPatch):
    os.mkfifo(tmp_path / "stuck.txt")  # opening it waits for a reader, so that the stacks have nowhere to go
    monkeypatch.setattr(watchdog, "LAST_WORDS", 0.0)
    monkeypatch.setattr(stacks, "_DISK", 0.0)
    monkeypatch.setattr(sys, "stderr", None)
    with of_a_step(tmp_path):
        assert left.get(timeout=300).startswith("train: step 1 has not ended for")
    os.close(os.open(tmp_path / "stuck.txt", os.O_RDONLY | os.O_NONBLOCK))


@pytest.mark.parametrize("by", ["AFFINAGE_PARENT", "AFFINAGE_COORDINATOR", ""])
def test_one_process_is_left_at_once_where_a_launcher_starts_it_again_and_else_late(
    tmp_path: Path, left, monkeypatch: pytest.MonkeyPatch, by: str
):
    monkeypatch.setattr(watchdog, "LAST_WORDS", 0.0)
    for name in ("AFFINAGE_PARENT", "AFFINAGE_COORDINATOR"):
        monkeypatch.delenv(name, raising=False)
    if by:
        monkeypatch.setenv(by, "1")
    with of_a_step(tmp_path, leave=None):
        if by:
            assert left.get(timeout=300)
        else:
            until_told("step 1 has not ended", tmp_path)
    assert left.empty() or by
    monkeypatch.setattr(standstill, "_ALONE", 0.5)
    with of_a_step(tmp_path, leave=None):
        assert left.get(timeout=300)


def test_whoever_is_told_never_to_leave_stays():
    settings = SurvivalSettings(leave_when_stuck=False)
    assert standstill.stays_when_stuck(settings, Hosts.current) == math.inf


def test_what_may_take_long_is_told_in_time_and_left_late(tmp_path: Path, left, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watchdog, "LAST_WORDS", 0.0)
    with of_a_start(tmp_path) as dog:
        dog.begins("the restore", told_after=1, left_after=1, may_take=600)
        until_told("the restore has not ended", tmp_path)
        time.sleep(0.3)
        assert left.empty()
        dog.begins("the restore", told_after=1, left_after=1, may_take=0.3)
        assert "the restore has not ended" in left.get(timeout=300)


def test_the_first_steps_have_as_long_as_their_arithmetic_may_take(
    tmp_path: Path, left, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watchdog, "LAST_WORDS", 0.0)
    with of_a_start(tmp_path) as dog:
        dog.expects(600)
        dog.step_begins(1)
        dog.step_begins(2)  # the devices compute the first, and whoever gave it to them knows no time of it
        assert dog.limit == 600
        time.sleep(0.5)
        assert left.empty() and not (tmp_path / "stuck.txt").exists()
        for step in range(3, 60):
            dog.step_begins(step)
        assert dog.limit < 600
        assert "step 59 has not ended" in left.get(timeout=300)


def test_a_host_that_stands_still_is_named_before_what_it_is_at_takes_long(
    tmp_path: Path, stop_the_other: Callable[[], None]
):
    with of_a_start(tmp_path) as dog:
        dog.begins("the compilation", told_after=1e6)
        stop_the_other()
        until_told("host 1 shows no sign of life, last at the compilation", tmp_path)


def test_a_host_that_shows_no_sign_of_life_is_named_though_this_one_goes_on_with_other_things(
    tmp_path: Path, left, stop_the_other: Callable[[], None]
):
    settings = SurvivalSettings(stuck_seconds=2, leave_when_stuck=True)
    with Watchdog("train", tmp_path, settings, LifeSign(None)) as dog:
        stop_the_other()
        late, why = time.monotonic() + 300, ""
        # None of it lasts as long as is waited for the other; on a busy machine this one may seem silent, too.
        while "host 1 shows no sign of life, last at the compilation" not in why:
            assert time.monotonic() < late, why
            dog.begins("another thing")
            with contextlib.suppress(queue.Empty):
                why = left.get(timeout=0.05)
    assert "Thread 0x" in (tmp_path / "stuck.txt").read_text()


def test_who_is_missed_is_read_in_what_this_host_says_where_it_is_late_too(
    tmp_path: Path, left, stop_the_other: Callable[[], None]
):
    with of_a_start(tmp_path) as dog:
        dog.begins("the compilation", told_after=1e6)
        stop_the_other()
        why = ""
        while "the compilation has not ended" not in why or ", and host 1 shows no sign of life" not in why:
            why = left.get(timeout=300)  # on a busy machine this one may seem silent, too
    assert missed_by(f"Stopped: {why}. Run the same command to go on.") == (1, "shows no sign of life")


def test_the_compilation_and_what_reads_the_state_are_watched_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    began: list[tuple[str, float]] = []
    begins = Watchdog.begins

    def noted(self: Watchdog, what: str, *, may_take: float = 0.0, **more: float) -> None:
        began.append((what, may_take))
        begins(self, what, may_take=may_take, **more)

    monkeypatch.setattr(Watchdog, "begins", noted)
    compiled = Program.compile_training
    monkeypatch.setattr(Program, "compile_training", lambda self: (began.append(("compiles", 0.0)), compiled(self))[1])
    job = TrainJob(
        graph=tiny.graph(layers=1),
        settings=tiny.settings(4),
        mesh={"data": 1},
        seed=1,
        feed=tiny.RandomFeed(),
        folder=tmp_path,
    )
    train(job)
    start = [what for what, _ in began[:4]]
    assert start == ["the compilation", "compiles", "the end of the compilation", "the first weights"]
    assert dict(began)["the compilation"] >= 3600 and dict(began)["the first weights"] >= 2 * 600
