"""Where the threads of this process are, told in time also where the disk does not answer."""

import contextlib
import faulthandler
import gc
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from affinage.stopping import OwnProcess, around_stops

_DISK = 1.0  # seconds for the disk to take the stacks; else they go to standard error
_OTHERS = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))

_PACKAGE = str(Path(__file__).parents[1])

_looking = threading.Lock()
_timer = threading.Lock()


class Stacks:
    """A file for the stacks of all threads, and a line of standard error for each time they were written."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def tell(self, said: str) -> None:
        """Say it, with the stacks of all threads."""
        written = self.add(f"{said}\n\n", stacks=True)
        say(f"{said}; all stacks are {f'in {self._file}' if written else 'here'}")
        if not written:
            with contextlib.suppress(OSError, ValueError, AttributeError):  # there may be no standard error
                faulthandler.dump_traceback(sys.stderr.fileno())

    def add(self, text: str, *, stacks: bool = False) -> bool:
        """Add to the file; whether the disk, which may be what everybody waits for, has taken it in time."""

        def write() -> None:
            with contextlib.suppress(OSError):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                with self._file.open("a", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    if stacks:
                        faulthandler.dump_traceback(file)
                    done.set()

        done = threading.Event()
        threading.Thread(target=write, name="stacks", daemon=True).start()
        return done.wait(_DISK)


def say(line: str) -> None:
    """A line of standard error, whose reader may be gone."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def told_without_python(seconds: float) -> None:
    """Have all stacks told in standard error, unless this is called again within so many seconds.

    Native code may keep all threads of Python from running, also those that watch; this one is not of Python.
    """
    with _timer:
        if OwnProcess.current is not None and sys.stderr is not None:
            faulthandler.dump_traceback_later(seconds, file=2)


def needs_no_telling() -> None:
    """Take back `told_without_python`."""
    if OwnProcess.current is not None:
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def _nothing_told() -> Iterator[None]:
    """Inside, `told_without_python` waits: its thread would take the time of a stop for one without a sign."""
    with _timer:
        needs_no_telling()
        yield


around_stops(_nothing_told)


def where() -> str:
    """The innermost line of ours, or of the user's, that the main thread is at."""
    frame = _frames().get(threading.main_thread().ident or 0)
    # The main thread goes on meanwhile, and what its frames were may be something else by now (seen in Python 3.11).
    while isinstance(frame, FrameType) and not _ours(frame.f_code.co_filename):
        frame = frame.f_back
    if not isinstance(frame, FrameType):
        return "nowhere"
    return f"{frame.f_code.co_name}, {frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def _frames() -> dict[int, FrameType]:
    """What each thread is at.

    Python 3.11 holds a lock meanwhile that each new thread needs. A collection in the midst of it, which lets others
    run, would stop the process for good (python/cpython#106883), so there is none; nor does another thread that looks,
    too, allow it meanwhile.
    """
    with _looking:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def _ours(file: str) -> bool:
    return file.startswith(_PACKAGE + os.sep) or not file.startswith((*_OTHERS, "<"))
