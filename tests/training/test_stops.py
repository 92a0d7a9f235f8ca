"""A training that is stopped itself (Ctrl-Z) goes on without a word: nobody was stuck meanwhile."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

import pytest

from affinage.hardware import stops
from affinage.hardware.stops import Stops
from affinage.recipe.training import SurvivalSettings
from affinage.training import watchdog
from affinage.training.ledger import LifeSign
from affinage.training.watchdog import Watchdog

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the state of a process is read as Linux tells it")

TRAINING = """
import sys, time
from pathlib import Path
from affinage.hardware import stops
from affinage.recipe.training import SurvivalSettings
from affinage.stopping import OwnProcess
from affinage.training.ledger import LifeSign
from affinage.training.watchdog import Watchdog

stops.JUMP, began = 1.5, time.monotonic()
settings = SurvivalSettings(stuck_seconds=4, leave_when_stuck=False)
with OwnProcess(), Watchdog("train", Path(sys.argv[1]), settings, LifeSign(None)) as dog:
    dog.step_begins(1)
    time.sleep(0.5)
    print("begun", flush=True)
    sys.stdin.readline()
    dog.save_lasts(time.monotonic() - began)
    dog.step_begins(2)
    print("a step may take less than 20 s:", dog.limit < 20, flush=True)
    time.sleep(1)
"""
DONE = "a step may take less than 20 s: True\n"


def state_of(process: subprocess.Popen) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def started(folder: Path, **group: object) -> subprocess.Popen:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-c", TRAINING, str(folder)], text=True, **pipes, **group)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTSTP, signal.SIGSTOP])
def test_the_time_of_a_stop_is_nobody_s(tmp_path: Path, number: signal.Signals):
    process = started(tmp_path, process_group=0)  # as a shell starts it
    os.kill(process.pid, number)
    while state_of(process) != "T":
        time.sleep(0.01)
    time.sleep(6)
    os.kill(process.pid, signal.SIGCONT)
    out, error = process.communicate("\n", timeout=300)
    assert (process.returncode, out) == (0, DONE) and not list(tmp_path.iterdir())
    # Nobody hears of SIGSTOP, and the thread that tells all stacks is not of Python.
    assert error == "" or number == signal.SIGSTOP, error


def stand(seconds: float) -> None:
    """As no thread of Python can run meanwhile: it keeps the interpreter's lock."""
    ctypes.PyDLL(None).usleep(int(1e6 * seconds))


def test_a_stop_while_the_watchdog_looks_is_nobody_s_and_a_long_look_is_no_stop(tmp_path: Path, monkeypatch):
    looks, end = threading.Event(), threading.Event()

    def look(seconds: float) -> None:
        looks.set()
        end.wait()

    monkeypatch.setattr(stops, "JUMP", 1.5)
    monkeypatch.setattr(watchdog, "told_without_python", look)
    settings = SurvivalSettings(stuck_seconds=0.2, leave_when_stuck=False)
    with Watchdog("train", tmp_path, settings, LifeSign(None)) as dog:
        dog.step_begins(1)
        assert looks.wait(300)
        stand(4.0)
        dog.step_begins(2)
        limit = dog.limit  # five times what the step took
        time.sleep(2.0)
        dog.step_begins(3)
        longer = dog.limit
        end.set()
    assert limit < 5 * 3.0 and longer > 5 * 1.9


def test_a_stop_that_is_noted_while_somebody_asks_is_counted_once(monkeypatch):
    class Slow(deque):
        def __iter__(self):
            time.sleep(1.0)  # the thread that notes it could come between
            return super().__iter__()

    monkeypatch.setattr(stops, "deque", Slow)
    monkeypatch.setattr(stops, "_TICK_EVERY", 2.0)
    monkeypatch.setattr(stops, "JUMP", 1.0)  # so all time is one of stops
    with Stops() as here:
        since = time.monotonic()
        time.sleep(1.5)
        seconds = here.seconds_since(since)
        assert 1.0 < seconds <= time.monotonic() - since


def test_ctrl_z_stops_nothing_that_no_shell_could_have_go_on(tmp_path: Path):
    process = started(tmp_path, start_new_session=True)
    os.kill(process.pid, signal.SIGTSTP)
    time.sleep(1)
    assert state_of(process) != "T"
    out, error = process.communicate("\n", timeout=300)
    assert (process.returncode, out, error) == (0, DONE, "")
