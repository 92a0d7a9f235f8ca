"""Hosts that are processes of this machine."""

import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from affinage.hardware.hosts import COORDINATOR, HOST, HOSTS
from affinage.hardware.missed import Missed, missed_by
from affinage.launch.forked import Forks
from affinage.launch.gang import Ending
from affinage.launch.process import HostProcess, Say, Watched, of_cpu, reserved_port, start_all

Begin = Callable[[Mapping[str, str]], Watched]  # a host with this environment

_LOOK_EVERY = 0.02  # seconds
_LASTING = 5.0  # seconds in which the next start finds what was imported for the last one


class LocalLauncher:
    """N processes on this machine, which listen on the loopback address alone.

    On Linux they are forked from one that has imported what they need, and waits for the next start.

    Args:
        hosts: how many.
        devices: of each, played by the CPU; None: whatever JAX finds.
        say: takes the lines that they write, each with the number of its host before it.
    """

    def __init__(self, hosts: int, *, devices: int | None = None, say: Say = print) -> None:
        self.hosts, self._say = hosts, say
        self._environment = {**os.environ, **of_cpu(devices)}
        self._folder: str | None = None

    def start(self, command: Sequence[str]) -> "LocalGang":
        """See `affinage.launch.gang.Launcher`."""
        return LocalGang(self._begin(["-m", "affinage", *command]), self._environment, self.hosts, self._say)

    def _begin(self, words: Sequence[str]) -> Begin:
        if platform.system() != "Linux":  # a zygote needs its kernel
            return lambda environment: HostProcess([sys.executable, *words], environment)
        self._folder = self._folder or tempfile.mkdtemp(prefix="affinage-")
        return partial(Forks(Path(self._folder) / "zygote", self._environment, signal.SIGKILL, _LASTING).start, words)

    def finish(self) -> None:
        """See `affinage.launch.gang.Launcher`."""
        if self._folder is not None:
            Forks(Path(self._folder) / "zygote", {}, signal.SIGKILL, _LASTING).leave()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


class LocalGang:
    """See `affinage.launch.gang.Gang`. Each process has a session of its own, and dies with this one."""

    def __init__(self, begin: Begin, environment: Mapping[str, str], hosts: int, say: Say) -> None:
        self._port, coordinator = reserved_port()
        place = {**environment, COORDINATOR: coordinator, HOSTS: str(hosts)}
        self._processes = start_all(begin({**place, HOST: str(host)}) for host in range(hosts))
        self._watch = Watch(self._processes, say)

    def ended(self, seconds: float) -> list[Ending]:
        """See `affinage.launch.gang.Gang`."""
        return self._watch.ended(seconds)

    def tell(self, number: signal.Signals) -> None:
        """See `affinage.launch.gang.Gang`."""
        for process in self._processes:
            process.tell(number)

    def end(self) -> None:
        """See `affinage.launch.gang.Gang`."""
        for process in self._processes:
            process.end()
        self._watch.last_words()
        self._port.close()


class Watch:
    """Passes on what the processes of this machine write, and tells which have ended.

    Args:
        processes: one for each host.
        say: takes their lines, each with the number of its host before it.
        where: the names of the hosts' machines.
    """

    def __init__(self, processes: Sequence[Watched], say: Say, where: Sequence[str] = ()) -> None:
        self._processes, self._say, self._where = processes, say, where or [""] * len(processes)
        self._told: set[int] = set()
        self._missed: dict[int, Missed] = {}

    def ended(self, seconds: float) -> list[Ending]:
        """See `affinage.launch.gang.Gang`."""
        until = time.monotonic() + seconds
        while True:
            found = [ending for host in range(len(self._processes)) if (ending := self._heard(host)) is not None]
            if found or time.monotonic() >= until:
                return found
            time.sleep(_LOOK_EVERY)

    def running(self) -> list[int]:
        """The hosts whose end was not told yet."""
        return [host for host in range(len(self._processes)) if host not in self._told]

    def last_words(self) -> None:
        """Pass on what was written and not told."""
        for host in self.running():
            self._heard(host)

    def _heard(self, host: int) -> Ending | None:
        if host in self._told:
            return None
        lines, status = self._processes[host].news(0.0)
        for line in lines:
            self._say(f"{host} | {line}")
            if (missed := missed_by(line)) is not None:
                self._missed[host] = missed
        if status is None:
            return None
        self._told.add(host)
        return Ending(host, status, self._where[host], missed=self._missed.get(host))
