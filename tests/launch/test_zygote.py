"""Processes that are forked from one that has imported all are as if Python had started them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from affinage.launch.forked import OF_A_HOST, ForkedProcess, Forks

SCRIPT = """
import atexit, json, os, signal, sys, time
import registers_an_exit_handler
from affinage.stopping import left_when_done
if sys.argv[1] == "look":
    print(json.dumps({
        "name": __name__, "words": sys.argv[1:], "given": [os.environ.get("GIVEN"), os.environ.get("SET")],
        "folder": os.getcwd(),
        "session": os.getsid(0) == os.getpid(), "parent": os.getppid(), "open": sorted(os.listdir("/proc/self/fd")),
        "heeds": [signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, signal.pthread_sigmask(0, []) == set()],
    }))
if sys.argv[1] == "wait":
    def saved(number, frame):
        print("saved", flush=True)
        sys.exit(75)
    signal.signal(signal.SIGTERM, saved)
    print("waits", flush=True)
    time.sleep(600)
with left_when_done():
    sys.exit(3)
"""
MODULE = """
import atexit, os
os.environ["SET"] = "by a module"
atexit.register(lambda: print("said at the end", flush=True))
"""


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def alive(process: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def result(process: ForkedProcess) -> tuple[list[str], int]:
    lines: list[str] = []
    end = time.monotonic() + 120
    while time.monotonic() < end:
        more, status = process.news(0.5)
        lines += more
        if status is not None:
            return lines, status
    raise TimeoutError(lines)


def said(process: ForkedProcess, line: str) -> None:
    lines: list[str] = []
    until(lambda: lines.extend(process.news(0.5)[0]) or line in lines)


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "registers_an_exit_handler.py").write_text(MODULE)
    (tmp_path / "script.py").write_text(SCRIPT)
    return str(tmp_path / "script.py")


@pytest.fixture
def forks(tmp_path: Path, script: str) -> Iterator[Forks]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    far = tmp_path / ("long" * 30)  # longer than the path of a socket may be
    far.mkdir()
    made = Forks(far / "zygote", environment, signal.SIGTERM, 60.0, ["registers_an_exit_handler"])
    yield made
    made.leave()


def test_what_is_forked_is_as_if_python_had_started_it(forks: Forks, script: str):
    found = []
    for given in "one", "other":
        process = forks.start([script, "look", given], {**os.environ, "GIVEN": given})
        lines, status = result(process)
        process.end()
        assert status == 3 and lines[-1] == "said at the end"  # of what was imported before it was forked, too
        found.append(json.loads(lines[0]))
    for facts, given in zip(found, ("one", "other")):
        assert (
            facts["name"] == "__main__"
            and facts["words"] == ["look", given]
            and facts["given"] == [given, "by a module"]
        )
        assert facts["folder"] == os.getcwd() and facts["session"] and all(facts["heeds"])
        assert len(facts["open"]) == 4  # the three, and the folder that it lists
    assert found[0]["parent"] == found[1]["parent"] != os.getpid()


def test_modules_run_by_their_names_and_mistakes_are_told(forks: Forks):
    process = forks.start(["-m", "affinage", "--version"], os.environ)
    assert result(process)[0][0].startswith("affinage ")
    process.end()
    process = forks.start(["-m", "no_such_module"], os.environ)
    lines, status = result(process)
    process.end()
    assert status == 1 and "no_such_module" in "".join(lines)


def test_signals_reach_it_and_its_end_takes_what_it_has_started_along(forks: Forks, script: str):
    process = forks.start([script, "wait"], os.environ)
    said(process, "waits")
    process.tell(signal.SIGTERM)
    lines, status = result(process)
    assert status == 75 and lines[0] == "saved"
    process.end()
    process = forks.start([script, "wait"], os.environ)
    os.kill(process.pid, signal.SIGKILL)
    assert result(process)[1] == -signal.SIGKILL
    process.end()
    process = forks.start([script, "wait"], os.environ)
    pid = process.pid
    process.end()
    process.end()
    assert not alive(pid) and process.status() == -signal.SIGKILL


def test_whoever_is_lost_takes_its_process_along_and_leaves_the_zygote_to_the_next(forks: Forks, script: str):
    process = forks.start([script, "wait"], os.environ)
    said(process, "waits")
    pid, zygote = process.pid, parent(process.pid)
    process._connection.close()  # as the kernel does when a process ends
    until(lambda: not alive(pid))
    process._over = True
    again = forks.start([script, "wait"], os.environ)
    assert parent(again.pid) == zygote
    again.end()
    forks.leave()
    until(lambda: not alive(zygote))


def test_nobody_waits_for_a_zygote_that_was_killed(forks: Forks, script: str):
    process = forks.start([script, "wait"], os.environ)
    said(process, "waits")
    pid = process.pid
    os.kill(parent(pid), signal.SIGKILL)
    assert result(process)[1] == -signal.SIGKILL
    process.end()
    until(lambda: not alive(pid))
    process = forks.start([script, "look"], os.environ)  # from another one
    assert result(process)[1] == 3
    process.end()


def test_a_zygote_that_nobody_needs_leaves(tmp_path: Path, script: str):
    forks = Forks(tmp_path / "zygote", os.environ, signal.SIGTERM, 0.2, [])
    process = forks.start([script, "wait"], {**os.environ, "PYTHONPATH": str(tmp_path)})
    zygote = parent(process.pid)
    process.end()
    until(lambda: not alive(zygote))
    assert not list(tmp_path.glob("zygote*"))


def test_why_no_zygote_can_be_started_is_told(tmp_path: Path):
    (tmp_path / "affinage").mkdir()
    (tmp_path / "affinage" / "__init__.py").write_text("raise RuntimeError('broken')")
    forks = Forks(tmp_path / "zygote", {**os.environ, "PYTHONPATH": str(tmp_path)}, signal.SIGTERM, 1.0, [])
    with pytest.raises(OSError, match="RuntimeError: broken"):
        forks.start(["-m", "affinage"], os.environ)


def test_what_hosts_import_is_there_and_begins_nothing():
    code = (
        f"import importlib, os\nfor name in {OF_A_HOST}: importlib.import_module(name)\n"
        "from jax._src import xla_bridge\n"
        "print(len(xla_bridge._backends), len(os.listdir('/proc/self/task')))"
    )
    # The library of matrix products has its threads, which it takes down before a fork.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert found.stdout.split() == ["0", "1"], found.stderr
