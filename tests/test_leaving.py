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


def test_a_line_that_nobody_reads_does_not_keep_it_from_saving():
    process = begun(
        "import sys, threading; from affinage.stopping import StopSignals, without_readers; told = threading.Event()\n"
        "with without_readers(), StopSignals() as process, process.listen(lambda number: told.set()):\n"
        "    print('ready', flush=True); told.wait()\n"
        "    for _ in range(3): print('saving', flush=True)\n"
        "    sys.exit(75)\n"
    )
    assert process.stdout is not None
    process.stdout.close()  # as when the one that started it, and reads its output, is killed
    process.terminate()
    assert process.wait(timeout=300) == 75


@pytest.mark.parametrize("heard", [True, False], ids=["at the end of a session", "with nohup"])
def test_the_end_of_a_session_stops_it_unless_that_is_ignored(heard: bool):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL if heard else signal.SIG_IGN)  # a child inherits it
    try:
        process = begun(
            "import threading; from affinage.stopping import StopSignals; end = threading.Event()\n"
            "def listener(number): print(number.name, flush=True); number.name == 'SIGTERM' and end.set()\n"
            "with StopSignals() as process, process.listen(listener): print('ready', flush=True); end.wait()\n"
        )
    finally:
        signal.signal(signal.SIGHUP, before)
    process.send_signal(signal.SIGHUP)
    assert process.stdout is not None
    if heard:
        assert process.stdout.readline() == "SIGHUP\n"
    process.terminate()
    assert process.communicate(timeout=300)[0] == "SIGTERM\n" and process.returncode == 0


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
        ("--debug run tiny", signal.SIGINT, 75),
    ],
)
def test_told_while_it_imports_it_ends_at_once_and_a_training_as_one_to_be_started_again(
    words: str, number: signal.Signals, status: int
):
    ran = python(TELLING.replace("{tell}", f"os.kill(os.getpid(), {int(number)})"), *words.split())
    assert (ran.returncode, ran.stdout, ran.stderr) == (status, "", "")


@pytest.mark.full
@pytest.mark.parametrize("seconds", [0.05, 0.2, 0.4, 0.7, 1.2])
def test_a_run_can_be_told_to_stop_from_its_start_on(seconds: float, tmp_path: Path):
    """While it imports, reads its recipe, and in its first stage: it has nothing to lose, or saves."""
    program = TELLING.replace("{tell}", "print('ready', flush=True)")
    process = begun(program, "run", str(TINY), "--runs", str(tmp_path), stderr=subprocess.STDOUT)
    time.sleep(seconds)
    process.send_signal(signal.SIGTERM if seconds < 0.5 else signal.SIGINT)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 75 and "Traceback" not in said, said


@pytest.mark.parametrize(("number", "passes"), [(errno.EIO, True), (errno.ESTALE, True), (errno.ENOSPC, False)])
def test_a_disk_behind_a_network_may_come_back_and_a_full_one_does_not(number: int, passes: bool):
    message = of_the_machine(OSError(number, os.strerror(number), "runs"))
    assert isinstance(message, UserError) and isinstance(message, TransientError) == passes
