"""A process of ours is left only after its threads and exit handlers, and with its own status."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
        ("sys.exit()", 0, ""),
        ("sys.exit('no')", 1, "no\n"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt\n"),
        ("raise ValueError('wrong')", 1, "ValueError: wrong\n"),
    ],
)
def test_what_is_registered_is_done_and_nothing_after_it(end: str, status: int, said: str):
    ran = subprocess.run([sys.executable, "-c", PROGRAM.replace("{end}", end)], capture_output=True, text=True)
    assert ran.returncode == status
    assert ran.stdout.splitlines() == ["thread", "handler"]
    assert ran.stderr.endswith(said)


def test_a_line_that_nobody_reads_does_not_keep_it_from_saving():
    program = (
        "import sys, threading; from affinage.stopping import OwnProcess; told = threading.Event()\n"
        "with OwnProcess() as process, process.listen(lambda number: told.set()):\n"
        "    print('ready', flush=True); told.wait()\n"
        "    for _ in range(3): print('saving', flush=True)\n"
        "    sys.exit(75)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.stdout.close()  # as when the one that started it, and reads its output, is killed
    process.terminate()
    assert process.wait(timeout=300) == 75


@pytest.mark.parametrize("before", ["pass", "sys.stderr.close()"])
def test_a_thread_leaves_though_nobody_reads_why(before: str):
    program = (
        "import sys, threading, time; from affinage.stopping import leave\n"
        "def work():\n"
        "    print('ready', file=sys.stderr, flush=True); sys.stdin.readline(); {before}; leave('no reason')\n"
        "threading.Thread(target=work, daemon=True).start(); time.sleep(600)\n"
    ).replace("{before}", before)
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stderr is not None and process.stderr.readline() == "ready\n"
    process.stderr.close()
    process.stdin.close()
    try:
        assert process.wait(timeout=300) == 75
    finally:
        process.kill()


def test_the_program_is_left_this_way(tmp_path):
    """A thread that a library leaves in native code cannot be taken down any more."""
    program = (
        "import atexit, sys; from affinage.cli import main; sys.argv = ['affinage', *sys.argv[1:]];"
        "import affinage.stopping as s; s.os._exit = lambda status: (print('left', status), sys.stdout.flush());"
        "main()"
    )
    for words, status in ((["recipes"], 0), (["plan", "nobody"], 2)):
        ran = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, cwd=tmp_path)
        assert ran.stdout.splitlines()[-1] == f"left {status}", ran.stderr


def test_without_standard_error_it_is_left_all_the_same():
    program = "from affinage.stopping import leave; leave('no reason')"
    ran = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, program], timeout=300)
    assert ran.returncode == 75


def test_no_file_gets_the_number_of_a_stream_that_is_not_there(tmp_path):
    program = (
        "import os; import affinage.stopping as s; s.open_standard_streams()\n"
        "print(os.readlink('/proc/self/fd/2'), open('file', 'w').fileno() > 2)"
    )
    command = ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, program]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, cwd=tmp_path)
    assert ran.stdout == "/dev/null True\n"


@pytest.mark.parametrize("heard", [True, False], ids=["at the end of a session", "with nohup"])
def test_the_end_of_a_session_stops_it_unless_that_is_ignored(heard: bool):
    program = (
        "import threading; from affinage.stopping import OwnProcess; end = threading.Event()\n"
        "def listener(number): print(number.name, flush=True); number.name == 'SIGTERM' and end.set()\n"
        "with OwnProcess() as process, process.listen(listener): print('ready', flush=True); end.wait()\n"
    )
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL if heard else signal.SIG_IGN)  # a child inherits it
    try:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    if heard:
        assert process.stdout.readline() == "SIGHUP\n"
    process.terminate()
    assert process.communicate(timeout=300)[0] == "SIGTERM\n"
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("words", "number", "status"),
    [
        ("recipes", signal.SIGTERM, 75),
        ("recipes", signal.SIGHUP, 75),
        ("recipes", signal.SIGINT, 130),
        ("run tiny", signal.SIGTERM, 75),
        ("train tiny", signal.SIGINT, 75),
        ("--debug run tiny", signal.SIGINT, 75),
    ],
)
def test_told_while_it_imports_it_ends_at_once_and_a_training_as_one_to_be_started_again(
    words: str, number: signal.Signals, status: int
):
    program = (
        "import os, sys; from affinage.__main__ import main\n"
        "class Telling:\n"
        "    def find_spec(name, *_): name == 'affinage.cli' and os.kill(os.getpid(), {number})\n"
        "sys.meta_path.insert(0, Telling); main()"
    ).replace("{number}", str(int(number)))
    ran = subprocess.run([sys.executable, "-c", program, *words.split()], capture_output=True, text=True, timeout=300)
    assert (ran.returncode, ran.stdout, ran.stderr) == (status, "", "")


def test_an_error_that_a_library_has_made_of_the_word_to_stop_is_that_word():
    """As pydantic does, which builds its validators while the settings are imported."""
    program = (
        "import os, signal; from affinage.errors import Preempted; from affinage.stopping import OwnProcess\n"
        "try:\n"
        "    with OwnProcess():\n"
        "        try: os.kill(os.getpid(), signal.SIGTERM); [sum(range(100)) for _ in range(10**9)]\n"
        "        except Exception as error: raise ValueError('cannot be built') from error\n"
        "except Preempted as told: print(told, type(told.__cause__).__name__)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert ran.stdout == "SIGTERM; the stage that was running begins anew ValueError\n", ran.stderr


@pytest.mark.parametrize("listens", [False, True], ids=["nobody listens", "somebody listens later"])
def test_a_word_to_stop_that_a_library_has_swallowed_is_heard_all_the_same(listens: bool):
    program = (
        "import os, signal, time; import affinage.stopping as s; s._UNWINDS = 600 if {listens} else 0.5\n"
        "def listener(number): print(number.name, 'is heard', flush=True); os._exit(0)\n"
        "with s.OwnProcess() as process:\n"
        "    try: os.kill(os.getpid(), signal.SIGTERM); [sum(range(100)) for _ in range(10**9)]\n"
        "    except Exception: pass\n"
        "    if {listens}:\n"
        "        time.sleep(0.5)\n"
        "        with process.listen(listener): time.sleep(600)\n"
        "    time.sleep(600)\n"
    ).replace("{listens}", str(listens))
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    if listens:
        assert (ran.returncode, ran.stdout) == (0, "SIGTERM is heard\n"), ran.stderr
    else:
        assert ran.returncode == 75 and "Stopped: SIGTERM; the stage that was running" in ran.stderr, ran.stderr


IN_A_FINALIZER = """
class Freed:
    def __del__(self): tell()
Freed()
"""
AS_A_LOCK_OF_AN_IMPORT_IS_FREED = """
import _frozen_importlib
class Locks:
    def __getattr__(self, name): return getattr(locks, name)
    def acquire_lock(self):
        locks.acquire_lock()
        if sys._getframe(1).f_code.co_name == "cb": tell()
locks, _frozen_importlib._imp = _frozen_importlib._imp, Locks()
import wave
"""
IN_A_COLLECTION = """
import gc
gc.callbacks.append(lambda phase, facts: tell())
gc.collect()
"""


@pytest.mark.parametrize(
    "where",
    [IN_A_FINALIZER, AS_A_LOCK_OF_AN_IMPORT_IS_FREED, IN_A_COLLECTION],
    ids=["finalizer", "import", "garbage collection"],
)
def test_told_where_python_ignores_what_is_raised_it_ends_without_a_traceback(where: str):
    program = (
        "import os, signal, sys, time; import affinage.stopping as s\n"
        "def tell(): print('told', flush=True); os.kill(os.getpid(), signal.SIGTERM); sum(range(100))\n"
        f"with s.OwnProcess():\n    exec({where!r}); time.sleep(600)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 75 and ran.stdout.startswith("told\n"), ran.stderr
    assert "Stopped: SIGTERM" in ran.stderr and "Traceback" not in ran.stderr, ran.stderr


def test_a_run_can_be_told_to_stop_from_its_start_on(tmp_path: Path):
    """While it imports, reads its recipe, and in its first stage: it has nothing to lose, or saves."""
    program = (
        "import sys; from affinage.__main__ import main\n"
        "class Telling:\n"  # from here on signals are heeded
        "    def find_spec(name, *_): name == 'affinage.cli' and print('begins', flush=True)\n"
        "sys.meta_path.insert(0, Telling); main()"
    )
    recipe = Path(__file__).parent / "recipes" / "tiny.yaml"
    for index, seconds in enumerate((0.05, 0.2, 0.4, 0.7, 1.2)):
        process = subprocess.Popen(
            [sys.executable, "-c", program, "run", str(recipe), "--runs", str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None and process.stdout.readline() == "begins\n"
        time.sleep(seconds)
        process.send_signal((signal.SIGINT, signal.SIGTERM)[index % 2])
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 75 and "Traceback" not in said, said


def test_a_signal_that_a_library_takes_for_an_error_of_the_machine_is_one_all_the_same():
    program = (
        "import signal, sys\nfrom affinage.errors import Preempted, TransientError\n"
        "from affinage.stopping import OwnProcess\n"
        "try:\n"
        "    with OwnProcess():\n"
        "        try: signal.raise_signal(signal.SIGTERM)\n"
        "        except Preempted as error: raise TransientError(f'the devices do not answer: {error}') from error\n"
        "except Preempted: sys.exit(75)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=300).returncode == 75
