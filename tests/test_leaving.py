"""A process of ours is left only after its threads and exit handlers, and with its own status: 75, told to stop."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from affinage.errors import TransientError, UserError, of_the_machine
from affinage.stopping import without_readers

TINY = Path(__file__).parent / "recipes" / "tiny.yaml"


def python(program: str, *words: str, before: str = "", **options: object) -> subprocess.CompletedProcess[str]:
    """What a program of Python said, and how it ended. `before`: what a shell does to its streams, such as `2>&-`."""
    command = [sys.executable, "-c", program, *words]
    shell = ["sh", "-c", f'exec "$@" {before}', "sh"] if before else []
    given = {"capture_output": True, "text": True, "timeout": 300, **options}
    return subprocess.run([*shell, *command], **given)  # type: ignore[call-overload]


def begun(program: str, *words: str, **options: object) -> subprocess.Popen[str]:
    """A program of Python, once it has said `ready`."""
    command = [sys.executable, "-c", program, *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]
    assert process.stdout.readline() == "ready\n"
    return process


PROGRAM = """
import atexit, sys, threading, time
from affinage.stopping import left_when_done

class LastOne:
    def __del__(self):
        print("torn down")

kept = LastOne()  # only Python's own way out, which would follow, takes it down
with left_when_done():
    atexit.register(lambda: print("handler"))
    threading.Thread(target=lambda: (time.sleep(0.2), print("thread")), name="worker").start()
    {end}
"""


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("pass", 0, ""),
        ("sys.exit(75)", 75, ""),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt\n"),
        ("raise ValueError('wrong')", 1, "ValueError: wrong\n"),
    ],
)
def test_what_is_registered_is_done_and_nothing_after_it(end: str, status: int, said: str):
    ran = python(PROGRAM.replace("{end}", end))
    assert (ran.returncode, ran.stdout.splitlines()) == (status, ["thread", "handler"])
    assert ran.stderr.endswith(said)


# A process that is stopped by a signal, and then has something to do.
STOPPED = """
import sys, time
from affinage.errors import Preempted
from affinage.stopping import StopSignals, without_readers
with without_readers():
    try:
        with StopSignals():
            print("ready", flush=True)
            time.sleep(600)
    except Preempted as why:
        for _ in range(3):
            print("saving", str(why)[:7], flush=True)
        sys.exit(75)
"""


def test_a_line_that_nobody_reads_does_not_keep_it_from_saving():
    process = begun(STOPPED)
    assert process.stdout is not None
    process.stdout.close()  # as when the one that started it, and reads its output, is killed
    process.terminate()
    assert process.wait(timeout=300) == 75


@pytest.mark.parametrize("before", ["pass", "sys.stderr.close()"])
def test_a_thread_leaves_though_nobody_reads_why(before: str):
    process = begun(
        "import sys, threading, time; from affinage.stopping import leave\n"
        f"def work(): sys.stdin.readline(); {before}; leave('no reason')\n"
        "threading.Thread(target=work, daemon=True).start(); print('ready', flush=True); time.sleep(600)\n",
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stderr is not None
    process.stderr.close()
    process.stdin.close()
    assert process.wait(timeout=300) == 75


@pytest.mark.parametrize("heard", [True, False], ids=["at the end of a session", "with nohup"])
def test_the_end_of_a_session_stops_it_unless_that_is_ignored(heard: bool):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL if heard else signal.SIG_IGN)  # a child inherits it
    try:
        process = begun(STOPPED)
    finally:
        signal.signal(signal.SIGHUP, before)
    process.send_signal(signal.SIGHUP)
    if not heard:
        time.sleep(0.2)
        process.terminate()
    output = process.communicate(timeout=300)[0]
    assert output == f"saving {'SIGHUP;' if heard else 'SIGTERM'}\n" * 3 and process.returncode == 75


TELLING = """
import os, sys
from affinage.__main__ import main
class Telling:  # from here on signals are heeded
    def find_spec(name, *_): name == 'affinage.cli' and {tell}
sys.meta_path.insert(0, Telling)
main()
"""


@pytest.mark.parametrize(
    ("words", "number", "status"),
    [
        ("recipes", signal.SIGTERM, 75),
        ("recipes", signal.SIGINT, 130),
        ("run tiny", signal.SIGHUP, 75),
        ("--debug run tiny", signal.SIGINT, 130),
    ],
)
def test_told_while_it_imports_it_ends_at_once(words: str, number: signal.Signals, status: int):
    ran = python(TELLING.replace("{tell}", f"os.kill(os.getpid(), {int(number)})"), *words.split())
    assert (ran.returncode, ran.stdout, ran.stderr) == (status, "", "")


@pytest.mark.full
@pytest.mark.parametrize("seconds", [0.05, 0.2, 0.4, 0.7, 1.2])
def test_a_run_can_be_told_to_stop_from_its_start_on(seconds: float, tmp_path: Path):
    """While it imports, reads its recipe, and in its first stage: it has nothing to lose, or saves."""
    program = TELLING.replace("{tell}", "print('ready', flush=True)")
    process = begun(program, "run", str(TINY), "--runs", str(tmp_path), stderr=subprocess.STDOUT)
    time.sleep(seconds)
    process.terminate()
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 75 and "Traceback" not in said, said


# Libraries that make something else of the error by which a signal is heard.
MADE_AN_ERROR = """
try: os.kill(os.getpid(), signal.SIGTERM); [sum(range(100)) for _ in range(10**9)]
except Exception as error: raise ValueError('cannot be built') from error
"""
SWALLOWED = """
try: os.kill(os.getpid(), signal.SIGTERM); [sum(range(100)) for _ in range(10**9)]
except Exception: pass
{then}
time.sleep(600)
"""
AGAIN = "time.sleep(1.6); os.kill(os.getpid(), signal.SIGTERM)"


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(MADE_AN_ERROR, id="made an error"),
        pytest.param(SWALLOWED.replace("{then}", "process.raise_pending()"), id="swallowed, and the next step begins"),
        pytest.param(SWALLOWED.replace("{then}", AGAIN), id="swallowed, and told again"),
    ],
)
def test_a_word_to_stop_is_heard_whatever_a_library_makes_of_it(where: str):
    ran = python(
        "import os, signal, sys, time\n"
        "from affinage.errors import Preempted\nfrom affinage.stopping import StopSignals\n"
        f"try:\n    with StopSignals() as process: exec({where!r})\n"
        "except Preempted as told: print(told, file=sys.stderr); sys.exit(75)\n"
    )
    assert ran.returncode == 75 and "Traceback" not in ran.stderr, ran.stderr


def test_output_that_nobody_reads_ends_no_work(monkeypatch: pytest.MonkeyPatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with without_readers():
            print("a line\n" * 100_000)
            print("another", flush=True)


@pytest.mark.parametrize(("number", "passes"), [(errno.EIO, True), (errno.ESTALE, True), (errno.ENOSPC, False)])
def test_a_disk_behind_a_network_may_come_back_and_a_full_one_does_not(number: int, passes: bool):
    message = of_the_machine(OSError(number, os.strerror(number), "runs"))
    assert isinstance(message, UserError) and isinstance(message, TransientError) == passes
