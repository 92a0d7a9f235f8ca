"""Two machines with a cable between them, which can be pulled: network namespaces of Linux, joined by a veth pair."""

import ctypes
import os
import shutil
import subprocess
from typing import Self

_NEW_USER, _NEW_NET = 0x10000000, 0x40000000  # of setns


class Unavailable(Exception):
    """No such machines can be had here."""


class Machines:
    """Use it as a context manager.

    Raises:
        Unavailable: saying why.
    """

    addresses = ("10.87.0.1", "10.87.0.2")

    def __enter__(self) -> Self:
        for program in ("unshare", "nsenter", "ip"):
            if shutil.which(program) is None:
                raise Unavailable(f"there is no `{program}` here")
        self._holders: list[subprocess.Popen[str]] = []
        try:
            self._hold("unshare", "--user", "--map-root-user", "--net")
            self._hold(*self._at(0), "unshare", "--net")
            self._run(0, f"ip link add cable type veth peer name cable netns {self.pids[1]}")
            for number, address in enumerate(self.addresses):
                self._run(number, f"ip link set lo up; ip addr add {address}/24 dev cable; ip link set cable up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for holder in self._holders:
            holder.kill()
            holder.communicate()

    @property
    def pids(self) -> list[int]:
        """A process on each machine."""
        return [holder.pid for holder in self._holders]

    def pull(self) -> None:
        """Neither hears of the other from now on."""
        self._run(1, "ip link set cable down")

    def plug(self) -> None:
        """They hear of each other again."""
        self._run(1, "ip link set cable up")

    def _at(self, machine: int) -> list[str]:
        return ["nsenter", f"--target={self.pids[machine]}", "--user", "--net", "--preserve-credentials"]

    def _hold(self, *words: str) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        holder = subprocess.Popen([*words, "sh", "-c", "echo made; exec cat"], text=True, **pipes)
        self._holders.append(holder)
        assert holder.stdout is not None and holder.stderr is not None
        if not holder.stdout.readline():
            raise Unavailable(f"namespaces cannot be made here: {holder.stderr.readline().strip()}")

    def _run(self, machine: int, line: str) -> None:
        run = subprocess.run([*self._at(machine), "sh", "-ec", line], capture_output=True, text=True)
        if run.returncode:
            raise Unavailable(f"`{line}` does not work here: {run.stderr.strip()}")


def move_to(pid: int) -> None:
    """Move this process, which must have one thread, to the machine that another process is on."""
    library = ctypes.CDLL(None, use_errno=True)
    files = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in ("user", "net")]
    for file, kind in zip(files, (_NEW_USER, _NEW_NET)):
        if library.setns(file, kind):
            raise OSError(ctypes.get_errno(), f"cannot move to the namespace of {pid}")
        os.close(file)
