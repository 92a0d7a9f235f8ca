"""Python for programs that tests start again and again: each is forked from a process that has imported what they need.

    python warm_python.py SOCKET

is that process; it leaves when its standard input is closed.

    python -ISs warm_python.py SOCKET WORDS...

does what `python WORDS...` does (-m MODULE, -c CODE), with this environment, folder, input and outputs: it passes
signals on, ends as the program ends, and what kills it kills the program.
"""

import array
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path

_MODULES = (
    "jax",
    "jax.experimental.multihost_utils",
    "orbax.checkpoint.experimental.v1",
    "affinage.cli.program",
    "affinage.api",
    "affinage.pipeline.runner",
    "affinage.pipeline.steps_train",
    "affinage.training",
    "affinage.evaluation.run",
    "numba",
    "tokenizers",
)
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextlib.contextmanager
def serving(folder: Path, environment: Mapping[str, str] | None = None) -> Iterator[list[str]]:
    """What stands in a command for `python` while such a process is there; its modules were loaded in `environment`."""
    command = [sys.executable, __file__, str(folder / "socket")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield [sys.executable, "-ISs", *command[1:]]
        process.stdin.close()


def _ask(at: str, words: list[str]) -> None:
    """Have a program run, pass signals on to it, and end as it does."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)  # until there is somebody to pass them on to
    asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asked.connect(at)
    order = json.dumps({"words": words, "environment": dict(os.environ), "folder": os.getcwd()}).encode()
    asked.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(order))
    asked.sendmsg([order], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", (0, 1, 2)))])
    for number in _PASSED_ON:
        signal.signal(number, lambda number, frame: asked.send(b"%d" % number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    status = int(asked.recv(16) or -signal.SIGKILL)
    if status >= 0:
        os._exit(status)
    if status != -signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)


def _serve(at: str) -> dict | None:
    """Start what is asked for. Returns in each process that is to be a program, with what it is; None at the end."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(at)
    listener.listen(16)
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how those who watch over programs ended
    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if 0 in ready:
            return None
        asked, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _watch_over(asked)
        asked.close()


def _watch_over(asked: socket.socket) -> dict:
    """Fork a program and be there until it ends; returns in the program."""
    said, given, _, _ = socket.recv_fds(asked, 2**20, 3)
    order = json.loads(said)
    watcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        asked.close()
        for number, stream in enumerate(given):
            os.dup2(stream, number)
            os.close(stream)
        return order | {"watcher": watcher}
    for stream in (0, 1, 2, *given):
        os.close(stream)
    ended = os.pidfd_open(pid)
    while ended not in select.select([asked, ended], [], [])[0]:
        told = b""
        with contextlib.suppress(ConnectionError):
            told = asked.recv(16)
        signal.pidfd_send_signal(ended, int(told or signal.SIGKILL))
        if not told:
            break
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        asked.send(b"%d" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _run(order: dict, imported: dict[str, str]) -> None:
    """What Python does with these words, in this process."""
    from affinage.stopping import PARENT, die_with_parent

    os.environ.clear()
    os.environ.update(order["environment"] | imported | {PARENT: str(order["watcher"])})
    die_with_parent()
    del os.environ[PARENT]
    os.chdir(order["folder"])
    more = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder not in sys.path[1:]]
    kind, what, *words = order["words"]
    sys.path[0:1] = [order["folder"] if kind == "-m" else "", *filter(None, more)]
    sys.argv = [kind if kind == "-c" else what, *words]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), main.__dict__)


def _main(at: str) -> None:
    from affinage.hardware.devices import prepare

    before = dict(os.environ)
    prepare()
    for name in _MODULES:  # none of them starts a thread or asks for a device
        importlib.import_module(name)
    imported = {name: value for name, value in os.environ.items() if before.get(name) != value}
    gc.freeze()  # so that the memory stays shared with those that are forked
    order = _serve(at)
    if order is None:
        os._exit(0)
    _run(order, imported)


if __name__ == "__main__":
    _ask(sys.argv[1], sys.argv[2:]) if len(sys.argv) > 2 else _main(sys.argv[1])
