"""Hosts that are processes of this machine."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from affinage.hardware.hosts import COORDINATOR, HOST, HOSTS
from affinage.launch.gang import Ending
from affinage.stopping import PARENT

_LOOK_EVERY = 0.02  # seconds
_DEAD_WITHIN = 10.0  # seconds for the kernel to take a killed process away; one that waits for a disk may not go
_THREADS = "16"  # of XLA's pool: fewer, and the collectives of several devices of one process wait for each other
# What the library of collectives writes to standard output; its threads write into each other's lines.
_NOISE = re.compile(rb"\[Gloo\]|is connected to \d+ peer ranks|Expected number of connected peer ranks")

Say = Callable[[str], None]


class LocalLauncher:
    """N processes on this machine, which listen on the loopback address alone.

    Args:
        hosts: how many.
        devices: of each, played by the CPU; None: whatever JAX finds.
        say: takes the lines that they write, each with the number of its host before it.
    """

    def __init__(self, hosts: int, *, devices: int | None = None, say: Say = print) -> None:
        self.hosts, self._devices, self._say = hosts, devices, say

    def start(self, command: Sequence[str]) -> "LocalGang":
        """See `affinage.launch.gang.Launcher`."""
        return LocalGang([sys.executable, "-m", "affinage", *command], self.hosts, self._devices, self._say)


class LocalGang:
    """See `affinage.launch.gang.Gang`. Each process has a session of its own, and dies with this one."""

    def __init__(self, command: Sequence[str], hosts: int, devices: int | None, say: Say) -> None:
        self._say = say
        self._port, coordinator = reserved_port()
        self._told: set[int] = set()
        self._readers: list[threading.Thread] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for host in range(hosts):
            place = {COORDINATOR: coordinator, HOSTS: str(hosts), HOST: str(host), PARENT: str(os.getpid())}
            self._processes.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **_of_cpu(devices), **place, "PYTHONUNBUFFERED": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
            self._readers.append(threading.Thread(target=self._read, args=(host,), daemon=True))
            self._readers[-1].start()

    def ended(self, seconds: float) -> list[Ending]:
        """See `affinage.launch.gang.Gang`."""
        until = time.monotonic() + seconds
        while True:
            found = [
                Ending(host, status)
                for host, process in enumerate(self._processes)
                if host not in self._told and (status := _status(process)) is not None
            ]
            if found or time.monotonic() >= until:
                self._told.update(ending.host for ending in found)
                return found
            time.sleep(_LOOK_EVERY)

    def tell(self, number: signal.Signals) -> None:
        """See `affinage.launch.gang.Gang`."""
        for process in self._processes:
            if _status(process) is None:
                os.kill(process.pid, number)

    def end(self) -> None:
        """See `affinage.launch.gang.Gang`."""
        for process in self._processes:
            if process.returncode is None:  # not waited for yet, so that its number is nobody else's
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_DEAD_WITHIN)
        for reader in self._readers:
            reader.join(1.0)
        self._port.close()

    def _read(self, host: int) -> None:
        """Pass on what a host writes, line by line."""
        out = self._processes[host].stdout
        assert out is not None
        with out:
            for line in out:
                if not _NOISE.search(line):
                    self._say(f"{host} | {line.decode(errors='replace').rstrip()}")


def reserved_port(address: str = "127.0.0.1") -> tuple[socket.socket, str]:
    """A socket that holds a free port of this machine, and the port's ADDRESS:PORT for the coordinator.

    As long as the socket is open nobody else is given the port, and the coordinator, which may share it, listens there.
    """
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind((address, 0))
    return held, f"{address}:{held.getsockname()[1]}"


def _status(process: "subprocess.Popen[bytes]") -> int | None:
    """How a process ended, None if it runs; it is not taken away, and its number stays its own."""
    if process.returncode is not None:
        return process.returncode
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _of_cpu(devices: int | None) -> dict[str, str]:
    """The environment of a process whose CPU plays several devices."""
    if devices is None:
        return {}
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}".strip()
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "NPROC": _THREADS}
