"""Whether this process does anything: by where its main thread is, what it computes, and what it reads and writes."""

import contextlib
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from affinage.hardware.stacks import where
from affinage.hardware.stops import JUMP

KNOWN = sys.platform == "linux"  # elsewhere what is read, written, and done by others that were started is not told
_LOOK_EVERY = 1.0  # seconds
_SHARE = 0.05  # of one processor: what stands still, with all that looks after it, takes less than 0.02
_BYTES = 10_000  # a second: a line that moves on a terminal has some 2,000


class _Work(NamedTuple):
    seconds: float  # of processors
    bytes: int  # read and written, from disks and pipes; a kernel counts no sockets there

    def enough_since(self, before: "_Work", seconds: float) -> bool:
        """Whether what was done in these seconds is more than to look and to wait."""
        return self.seconds - before.seconds > _SHARE * seconds or self.bytes - before.bytes > _BYTES * seconds


class Movement:
    """For how long this process has done nothing, look by look; use it from one thread.

    It moves where its main thread comes to another line of ours or of the user's, where it or a process that it has
    started computes, reads or writes, and where somebody counts a `sign`. It may also wait, see `waits_for_others`.
    """

    def __init__(self) -> None:
        self._looked = self._moved = time.monotonic()
        self._signs = 0
        self._at: tuple[str, int] | None = None
        self._own = _own()
        self._others: dict[int, _Work] | None = None  # looked at only while this process does nothing

    def sign(self) -> None:
        """Something was done; from any thread."""
        self._signs += 1

    @property
    def seconds(self) -> float:
        """Without a movement, at the last look; from any thread."""
        return self._looked - self._moved

    def look(self) -> float:
        """`seconds`, after a look at what has moved; at most once a second."""
        now = time.monotonic()
        since = now - self._looked
        if since >= _LOOK_EVERY:
            at = (where(), self._signs)
            moved = is_waiting() or since > JUMP or at != self._at or _own().enough_since(self._own, since)
            if moved or self._others_moved(since):
                self._moved = now
            if moved:
                self._others = None
            self._at, self._looked = at, now
            self._own = _own()  # without what the look took
        return self.seconds

    def _others_moved(self, since: float) -> bool:
        before, self._others = self._others, _started()
        if before is None:
            return False
        found = self._others
        return found.keys() != before.keys() or any(found[pid].enough_since(before[pid], since) for pid in found)


_waits: list[Callable[[], bool]] = []  # what says whether the main thread may do nothing


@contextlib.contextmanager
def waits_for_others(while_: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Inside, the main thread waits for what somebody else does, who is watched where he does it.

    Where it waits for another thread, `while_` says, to any thread, whether that one waits for somebody else.
    """
    mine = threading.current_thread() is threading.main_thread()
    if mine:
        _waits.append(while_)
    try:
        yield
    finally:
        if mine:
            _waits.pop()


class _Upkeep(threading.local):
    everybody = 0.0  # seconds of processors
    seconds = 0.0  # of this thread, as far as they are counted there


def count_out() -> None:
    """What this thread has computed so far was no movement, but what is done again and again beside a work."""
    now = time.thread_time()
    _Upkeep.everybody += now - _upkeep.seconds
    _upkeep.seconds = now


_upkeep = _Upkeep()


def is_waiting() -> bool:
    """Whether the main thread is in `waits_for_others`."""
    return any(while_() for while_ in list(_waits))


def _own() -> _Work:
    return _Work(time.process_time() - _Upkeep.everybody, _bytes("self"))


def _bytes(pid: int | str) -> int:
    try:
        facts = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        return sum(int(facts[name]) for name in ("rchar", "wchar", "read_bytes"))  # the last: also of mapped files
    except (OSError, ValueError, KeyError):
        return 0


def _started() -> dict[int, _Work]:
    """What the processes have done that this one has started, and those that they have; on Linux.

    Elsewhere what workers of ours do is not known: each look finds others, as if they moved.
    """
    if not KNOWN:
        return {-time.monotonic_ns(): _Work(0.0, 0)} if multiprocessing.active_children() else {}
    parents, seconds = {}, {}
    entries: list[str] = []
    with contextlib.suppress(OSError):  # too many files are open, say
        entries = os.listdir("/proc")
    for entry in entries:
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = Path(f"/proc/{entry}/stat").read_text(errors="replace").rpartition(")")[2].split()
                parents[int(entry)] = int(fields[1])
                seconds[int(entry)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    found: set[int] = set()
    new = {os.getpid()}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new}
        found |= new
    return {pid: _Work(seconds[pid], _bytes(pid)) for pid in found}
