"""Processes of hosts that are forked from one that has imported what they need, as whoever asks for them sees them."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from affinage.launch.process import Output
from affinage.launch.remains import began
from affinage.launch.zygote import Order, bound

# What a host that trains imports before its first step. None of it asks for a device.
OF_A_HOST = (
    "jax",
    "jax.experimental.multihost_utils",
    "orbax.checkpoint.experimental.v1",
    "affinage.cli.program",
    "affinage.api",
    "affinage.cli.watch",
    "affinage.pipeline.runner",
    "affinage.pipeline.preflight",
    "affinage.pipeline.trainings",
    "affinage.data.dataloader",
    "numba",
    "tokenizers",
    "affinage.training",
)
_ENDED_WITHIN = 15.0  # seconds: for the kernel to take a killed process away, and for the import of a module
_STARTED_WITHIN = 60.0  # seconds for Python to start


class Forks:
    """Starts processes that are forked from a zygote, and the zygote where it does not run.

    Args:
        at: of its socket, in a folder where nobody else may write; a later one of the same path finds the same zygote.
        environment: what the zygote imports with; that of the processes should not differ in what imports read.
        lost: the signal that a process gets when this one is gone, or the zygote.
        lasting: seconds that the zygote waits for another start when nobody is connected.
        modules: that it imports.
    """

    def __init__(
        self,
        at: Path,
        environment: Mapping[str, str],
        lost: signal.Signals,
        lasting: float,
        modules: Sequence[str] = OF_A_HOST,
    ) -> None:
        self._at, self._environment, self._modules = at, dict(environment), ",".join(modules)
        self._lost, self._lasting = lost, lasting

    def start(
        self, words: Sequence[str], environment: Mapping[str, str], remains: Sequence[str] = ()
    ) -> "ForkedProcess":
        """A process that does what Python does with these words: -m MODULE or a script, then the arguments."""
        given = {**environment, "PYTHONUNBUFFERED": "1"}
        order = Order(list(words), given, os.getcwd(), list(remains), os.getpid())
        return ForkedProcess(self._connected(words), order)

    def leave(self) -> None:
        """End the zygote once nothing runs that it has forked; fine if it is not there."""
        with contextlib.suppress(OSError), self._connection() as connection:
            connection.send(b"leave")

    def _connection(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        address, folder = bound(self._at)
        try:
            connection.connect(address)
        except BaseException:
            connection.close()
            raise
        finally:
            os.close(folder)
        return connection

    def _connected(self, words: Sequence[str]) -> socket.socket:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            return self._connection()
        told = [str(self._at), str(self._lasting), str(int(self._lost)), self._modules]
        log = self._at.with_suffix(".log")
        with log.open("wb") as out:
            ended = subprocess.run(
                [sys.executable, "-m", "affinage.launch.zygote", *told, *words],
                env={**self._environment, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                timeout=_STARTED_WITHIN,
            )
        if ended.returncode:
            raise OSError(f"Python cannot be started: {log.read_text(errors='replace').strip()[-500:]}")
        return self._connection()


class ForkedProcess:
    """A process with a session of its own, which gets a signal when this one ends; as `HostProcess`."""

    def __init__(self, connection: socket.socket, order: Order) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._pid, self._since, self._over = 0, "", False
        self._status: int | None = None
        self._output = Output()
        read, write = os.pipe()
        paper = os.memfd_create("order")
        try:
            os.write(paper, json.dumps(order._asdict()).encode())
            socket.send_fds(connection, [b"start"], [write, paper])
        except BaseException:
            os.close(read)
            connection.close()
            raise
        finally:
            os.close(write)
            os.close(paper)
        threading.Thread(target=self._output.read, args=(os.fdopen(read, "rb"),), daemon=True).start()

    @property
    def pid(self) -> int:
        """Its number, and its session's; waits until it has begun. 0 if it never does."""
        while not self._pid and self._heard(1.0) is None:
            pass
        return self._pid

    def news(self, seconds: float) -> tuple[list[str], int | None]:
        """See `affinage.launch.process.HostProcess`."""
        return self._output.news(seconds, self.status)

    def status(self) -> int | None:
        """How it ended, None if it runs: SIGKILL's number if the zygote has ended, by whom nothing more is told."""
        return self._heard(0.0)

    def tell(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs."""
        if self.status() is None:
            self._ask(str(int(number)).encode())

    def end(self) -> None:
        """Kill it with all that it has started; fine if it has ended, or if this was called before."""
        self._ask(b"end")
        until = time.monotonic() + _ENDED_WITHIN
        while not self._over and time.monotonic() < until:
            self._heard(0.1)
        with self._lock:
            self._over = True
            self._connection.close()
        if self._since and began(self._pid) == self._since:  # the zygote was killed
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)

    def _ask(self, what: bytes) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(what)

    def _heard(self, seconds: float) -> int | None:
        """Take what the zygote has said; wait for some, at most so long."""
        with self._lock:
            while not self._over and self._something_within(seconds):
                seconds = 0.0
                try:
                    said = self._connection.recv(256)
                except OSError:
                    said = b""
                facts = json.loads(said) if said else {"status": -signal.SIGKILL, "ended": 1}
                if "pid" in facts:
                    self._pid, self._since = facts["pid"], began(facts["pid"])
                self._over = "ended" in facts
                if self._status is None:
                    self._status = facts.get("status")
        return self._status

    def _something_within(self, seconds: float) -> bool:
        asked = select.poll()
        asked.register(self._connection, select.POLLIN)
        return bool(asked.poll(1000 * seconds))
