"""Killed or told to stop in any phase of a run: the same bits in the end, and nothing lost that was not said."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import runs
import tiny

from affinage.checkpoint import CheckpointStore
from affinage.config.recipe import RuntimeSettings
from affinage.errors import EXIT_PREEMPTED, Preempted
from affinage.stopping import StopSignals
from affinage.training.watchdog import Watchdog
from curves import curve
from waiting import until

STEPS, EVERY = 30, 5


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    runs.finish(folder, STEPS)
    return folder


def newest(folder: Path) -> int:
    return max([0, *CheckpointStore(folder / "checkpoints").steps()])


def assert_ends_as(undisturbed: Path, folder: Path) -> None:
    runs.finish(folder, STEPS)
    assert tiny.saved_bits(folder, STEPS) == tiny.saved_bits(undisturbed, STEPS)
    assert curve(folder) == curve(undisturbed)


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.full)])
def test_killed_at_random_moments_it_ends_with_the_same_bits(tmp_path: Path, undisturbed: Path, kills: int):
    folders, draw, killed, lost = [tmp_path / "run"], random.Random(0), 0, 0
    for kill in range(kills):
        if newest(folders[-1]) > STEPS - 2 * EVERY:  # nearly done: there is more to kill in another run
            folders.append(tmp_path / f"run-{kill}")
        folder = folders[-1]
        begun = newest(folder)
        run = runs.start(folder, STEPS)
        # Every other time after a few steps, else in the start, the compilation, the restore.
        run.until(run.said if kill % 2 else run.steps)
        time.sleep(draw.uniform(0.0, 1.0 if kill % 2 else 0.15))
        run.process.kill()
        killed += run.wait() == -signal.SIGKILL
        lost = max(lost, max([begun, *run.steps()]) - newest(folder))
    assert killed >= max(1, kills // 2)
    assert lost <= 2 * EVERY  # an interval, and the save in flight
    for folder in folders:
        assert_ends_as(undisturbed, folder)


ALL = ("start", "first batch", "compilation", "evaluation", "restore", "save", "step")


@pytest.mark.parametrize("phases", [("compilation", "save"), pytest.param(ALL, marks=pytest.mark.full)], ids=len)
def test_told_to_stop_in_any_phase_it_loses_no_step(tmp_path: Path, undisturbed: Path, phases: tuple[str]):
    folder = tmp_path / "run"
    for index, phase in enumerate(phases):
        run = runs.start(folder, STEPS, when=phase, number=(signal.SIGTERM, signal.SIGINT)[index % 2])
        assert run.wait() == EXIT_PREEMPTED, (phase, run.said())
        assert f"signal in {phase}" in run.said()
        assert bool(run.steps()) == (phase in ("evaluation", "save", "step"))
        assert newest(folder) == max([newest(folder), *run.steps()]), phase
    assert not (folder / "summary.json").exists()
    assert_ends_as(undisturbed, folder)


IN_NATIVE_CODE = """
import hashlib, pathlib
from affinage.config.recipe import RuntimeSettings
from affinage.errors import Preempted
from affinage.stopping import StopSignals, leave
from affinage.training.watchdog import Watchdog
stop = Watchdog('run', pathlib.Path(), RuntimeSettings(preemption_grace=1))
with StopSignals(), stop:
    try:
        print("begun", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2 * 10**9)  # native code for minutes, like a compiler
    except Preempted as told:  # the signal came before it
        leave(str(told))
"""


@pytest.mark.parametrize(
    ("steps_to_lose", "number", "again", "status", "stacks"),
    [
        pytest.param(False, signal.SIGTERM, False, EXIT_PREEMPTED, False, id="nothing to save: at once"),
        pytest.param(True, signal.SIGTERM, True, EXIT_PREEMPTED, True, id="after the grace"),
        pytest.param(True, signal.SIGINT, True, 130, False, id="by hand: the second time"),
    ],
)
def test_native_code_that_does_not_end_is_left(steps_to_lose: bool, number: int, again: bool, status, stacks):
    known = "stop.steps_to_lose = True; " if steps_to_lose else ""
    command = [sys.executable, "-c", IN_NATIVE_CODE.replace("print", f"{known}print")]
    process, late = subprocess.Popen(command, stdout=-1, stderr=-1, text=True), time.monotonic() + 300
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    computes = psutil.Process(process.pid)
    before = computes.cpu_times().user
    until(lambda: computes.cpu_times().user >= before + 0.2)  # it is in native code
    process.send_signal(number)
    while again and process.poll() is None and time.monotonic() < late:
        time.sleep(2.5)  # more than what counts as one press
        process.send_signal(number)
    _, said = process.communicate(timeout=300)
    assert process.returncode == status
    assert ('File "<string>", line 11 in <module>' in said) == stacks


def test_a_signal_that_comes_too_late_for_a_training_stops_what_would_follow(tmp_path: Path):
    with StopSignals() as signals:
        signals.raise_pending()
        with Watchdog("run", tmp_path, RuntimeSettings(preemption_grace=600.0)):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Preempted):
            signals.raise_pending()
