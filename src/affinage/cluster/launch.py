"""Starting the processes of a run on this machine; wherever they are, ending them together and starting them again."""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from affinage.cluster.processes import COORDINATOR, NUM_PROCESSES, PROCESS_ID
from affinage.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_USER_ERROR, Preempted, first_line
from affinage.secrets import masked
from affinage.stopping import PARENT, handled_by

Print = Callable[[str], None]

_AFTER = {0: 60.0, EXIT_PREEMPTED: 40.0, EXIT_USER_ERROR: 5.0}  # seconds for the others, by how the first one ended
_AFTER_DEATH = 1.0  # seconds: the others are in a collective that never ends
_QUICK = 20.0  # seconds: a group that fails within them may do so for ever, so the next start waits
_PAUSE = 10.0  # seconds
_HANGS_WITHIN = 600.0  # seconds: a group that leaves with status 75 within them may hang at the same place each time
_MAX_HANGS = 10  # such starts in a row
_DEAD_WITHIN = 10.0  # seconds for the kernel to take a killed process away
_LOOK_EVERY = 0.05  # seconds
_THREADS = "16"  # of XLA's pool: with fewer, the collectives of several CPU devices of a process wait for each other


@dataclass(frozen=True)
class WorkerExit:
    """How the process of a worker ended."""

    worker: int
    status: int  # its exit status; negative: the number of the signal that killed it
    where: str = ""  # the machine, if it has a name
    after: str = ""  # how another one ended before, after which this one did not answer, and was killed

    def __str__(self) -> str:
        name = f"worker {self.worker}" + (f" ({self.where})" if self.where else "")
        if self.after:
            return f"{name} did not answer ({self.after})"
        if self.status < 0:
            return f"{name} was killed by {signal.Signals(-self.status).name}"
        words = {EXIT_PREEMPTED: "was preempted, or hung", EXIT_USER_ERROR: "found a mistake in its input"}
        return f"{name} {words.get(self.status, f'ended with status {self.status}')}"


class Worker(Protocol):
    """A process of a group, on this machine or another one."""

    where: str  # the machine, if it has a name

    def news(self) -> tuple[list[str], int | None]:
        """Return the lines since the last call, and the exit status once it has ended and all lines were returned."""

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs."""

    def kill(self) -> None:
        """Kill it with all that it has started; fine if it has ended."""


class WorkerGroup:
    """The processes of one start of a run: they begin and end together.

    `say` takes the lines that they print, each with the number of its worker before it. `close` is called at the end.
    """

    def __init__(self, processes: Sequence[Worker], say: Print, close: Callable[[], object]) -> None:
        self.workers, self.processes = len(processes), processes
        self._running, self._say, self._close = dict(enumerate(processes)), say, close
        self._user_error = False  # whether one has printed a mistake of the user, after which JAX aborts the others

    def exits(self, seconds: float) -> list[WorkerExit]:
        """Wait for at most `seconds` until a process ends; return those that ended since the last call, in order."""
        until, ended = time.monotonic() + seconds, list[WorkerExit]()
        while True:
            for worker, process in list(self._running.items()):
                lines, status = process.news()
                for line in () if self._user_error else lines:
                    self._say(f"{worker} | {line}")
                if status is not None:
                    self._user_error |= status == EXIT_USER_ERROR
                    ended.append(WorkerExit(worker, status, process.where))
                    del self._running[worker]
            if ended or time.monotonic() >= until:
                return ended
            time.sleep(_LOOK_EVERY)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every process that runs."""
        for process in self._running.values():
            process.send(number)

    def kill(self) -> list[int]:
        """Kill what still runs, with all that it has started, and return its workers. Calling it again is fine."""
        running = list(self._running)
        for process in self.processes:
            process.kill()
        self._close()
        return running


class WorkerProcess:
    """A `Worker` on this machine, in a session of its own. It ends when this process does."""

    where = ""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        how["env"] = {**environment, PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(command, start_new_session=True, **how)
        self.pid = self._process.pid
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line.decode(errors="replace").rstrip())

    def news(self) -> tuple[list[str], int | None]:
        status = self._process.poll()
        if status is not None:
            self._thread.join(1.0)  # what it started may hold its output open, and is not waited for
        return [self._lines.get() for _ in range(self._lines.qsize())], status

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_DEAD_WITHIN)


def start_processes(
    command: Sequence[str], environment: Mapping[str, str], workers: int, say: Print = print
) -> WorkerGroup:
    """Start a command in processes of this machine, whose coordinator listens on the loopback address."""
    processes: list[WorkerProcess] = []
    port, coordinator = reserved_port()
    try:
        for worker in range(workers):
            place = {COORDINATOR: coordinator, NUM_PROCESSES: str(workers), PROCESS_ID: str(worker)}
            processes.append(WorkerProcess(command, {**environment, **place}))
    except BaseException:
        WorkerGroup(processes, say, port.close).kill()
        raise
    return WorkerGroup(processes, say, port.close)


def start_local(command: Sequence[str], *, workers: int, devices: int | None = None, say: Print = print) -> WorkerGroup:
    """Start a command of `affinage`, e.g. ["run", "recipe.yaml"], in processes whose CPUs play `devices`, if given."""
    words = [sys.executable, "-m", "affinage", *command]
    return start_processes(words, os.environ | cpu_devices(devices), workers, say)


def reserved_port(address: str = "127.0.0.1") -> tuple[socket.socket, str]:
    """Return a socket that holds a free port of this machine, and ADDRESS:PORT for the coordinator.

    While the socket is open nobody else is given the port, and the coordinator, which may share it, listens there.
    """
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind((address, 0))
    return held, f"{address}:{held.getsockname()[1]}"


def cpu_devices(devices: int | None) -> dict[str, str]:
    """Return the environment of a process whose CPU plays several devices."""
    if devices is None:
        return {}
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}".strip()
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "NPROC": _THREADS}


def supervise(
    start: Callable[[Sequence[str]], WorkerGroup],
    command: Sequence[str],
    *,
    max_failures: int = 10,
    reset_after: float = 3600.0,
    grace: float = 35.0,
    say: Print = print,
) -> int:
    """Run a command of `affinage`, e.g. ["run", "recipe.yaml"], in all workers until it is done; `start` starts them.

    When one is lost all start again: always after one was preempted, saved, and left with status 75, but ten times in a
    row if that took less than ten minutes; `max_failures` times after one was killed or failed, or could not be
    started, counted from zero after a start that lasted `reset_after` seconds. An error of the first start is raised.

    SIGTERM, SIGINT and SIGHUP are passed on to the workers, which have `grace` seconds to save in, and nothing is
    started again. Nothing that was started runs afterwards. Returns the exit status for this process: 0 done, 2 a
    mistake of the user, 75 preempted, 130 Ctrl-C twice, 1 given up (75 if the last start was preempted).
    """
    received = list[signal.Signals]()
    group: WorkerGroup | None = None
    starts = failures = hangs = 0

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        if group is None:  # its start may wait for machines
            raise Preempted(f"{received[-1].name} before all workers had started")

    with handled_by(receive):
        while True:
            began, group, starts = time.monotonic(), None, starts + 1
            try:
                group = start(command)
                decisive = _watch(group, received, grace)
                reason, status = str(decisive), decisive.status
            except Exception as error:
                if group is None and starts == 1:
                    raise
                reason, status = masked(f"{type(error).__name__}: {first_line(error)}"), 1
            if received:
                return status if status in (0, EXIT_INTERRUPTED) else EXIT_PREEMPTED
            if status in (0, EXIT_USER_ERROR):
                return status
            lasted = time.monotonic() - began
            if lasted >= reset_after:
                failures = 0
            if status == EXIT_PREEMPTED:
                hangs = hangs + 1 if lasted < _HANGS_WITHIN else 0
            else:
                failures += 1
            if hangs > _MAX_HANGS:
                say(f"launch: {reason}; given up after {_MAX_HANGS} starts again, none of which lasted ten minutes")
                return EXIT_PREEMPTED
            if failures > max_failures:
                say(f"launch: {reason}; given up after {max_failures} failures")
                return 1
            say(f"launch: {reason}; all start again ({failures} of {max_failures} failures)")
            until = time.monotonic() + (_PAUSE if lasted < _QUICK and status >= 0 else 0.0)
            while time.monotonic() < until and not received:
                time.sleep(_LOOK_EVERY)
            if received:
                return EXIT_PREEMPTED


def _watch(group: WorkerGroup, received: Sequence[signal.Signals], grace: float) -> WorkerExit:
    """Wait until a group has ended, and return the exit that decides."""
    exits: list[WorkerExit] = []
    sent, until = 0, float("inf")
    try:
        while len(exits) < group.workers and time.monotonic() < until:
            new = group.exits(0.5)
            if new and not exits:
                until = min(until, time.monotonic() + _AFTER.get(new[0].status, _AFTER_DEATH))
                if new[0].status == EXIT_PREEMPTED:
                    group.send(signal.SIGTERM)  # those that are not in a training together do not know of it
            exits += new
            for number in received[sent:]:
                group.send(number)
                sent, until = sent + 1, min(until, time.monotonic() + grace)
        exits += group.exits(0.0)
    finally:
        silent = group.kill()
    group.exits(0.0)  # their last lines
    # The first worker that ended badly by itself: JAX aborts the others (SIGABRT) when it loses one.
    order = {0: 2, -signal.SIGABRT: 1}
    first = str(exits[0]) if exits else "all were told to stop"
    exits += [WorkerExit(worker, -signal.SIGKILL, after=first) for worker in silent]
    return min(exits, key=lambda each: order.get(each.status, 0))
