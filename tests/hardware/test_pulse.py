"""A process that shows no sign of life is named by another one, and ended where it is started again."""

import os
import signal
import subprocess
import sys
import time

import pytest

# A run that is at something; its guard's patience is shortened, as ten seconds are the least otherwise.
RUN = """
import ctypes, os, signal, time
from affinage.hardware import pulse, standstill
from affinage.recipe.training import SurvivalSettings
from affinage.stopping import OwnProcess

pulse.SILENT_FOR_LONG, pulse.ELSEWHERE, standstill._ALONE = {patience}, {longest}, {alone}
with OwnProcess(), pulse.guarded("train", SurvivalSettings(stuck_seconds=1, leave_when_stuck={leaves})):
    print("begun", flush=True)
    {at}
with open(f"/proc/self/task/{{os.getpid()}}/children") as children:
    print("done, with as many processes left:", len(children.read().split()), flush=True)
"""
STOPPED = "os.kill(os.getpid(), signal.SIGSTOP)"
# Native code that lets no thread of Python run: for ever, and until a byte comes.
NATIVE = "ctypes.PyDLL(None).sleep(3600)"
NATIVE_UNTIL_TOLD = "ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)"
DONE = "done, with as many processes left: "
LATE = 300  # seconds until what does not come is a failure


def started(
    at: str,
    patience: float = 2.0,
    leaves: bool | None = None,
    longest: float = 6.0,
    alone: float | None = None,
    **environment: str,
) -> subprocess.Popen:
    """The run, which somebody starts again but for one that is `alone`, and is left after so many seconds."""
    given = {**os.environ, **({"AFFINAGE_PARENT": "1"} if alone is None else {}), **environment}
    run = RUN.format(at=at, patience=patience, leaves=leaves, longest=longest, alone=alone or LATE)
    return subprocess.Popen(
        [sys.executable, "-c", run],
        env=given,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def ended(run: subprocess.Popen) -> tuple[int, str]:
    """How a run ended, and what was said."""
    said, _ = run.communicate(timeout=LATE)
    return run.returncode, said


@pytest.mark.parametrize(("at", "how"), [(STOPPED, "it is stopped, as by SIGSTOP"), (NATIVE, "it was last at")])
def test_a_lone_process_that_stands_still_with_all_its_threads_is_named_and_ended(at: str, how: str):
    status, said = ended(started(at))
    assert status == -signal.SIGKILL
    assert "train shows no sign of life for" in said and how in said and "train is ended" in said, said


def test_one_that_nobody_starts_again_is_ended_late_whatever_native_code_does():
    before = time.monotonic()
    status, said = ended(started(NATIVE, longest=1.0, alone=8.0))
    assert status == -signal.SIGKILL and time.monotonic() - before > 8.0
    assert "train shows no sign of life for" in said and "train is ended" in said, said


def test_one_that_comes_to_life_again_is_named_and_goes_on():
    run = started(NATIVE_UNTIL_TOLD, longest=LATE)
    assert run.stdout is not None and run.stdin is not None
    assert run.stdout.readline() == "begun\n"
    assert "train shows no sign of life for" in run.stdout.readline()
    run.stdin.write("\n")
    run.stdin.flush()
    status, said = ended(run)
    assert status == 0 and "done" in said and "is ended" not in said, said


@pytest.mark.parametrize(
    "stays", [{"leaves": False}, {"longest": 1.0, "alone": 3.0}], ids=["told to stay", "nobody starts it again"]
)
def test_one_that_may_be_stopped_for_as_long_as_one_likes_is_named_and_stays(stays: dict):
    run = started(STOPPED, **stays)
    assert run.stdout is not None and run.stdout.readline() == "begun\n"
    assert "it is stopped, as by SIGSTOP" in run.stdout.readline()
    time.sleep(8)  # more than one that may be ended has
    os.kill(run.pid, signal.SIGCONT)
    status, said = ended(run)
    assert status == 0 and "done" in said and "ended" not in said, said


def test_all_of_a_group_that_is_stopped_goes_on_without_a_word():
    run = started("time.sleep(3)", patience=5.0)
    assert run.stdout is not None and run.stdout.readline() == "begun\n"
    os.killpg(run.pid, signal.SIGSTOP)
    time.sleep(8)
    os.killpg(run.pid, signal.SIGCONT)
    assert ended(run) == (0, f"{DONE}0\n")


def test_one_that_lives_is_not_spoken_of_though_it_cannot_say_where_it_is():
    broken = "pulse.where = lambda: 1 / 0; time.sleep(8)"
    assert ended(started(broken, patience=5.0, AFFINAGE_HOSTS="2", AFFINAGE_HOST="1")) == (0, f"begun\n{DONE}0\n")


def test_a_process_that_was_forked_meanwhile_keeps_nobody_waiting():
    forked = "started = os.fork() or time.sleep(60) or os._exit(0)"
    run = started(forked, PYTHONWARNINGS="ignore")  # a later Python warns of forks beside threads
    assert run.stdout is not None
    assert [run.stdout.readline() for _ in range(2)] == ["begun\n", f"{DONE}1\n"]
    assert run.wait(LATE) == 0
    os.killpg(run.pid, signal.SIGKILL)
