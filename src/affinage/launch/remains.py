"""Processes that outlive whoever started them: found again, given time to save, and ended."""

import contextlib
import os
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from affinage.errors import UserError

_LOOK_EVERY = 0.05  # seconds
_DEAD_WITHIN = 10.0  # seconds for the kernel to take a killed process away


class Remains:
    """The processes on this machine that run one command, of this start and of earlier ones.

    Args:
        group: of the command; the same for all its starts.
        start: which of them this is.
    """

    PATIENCE = 35.0  # seconds for a process that was told to stop to save its state

    def __init__(self, group: str, start: str) -> None:
        self.folder = Path(tempfile.gettempdir()) / f"affinage-{os.getuid()}" / group
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.folder.parent.stat().st_uid != os.getuid():
            raise PermissionError(f"{self.folder.parent} belongs to somebody else")
        self._start = start

    def note(self, process: int) -> None:
        """Write down a process of this start, which this process is the parent of."""
        (self.folder / f"{process}.process").write_text(f"{self._start} {_began(process)} {os.getpid()}")

    def end(self) -> None:
        """Wait for what runs of earlier starts to save and leave; what does not is killed with all it has started.

        A process whose parent is gone was told so by SIGTERM.

        Raises:
            UserError: one has its parent still: somebody else runs the same now.
            TimeoutError: one cannot be killed.
        """
        until = time.monotonic() + self.PATIENCE
        for file in self.folder.glob("*.process"):
            with contextlib.suppress(FileNotFoundError, ValueError):  # another start is at the same
                start, began, parent = file.read_text().split(" ")
                if start == self._start:
                    continue
                _end(int(file.stem), began, int(parent), until)
            file.unlink(missing_ok=True)


def _end(process: int, began: str, parent: int, until: float) -> None:
    """`began` tells the process from a later one of the same number."""
    killed = False
    while began and (now := _stat(process)).began == began:
        if now.parent == parent:
            raise UserError(
                f"this run is under way already, in process {process} of {socket.gethostname()}",
                fix="Wait for it, or end what started it.",
            )
        if time.monotonic() >= until:
            if killed:
                raise TimeoutError(f"process {process} of {socket.gethostname()} cannot be killed")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(os.getpgid(process), signal.SIGKILL)
            killed, until = True, time.monotonic() + _DEAD_WITHIN
        time.sleep(_LOOK_EVERY)


class _Stat(NamedTuple):
    began: str  # in the kernel's clock ticks since boot; "" if it is gone
    parent: int


def _stat(process: int) -> _Stat:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return _Stat("", 0)
    # State, parent and starttime are fields 3, 4 and 22 of proc(5).
    return _Stat("" if fields[0] in "ZX" else fields[19], int(fields[1]))


def _began(process: int) -> str:
    return _stat(process).began
