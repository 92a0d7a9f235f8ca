"""A process that has imported what a host needs; those of hosts are forked from it, again and again.

    python -m affinage.launch.zygote SOCKET LASTING SIGNAL MODULES COMMAND...

imports MODULES, with commas between them, and listens at SOCKET; see `affinage.launch.forked` for who asks it. Each
connection is one process of a host: when it is closed before that process was ended, the process gets SIGNAL. The
zygote leaves when it is told so, or when nobody has been connected for LASTING seconds. COMMAND, which all its
processes run, is there for whoever lists processes.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from affinage.errors import EXIT_PREEMPTED
from affinage.launch.remains import Remains
from affinage.stopping import PARENT, PARENT_SIGNAL, die_with_parent, reserve_last_word

_LOOK_EVERY = 0.5  # seconds; signals and messages come at once
_TOLD = (signal.SIGTERM, signal.SIGINT)


class Order(NamedTuple):
    """What a process of a host is to run."""

    words: list[str]  # of Python: -m MODULE or a script, and the arguments
    environment: dict[str, str]  # all of it
    folder: str  # to work in
    remains: list[str]  # group and start, see `affinage.launch.remains`; none: nobody looks for it later
    owner: int  # the process that asks


@dataclass(eq=False)
class _Child:
    """A connection, and the process that it is about."""

    connection: socket.socket | None
    order: Order | None = None  # until it is forked
    out: int = -1
    pid: int = 0
    told: bool = False  # how it ended

    def say(self, **facts: int) -> None:
        if self.connection is not None:
            with contextlib.suppress(OSError):  # whoever asked is gone: seen when it is read from
                self.connection.send(json.dumps(facts).encode())


class _Zygote:
    def __init__(self, listener: socket.socket, path: Path, lasting: float, lost: signal.Signals) -> None:
        self._listener, self._path, self._lasting, self._lost = listener, path, lasting, lost
        self._children: list[_Child] = []
        self._leaving = False
        self._set: dict[str, str] = {}  # variables that imports have set
        self._wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._waker = waker
        for number in (*_TOLD, signal.SIGCHLD):
            signal.signal(number, lambda number, frame: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)

    def get_ready(self, modules: Sequence[str]) -> None:
        """Import; whoever asks meanwhile is heard between two modules, and waits."""
        from affinage.hardware.devices import prepare

        before = dict(os.environ)
        prepare()
        for name in modules:
            with contextlib.suppress(Exception):  # the process that needs it says so in its own way
                importlib.import_module(name)
            self._look(0.0)
        # Imports set variables, on TPUs such as their library reads later.
        self._set = {name: value for name, value in os.environ.items() if before.get(name) != value}
        gc.freeze()  # so that the memory stays shared with those that are forked

    def serve(self) -> _Child | None:
        """Do as is asked: returns in each process that is forked, with what it is; else None when it is to leave."""
        until = time.monotonic() + self._lasting
        while True:
            for child in list(self._children):
                if child.order is not None and self._fork(child):
                    return child
            self._bury()
            if any(child.connection for child in self._children):
                until = time.monotonic() + self._lasting
            if not self._children and (self._leaving or time.monotonic() >= until):
                self._path.unlink(missing_ok=True)
                self._look(0.0)
                if not self._children:  # nobody came at the last moment
                    self._path.with_suffix(".log").unlink(missing_ok=True)
                    return None
            self._look(_LOOK_EVERY)

    def _look(self, seconds: float) -> None:
        asked = select.poll()
        by_number = {child.connection.fileno(): child for child in self._children if child.connection is not None}
        for number in (self._listener.fileno(), self._wake, *by_number):
            asked.register(number, select.POLLIN)
        for number, _ in asked.poll(1000 * seconds):
            if number == self._wake:
                self._heed(os.read(self._wake, 64))
            elif number in by_number:
                self._hear(by_number[number])
            else:
                self._children.append(_Child(self._listener.accept()[0]))

    def _heed(self, numbers: bytes) -> None:
        for number in set(numbers) & set(_TOLD):
            self._leaving = True
            for child in self._children:
                self._pass_on(child, signal.Signals(number))

    def _hear(self, child: _Child) -> None:
        assert child.connection is not None
        try:
            said, given, _, _ = socket.recv_fds(child.connection, 64, 2, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            said, given = b"", []
        if given:
            child.out, order = given
            with os.fdopen(order) as file:
                file.seek(0)
                child.order = Order(**json.load(file))
        elif said == b"leave":
            self._leaving = True
        elif said == b"end":
            self._end(child)
        elif said:
            self._pass_on(child, signal.Signals(int(said)))
        else:
            child.connection.close()
            child.connection = None
            self._leaving |= self._lost == signal.SIGKILL  # nobody who could come back
            if child.pid and not child.told:
                self._pass_on(child, self._lost)
            else:
                self._end(child)

    def _pass_on(self, child: _Child, number: signal.Signals) -> None:
        if child.pid and not child.told:
            os.kill(child.pid, number)
        elif child.order is not None:  # nothing was begun
            child.say(status=EXIT_PREEMPTED)
            self._forget_order(child)

    def _end(self, child: _Child) -> None:
        """Kill a process with all that it has started; its number is nobody else's as it was not waited for yet."""
        if child.pid:
            os.kill(child.pid, signal.SIGKILL)  # it may not have its session yet
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            _, status = os.waitpid(child.pid, 0)
            if not child.told:
                child.say(status=os.waitstatus_to_exitcode(status))
            child.pid = 0
        child.say(ended=1)
        self._forget_order(child)
        if child.connection is not None:
            child.connection.close()
        self._children.remove(child)

    def _forget_order(self, child: _Child) -> None:
        if child.order is not None:
            os.close(child.out)
            child.order = None

    def _bury(self) -> None:
        """Tell how processes ended. They are waited for when they are ended, or at once where nobody asks any more."""
        for child in list(self._children):
            if not child.pid or child.told:
                continue
            found = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None:
                continue
            child.say(status=found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)
            child.told = True
            if child.connection is None:
                self._end(child)

    def _fork(self, child: _Child) -> bool:
        """Whether this is the process that was forked."""
        assert child.order is not None
        zygote = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            forked = os.fork()
        except OSError as error:
            os.write(child.out, f"no process can be started: {error}\n".encode())
            forked = None
        if forked != 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self._forget_order(child)
            child.pid = forked or 0
            child.say(**({"pid": forked} if forked else {"status": 1}))
            return False
        signal.set_wakeup_fd(-1)
        for number in (*_TOLD, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before - set(_TOLD))  # Ray blocks SIGINT for all that it starts
        os.setsid()
        for each in (1, 2):
            os.dup2(child.out, each)
        # Who asked sees the end of the zygote by its connection's: no other process may hold it open.
        for one in (self._listener, *(each.connection for each in self._children)):
            if one is not None:
                one.close()
        for each in (child.out, self._wake, self._waker):
            os.close(each)
        os.environ.clear()
        os.environ |= child.order.environment | self._set | {PARENT: str(zygote), PARENT_SIGNAL: str(int(self._lost))}
        return True


def _run(order: Order) -> None:
    """What Python does with these words, in this process."""
    die_with_parent()
    os.chdir(order.folder)
    if order.remains:
        Remains(*order.remains).note(os.getpid(), order.owner)
    kind, words = order.words[0], order.words
    if kind == "-m":
        sys.argv, sys.path[0] = words[1:], order.folder
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, str(Path(kind).parent)
        runpy.run_path(kind, run_name="__main__")


def bound(path: Path) -> tuple[str, int]:
    """The address of a socket's path, of any length, and the number to close afterwards."""
    folder = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
    return f"/proc/self/fd/{folder}/{path.name}", folder


def main(at: str, lasting: str, lost: str, modules: str, *_: str) -> None:
    """See the module."""
    path = Path(at)
    address, folder = bound(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path.unlink(missing_ok=True)
    listener.bind(address)
    listener.listen(64)
    os.close(folder)
    # Whoever started it waits for this, and then connects. It is nobody's child: Ray kills those of its workers.
    if os.fork():
        os._exit(0)
    os.setsid()
    reserve_last_word()
    zygote = _Zygote(listener, path, float(lasting), signal.Signals(int(lost)))
    zygote.get_ready(list(filter(None, modules.split(","))))
    child = zygote.serve()
    if child is None:
        os._exit(0)
    order = child.order
    assert order is not None
    del zygote, child
    _run(order)


if __name__ == "__main__":
    main(*sys.argv[1:])
