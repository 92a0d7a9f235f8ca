"""Processes that outlive whoever started them: found again, given time to save, and ended."""

import contextlib
import os
import signal
import socket
import tempfile
import time
from pathlib import Path

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

    def note(self, process: int, owner: int) -> None:
        """Write down a process of this start, and the one which watches over it."""
        text = f"{self._start} {began(process)} {owner} {began(owner)}"
        part = self.folder / f"{process}.part"
        part.write_text(text)
        part.rename(part.with_suffix(".process"))

    def end(self) -> None:
        """Wait for what runs of earlier starts to save and leave; what does not is killed with all it has started.

        A process whose owner is gone was told so by SIGTERM.

        Raises:
            UserError: one has its owner still: somebody else runs the same now.
            TimeoutError: one cannot be killed.
        """
        until = time.monotonic() + self.PATIENCE
        for file in self.folder.glob("*.process"):
            with contextlib.suppress(FileNotFoundError, ValueError):  # another start is at the same
                start, since, owner, owner_since = file.read_text().split(" ")
                if start == self._start:
                    continue
                _end(int(file.stem), since, (int(owner), owner_since), until)
            file.unlink(missing_ok=True)


def _end(process: int, since: str, owner: tuple[int, str], until: float) -> None:
    """`since` tells the process from a later one of the same number."""
    killed = False
    while since and began(process) == since:
        if owner[1] and began(owner[0]) == owner[1]:
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


def began(process: int) -> str:
    """When a process began, in the kernel's clock ticks since boot; "" if it is gone."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    # State and starttime are fields 3 and 22 of proc(5).
    return "" if fields[0] in "ZX" else fields[19]
