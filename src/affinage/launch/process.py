"""The process of a host, as whoever started it on the same machine sees it."""

import contextlib
import os
import queue
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Protocol

from affinage.stopping import PARENT

Say = Callable[[str], None]

_DEAD_WITHIN = 10.0  # seconds for the kernel to take a killed process away; one that waits for a disk may not go
_LAST_WORDS = 1.0  # seconds for the lines of a process that has ended
_THREADS = "16"  # of XLA's pool: fewer, and the collectives of several devices of one process wait for each other
# What the library of collectives writes to standard output; its threads write into each other's lines.
_NOISE = re.compile(rb"\[Gloo\]|is connected to \d+ peer ranks|Expected number of connected peer ranks")


class Output:
    """The lines that a process writes; one thread reads them, another asks for them."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # None: that was all
        self._said = threading.Event()
        self._over = 0.0  # when the process was first seen to have ended

    def read(self, out: IO[bytes]) -> None:
        """Until its end."""
        with out:
            for line in out:
                if not _NOISE.search(line):
                    self._lines.put(line.decode(errors="replace").rstrip())
        self._said.set()
        self._lines.put(None)

    def news(self, seconds: float, status: Callable[[], int | None]) -> tuple[list[str], int | None]:
        """See `HostProcess.news`."""
        lines = []
        with contextlib.suppress(queue.Empty):
            lines.append(self._lines.get(timeout=seconds) if seconds else self._lines.get_nowait())
            while True:
                lines.append(self._lines.get_nowait())
        found = [line for line in lines if line is not None]
        ended = status()
        if ended is None:
            return found, None
        # What it started may go on writing to its output; that is not waited for.
        self._over = self._over or time.monotonic()
        all_told = self._lines.empty() and (self._said.is_set() or time.monotonic() - self._over > _LAST_WORDS)
        return found, ended if all_told else None


class HostProcess:
    """A process with a session of its own, which gets a signal when this one ends.

    Args:
        command: what to run.
        environment: all of it; None for this process's own.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        given = os.environ if environment is None else environment
        self._environment = {**given, PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        self._output, self._begun = Output(), threading.Event()
        self._error: Exception | None = None
        # The thread that starts it lives as long as it does: the kernel takes the end of that thread for a parent's.
        self._keeper = threading.Thread(target=self._keep, args=(list(command),), daemon=True)
        self._keeper.start()
        self._begun.wait()
        if self._error is not None:
            raise self._error

    @property
    def pid(self) -> int:
        """Its number, and its session's."""
        return self._process.pid

    def news(self, seconds: float) -> tuple[list[str], int | None]:
        """The lines written since the last call, and how it ended: exit status, negative for a signal's number.

        Waits for one of them, at most so long. The end is told once all lines are.
        """
        return self._output.news(seconds, self.status)

    def status(self) -> int | None:
        """How it ended, None if it runs. It is not taken away, and its number stays its own until `end`."""
        if self._process.returncode is not None:
            return self._process.returncode
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def tell(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs."""
        if self.status() is None:
            os.kill(self.pid, number)

    def end(self) -> None:
        """Kill it with all that it has started; fine if it has ended, or if this was called before."""
        if self._process.returncode is None:  # not waited for yet, so that its number is nobody else's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_DEAD_WITHIN)
        self._keeper.join(1.0)

    def _keep(self, command: list[str]) -> None:
        try:
            self._process = subprocess.Popen(
                command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except Exception as error:  # also what Python says of a command that cannot be one: somebody waits here
            self._error = error
        self._begun.set()
        if self._error is None:
            assert self._process.stdout is not None
            self._output.read(self._process.stdout)
            while self.status() is None:  # it closed its output, and runs
                time.sleep(0.1)


class Watched(Protocol):
    """What `HostProcess` and `ForkedProcess` have in common."""

    def news(self, seconds: float) -> tuple[list[str], int | None]:
        """The lines written since the last call, and how it ended."""
        ...

    def tell(self, number: signal.Signals) -> None:
        """Send it a signal."""
        ...

    def end(self) -> None:
        """Kill it with all that it has started."""
        ...


def start_all(begun: Iterable[Watched]) -> list[Watched]:
    """The processes, each of which begins when it is taken; none is left where one cannot be started."""
    processes: list[Watched] = []
    try:
        for process in begun:
            processes.append(process)
    except BaseException:
        for process in processes:
            process.end()
        raise
    return processes


def reserved_port(address: str = "127.0.0.1") -> tuple[socket.socket, str]:
    """A socket that holds a free port of this machine, and the port's ADDRESS:PORT for the coordinator.

    As long as the socket is open nobody else is given the port, and the coordinator, which may share it, listens there.
    """
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind((address, 0))
    return held, f"{address}:{held.getsockname()[1]}"


def of_cpu(devices: int | None) -> dict[str, str]:
    """The environment of a process whose CPU plays several devices."""
    if devices is None:
        return {}
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}".strip()
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "NPROC": _THREADS}


def status_of_shell(status: int) -> int:
    """How a process ended whose status comes from one that passed it on: 128 + N stands for signal N."""
    return 128 - status if 128 < status < 128 + signal.NSIG else status
