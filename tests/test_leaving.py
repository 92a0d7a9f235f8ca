"""A process of ours is left only after its threads and exit handlers, and with its own status: 75, told to stop."""

import ast
import errno
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from affinage.config.recipe import RuntimeSettings
from affinage.data.files import reports_damage
from affinage.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, Preempted, TransientError, UserError, of_the_machine
from affinage.hardware.devices import accelerator_is_here
from affinage.stopping import StopSignals, without_readers
from affinage.training.watchdog import Watchdog
from waiting import begun, python, until

TINY = Path(__file__).parent / "recipes" / "tiny.yaml"


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


@pytest.mark.parametrize(("end", "status", "said"), [
    ("pass", 0, ""), ("sys.exit(75)", 75, ""), ("raise KeyboardInterrupt", 130, "KeyboardInterrupt\n"),
    ("raise ValueError('wrong')", 1, "ValueError: wrong\n"),
])  # fmt: skip
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


@pytest.mark.parametrize("before", ["pass", "sys.stderr.close()"])
def test_a_thread_leaves_though_nobody_reads_why(before: str):
    program = (
        "import sys, threading, time; from affinage.stopping import leave\n"
        f"def work(): sys.stdin.readline(); {before}; leave('no reason')\n"
        "threading.Thread(target=work, daemon=True).start(); print('ready', flush=True); time.sleep(600)\n"
    )
    process = begun(program, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
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


def test_told_while_it_imports_it_ends_at_once():
    for words, number, status in (
        ("recipes", signal.SIGTERM, 75), ("recipes", signal.SIGINT, 130), ("run tiny", signal.SIGHUP, 75),
        ("--debug run tiny", signal.SIGINT, 130),
    ):  # fmt: skip
        ran = python(TELLING.replace("{tell}", f"os.kill(os.getpid(), {int(number)})"), *words.split())
        assert (ran.returncode, ran.stdout, ran.stderr) == (status, "", ""), words


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


# A library that makes something else of the error by which a signal is heard.
LIBRARY = """
try: os.kill(os.getpid(), signal.SIGTERM); [sum(range(100)) for _ in range(10**9)]
except Exception as error: {instead}
time.sleep(600)
"""
INSTEAD = {
    "made an error": "raise ValueError('cannot be built') from error",
    "swallowed, and the next step begins": "pass\nprocess.raise_pending()",
    "swallowed, and told again": "pass\ntime.sleep(1.6); os.kill(os.getpid(), signal.SIGTERM)",
}


@pytest.mark.parametrize("instead", INSTEAD)
def test_a_word_to_stop_is_heard_whatever_a_library_makes_of_it(instead: str):
    where = LIBRARY.replace("{instead}", INSTEAD[instead])
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


def test_a_disk_behind_a_network_or_another_process_may_come_back_and_a_full_disk_does_not():
    full, *back = (OSError(number, os.strerror(number), "runs") for number in (errno.ENOSPC, errno.EIO, errno.ESTALE))
    back.append(RuntimeError("INTERNAL: Gloo all-reduce failed: Read error [::1]:6381: Connection reset by peer"))
    assert all(isinstance(of_the_machine(each), TransientError) for each in back)
    assert isinstance(of_the_machine(full), UserError) and not isinstance(of_the_machine(full), TransientError)
    assert of_the_machine(RuntimeError("INTERNAL: Gloo all-reduce failed: 8 vs 4")) is None
    with pytest.raises(OSError, match="space"), reports_damage():  # no damage of the file that is read
        raise full
    with pytest.raises(sqlite3.OperationalError) as caught:
        sqlite3.connect(":memory:").executescript("PRAGMA max_page_count = 1; CREATE TABLE answers (of_a_harness)")
    assert "Make room" in str(of_the_machine(caught.value))


IN_NATIVE_CODE = """
import hashlib, pathlib
from affinage.config.recipe import RuntimeSettings
from affinage.errors import Preempted
from affinage.stopping import StopSignals, leave
from affinage.training.watchdog import Watchdog
stop = Watchdog('run', pathlib.Path(), RuntimeSettings(preemption_grace=1))
with StopSignals(), stop:
    try:
        print("ready", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2 * 10**9)  # native code for minutes, like a compiler
    except Preempted as told:  # the signal came before it
        leave(str(told))
"""


@pytest.mark.parametrize(("steps_to_lose", "number", "again", "status", "stacks"), [
    pytest.param(False, signal.SIGTERM, False, EXIT_PREEMPTED, False, id="nothing to save: at once"),
    pytest.param(True, signal.SIGTERM, True, EXIT_PREEMPTED, True, id="after the grace"),
    pytest.param(True, signal.SIGINT, True, 130, False, id="by hand: the second time"),
])  # fmt: skip
def test_native_code_that_does_not_end_is_left(steps_to_lose: bool, number: int, again: bool, status, stacks):
    known = "stop.steps_to_lose = True; " if steps_to_lose else ""
    process = begun(IN_NATIVE_CODE.replace("print", f"{known}print"), stderr=subprocess.PIPE)
    computes, late = psutil.Process(process.pid), time.monotonic() + 300
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
        with pytest.raises(Preempted, match="at step 5"), Watchdog("run", tmp_path, RuntimeSettings()):
            signal.raise_signal(signal.SIGTERM)
            raise Preempted("run stopped by SIGTERM at step 5")
        signal.raise_signal(signal.SIGTERM)  # a launcher's, which sends it to all
        with pytest.raises(Preempted, match="at step 5"):
            signals.raise_pending()


# ---- what people and programs meet at the terminal

AFFINAGE = [sys.executable, "-m", "affinage"]


def test_a_full_disk_is_a_mistake_and_a_closed_pipe_or_an_old_locale_is_none():
    command = [*AFFINAGE, "config", "schema"]
    show, how = [*AFFINAGE, "config", "show", "quickstart"], {"capture_output": True, "timeout": 300}
    shown = subprocess.run(show, env={**os.environ, "PYTHONIOENCODING": "ascii"}, **how)
    assert shown.returncode == 0 and "du Brésil" in shown.stdout.decode()
    closed = subprocess.run(["sh", "-c", '"$@" <&- >&-', "sh", *AFFINAGE, "generate", "nobody"], text=True, **how)
    assert closed.returncode == 2 and "no prompt" in closed.stderr
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
        unsaid = subprocess.run([*AFFINAGE, "chat", "nobody"], stdout=full, stderr=full, timeout=300)
    assert ended.returncode == 2 and "no space left on device" in ended.stderr and "Traceback" not in ended.stderr
    assert unsaid.returncode == 2
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    _, said = process.communicate(timeout=300)
    assert "Traceback" not in said and "BrokenPipe" not in said


def test_an_interrupted_verb_ends_with_its_status_and_leaves_nothing_behind(tmp_path: Path):
    command = [*AFFINAGE, "world", "mine", "--megabytes", "200"]
    started = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    until(lambda: list(tmp_path.iterdir()) or started.poll() is not None)
    started.send_signal(signal.SIGINT)
    _, said = started.communicate(timeout=300)
    assert started.returncode == EXIT_INTERRUPTED and "Traceback" not in said
    assert not list(tmp_path.iterdir())


IMPORTED = f"""
import os, sys
from affinage.cli import main
def run(*words):
    try: main(list(words))
    except SystemExit: return [name for name in sys.argv[1:] if name in sys.modules]
told = {{"--help": run("--help"), "modules": len(sys.modules), "data": run("data", {str(TINY)!r}, "--dry-run")}}
told["wrong"] = run("plan", "quickstrat", "--on", "v4-8") + run("plan", "quickstart", "--on", "v9-8")
told["no model"] = run("chat", "nobody") + run("serve", "nobody") + run("checkpoint", "show", "nobody")
told["no run"] = run("eval", "quickstart", "--tasks", "x") + run("compare", "a", "b") + run("report", "quickstart")
sys.modules |= dict.fromkeys(["libtpu", "jax_cuda12_plugin"])  # importing them is an ImportError
told["plan"] = run("plan", "quickstart", "--on", "v4-8", "--set", "mesh.data=4")
told["platforms"] = os.environ.get("JAX_PLATFORMS")
print(told, file=sys.stderr)
"""


@pytest.mark.skipif(accelerator_is_here(), reason="JAX then looks for what is here")
def test_nothing_heavy_is_imported_before_it_is_needed_and_no_tpu_is_looked_for(tmp_path: Path):
    (tmp_path / "libtpu").mkdir()
    (tmp_path / "libtpu" / "__init__.py").touch()
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment.get("PYTHONPATH", "")])
    heavy = "jax numpy pyarrow pydantic lm_eval transformers torch".split()
    shown = python(IMPORTED, *heavy, env=environment, cwd=tmp_path)
    told = ast.literal_eval(shown.stderr.splitlines()[-1])
    assert told.pop("--help") == [] and told.pop("modules") < 500
    assert told.pop("platforms") == "cpu" and "jax" in told.pop("plan") and "quickstart on v4-8" in shown.stdout
    assert not [words for words, found in told.items() if "jax" in found], "mistakes are told before JAX is imported"
