"""What does nothing is told with its stacks; what works, or waits for somebody who does, is not."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from affinage.errors import EXIT_PREEMPTED
from affinage.hardware import movement
from affinage.hardware.hosts import COORDINATOR
from affinage.hardware.movement import Movement, waits_for_others
from affinage.hardware.standstill import Standstill, looks_on
from affinage.recipe.training import SurvivalSettings
from affinage.stopping import PARENT

LIMIT = 120  # seconds until what does not come is a failure
_HOLDS_PYTHON = """
import ctypes, sys
from pathlib import Path
from affinage.hardware.standstill import Standstill
from affinage.recipe.training import SurvivalSettings
from affinage.stopping import OwnProcess

def native():
    ctypes.PyDLL(None).sleep(1000)  # keeps the lock of the interpreter

with OwnProcess(), Standstill("run", Path(sys.argv[1]), SurvivalSettings(stuck_seconds=2.0)):
    import time; time.sleep(1.0)
    native()
"""
_STANDS_STILL = """
import sys, threading
from pathlib import Path
from affinage.hardware import standstill
from affinage.recipe.training import SurvivalSettings
from affinage.stopping import OwnProcess

standstill.ELSEWHERE, standstill._ALONE = 2.0, 5.0
with OwnProcess(), standstill.Standstill("run", Path(sys.argv[1]), SurvivalSettings(stuck_seconds=1.0)):
    threading.Event().wait()
"""
_COMPUTES = "print(1, flush=True)\nwhile True: sum(range(1000))"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movement, "_LOOK_EVERY", 0.1)


def stands_still_here(file: Path) -> None:
    late = time.monotonic() + LIMIT
    while not (file.exists() and "Thread 0x" in file.read_text()):
        time.sleep(2.0)
        assert time.monotonic() < late


def test_a_single_process_that_stands_still_tells_where(tmp_path: Path, capfd):
    with Standstill("run", tmp_path / "run", SurvivalSettings(stuck_seconds=1.0)):
        stands_still_here(tmp_path / "run" / "stuck.txt")
    assert "in stands_still_here" in (tmp_path / "run" / "stuck.txt").read_text()
    assert "run: nothing has moved for" in capfd.readouterr().err


def test_a_single_process_that_stands_still_is_left_in_the_end(tmp_path: Path):
    environment = {name: value for name, value in os.environ.items() if name not in (PARENT, COORDINATOR)}
    words = [sys.executable, "-c", _STANDS_STILL, str(tmp_path)]
    ended = subprocess.run(words, env=environment, stderr=subprocess.PIPE, text=True, timeout=LIMIT)
    seconds = re.search(r"Stopped: run: nothing has moved for (\d+) s in the beginning", ended.stderr)
    assert ended.returncode == EXIT_PREEMPTED and seconds and int(seconds[1]) >= 5, ended.stderr


def test_somebody_who_looks_closer_tells_it_alone(tmp_path: Path, quick):
    with Standstill("run", tmp_path, SurvivalSettings(stuck_seconds=0.2)), Standstill.looked_after_by_another():
        (tmp_path / "stuck.txt").unlink(missing_ok=True)  # on a busy machine it takes that long to come here
        time.sleep(1.0)
        assert not (tmp_path / "stuck.txt").exists()


def come_to(true: Callable[[float], bool], work: Callable[[], object]) -> None:
    """Do a work again and again until this is so of the seconds for which nothing moved at the end of a second.

    On a busy machine what works may not come to it in one second, and threads of other tests may work in another.
    """
    late = time.monotonic() + LIMIT
    while not true(found := still_after(0.9, work)):
        assert time.monotonic() < late, found


def still_after(seconds: float, work: Callable[[], object]) -> float:
    """For how long nothing moved at the end of that time."""
    watched, until = Movement(), time.monotonic() + seconds
    while time.monotonic() < until:
        work()
        found = watched.look()
    return found


def moves(still: float) -> bool:
    return still < 0.4


def stands_still(still: float) -> bool:
    return still > 0.4


def test_what_computes_reads_or_waits_for_others_moves(tmp_path: Path, quick):
    (tmp_path / "file").write_bytes(bytes(100_000))
    come_to(stands_still, lambda: time.sleep(0.11))
    come_to(moves, lambda: sum(range(100_000)))
    come_to(moves, lambda: (time.sleep(0.11), (tmp_path / "file").read_bytes()))
    with waits_for_others():
        come_to(moves, lambda: time.sleep(0.11))


def test_what_a_process_of_its_own_computes_is_a_movement(quick):
    with subprocess.Popen([sys.executable, "-c", _COMPUTES], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline()
            come_to(moves, lambda: time.sleep(0.11))
        finally:
            child.kill()


def test_native_code_that_lets_no_thread_run_is_told_by_one_that_is_not_of_python(tmp_path: Path):
    given = [sys.executable, "-c", _HOLDS_PYTHON, str(tmp_path)]
    with subprocess.Popen(given, stderr=subprocess.PIPE, text=True) as child:
        try:
            said = iter(child.stderr)
            assert next(line for line in said if "Timeout" in line)
            assert next(line for line in said if "in native" in line)
        finally:
            child.kill()


def test_a_watch_that_cannot_look_says_so_once_and_looks_again(capfd: pytest.CaptureFixture[str]):
    ended, looks = threading.Event(), []

    def look() -> None:
        looks.append(1)
        if len(looks) == 4:
            ended.set()
        raise OSError(24, "Too many open files")

    looks_on(look, ended, 0.0, "train")
    assert len(looks) == 4
    assert capfd.readouterr().err.count("train: who watches over it cannot look: OSError: [Errno 24] Too many") == 1
