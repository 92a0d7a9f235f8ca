"""Which process uses which results of a store, so that several runs may share one."""

import contextlib
import errno
import fcntl
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from affinage.errors import UserError
from affinage.hardware.movement import waits_for_others
from affinage.pipeline.store import Request, Store

Taken = Callable[[Request], contextlib.AbstractContextManager[bool]]  # see `taken`
_LOOK_EVERY = 0.5  # seconds, at what another process makes
_HELD = (errno.EACCES, errno.EAGAIN)  # by another process


class Locks:
    """What this process writes and reads, by name, until the context is left: one writes, or any number read.

    A process that ends, however it ends, holds nothing any more. These are POSIX locks, not those of flock: child
    processes do not inherit them, so one that outlives its parent holds nothing either.

    Args:
        folder: of the store.
        who: what other processes are told of this one.
    """

    def __init__(self, folder: Path, who: str) -> None:
        self._folder = folder / ".locks"
        self._who = f"`{who}` (process {os.getpid()} on {platform.node()}, since {time.strftime('%H:%M:%S')})"
        self._files: dict[str, int] = {}  # descriptors

    def __enter__(self) -> "Locks":
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except FileNotFoundError as error:  # as in /proc
            fix = "Name another one with --runs."
            raise UserError("this folder cannot be made", where=str(self._folder.parent), fix=fix) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for file in self._files.values():
            os.close(file)  # which gives the lock back
        self._files.clear()

    def write(self, name: str) -> bool:
        """Take a name for writing, also one that is held for reading; False if another process has it."""
        file = self._opened(name)
        if not self._lock(file, fcntl.LOCK_EX):
            # Of two that read and want to write each would wait for the other.
            fcntl.lockf(file, fcntl.LOCK_UN)
            return False
        os.ftruncate(file, 0)
        os.pwrite(file, self._who.encode(), 0)
        return True

    def read(self, name: str) -> bool:
        """Take a name for reading, also one that is held for writing; False if another process writes."""
        file = self._opened(name)
        if not self._lock(file, fcntl.LOCK_SH):
            return False
        os.ftruncate(file, 0)  # nobody writes it
        return True

    def release(self, name: str) -> None:
        """Give a name back, if it is held."""
        if name in self._files:
            os.close(self._files.pop(name))

    def holder(self, name: str) -> str:
        """The process that writes it, or "another run", where several may read it."""
        return os.pread(self._opened(name), 1000, 0).decode(errors="replace") or "another run"

    def _opened(self, name: str) -> int:
        # Each is opened once: the first of several that is closed would give the lock back.
        if name not in self._files:
            self._files[name] = os.open(self._folder / name, os.O_RDWR | os.O_CREAT, 0o666)
        return self._files[name]

    def _lock(self, file: int, kind: int) -> bool:
        try:
            fcntl.lockf(file, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                return False
            fix = "Use another disk with --runs."
            raise UserError(
                f"files cannot be locked there: {error.strerror}", where=str(self._folder), fix=fix
            ) from error
        return True


@contextlib.contextmanager
def taken(locks: Locks, store: Store, say: Callable[[str], None], request: Request) -> Iterator[bool]:
    """Inside, a result that is missing is this process's to make; the context tells whether it is missing.

    Waits as long as another process makes it, which is said. What is there in the end stays while the locks are held.
    """
    name, told = store.path(request).name, False
    while True:
        complete = store.is_complete(request)
        got = locks.read(name) if complete else locks.write(name)
        if got and store.is_complete(request) == complete:
            break
        if not got:
            if not told:
                say(f"{request.stage}: waits for {locks.holder(name)}, which is at it")
            told = True
            with waits_for_others():
                time.sleep(_LOOK_EVERY)
    yield not complete
    if not (store.is_complete(request) and locks.read(name)):
        locks.release(name)  # copied only in part: whoever needs all of it must be able to write
