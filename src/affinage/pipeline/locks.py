"""One lock for each run and for each result that is being made."""

import contextlib
import os
import platform
import time
from pathlib import Path

from filelock import FileLock, Timeout

from affinage.errors import UserError


class Lock:
    """A lock that at most one process holds, and never one that has ended.

    Args:
        folder: of the locks.
        name: of what is locked.
        owner: what this process is called in other processes' messages.
    """

    def __init__(self, folder: Path, name: str, owner: str) -> None:
        self._note = folder / f"{name}.holder"
        self._owner = f"`{owner}` (process {os.getpid()} on {platform.node()}, since {time.strftime('%H:%M:%S')})"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(folder / f"{name}.lock", timeout=0, mode=0o666)
        except OSError as error:
            raise self._refused(error) from error

    def acquire(self) -> bool:
        """Take the lock; False if another process holds it."""
        try:
            self._lock.acquire()
        except Timeout:
            return False
        except OSError as error:
            raise self._refused(error) from error
        self._note.write_text(self._owner, encoding="utf-8")
        return True

    def release(self) -> None:
        """Give the lock back, if it is held."""
        self._lock.release()

    @property
    def holder(self) -> str:
        """The process that holds it, in words."""
        with contextlib.suppress(OSError):
            return self._note.read_text(encoding="utf-8", errors="replace")[:1000] or "another process"
        return "another process"

    def _refused(self, error: OSError) -> UserError:
        what = f"files cannot be made or locked there: {error.strerror or error}"
        return UserError(what, where=str(self._note.parent.parent), fix="Name another folder with --runs.")
