"""How a process ends: on a signal, at any moment; or when its work is done."""

import atexit
import contextlib
import ctypes
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.machinery import ExtensionFileLoader
from types import FrameType
from typing import Any, ClassVar, NoReturn

from affinage.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, Preempted, TransientError, UserError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PARENT = "AFFINAGE_PARENT"  # the process id of the launcher; a process ends with it
ONE_PRESS = 1.5  # seconds: signals closer than this are one, sent by a shell and a launcher
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


class StopSignals:
    """While entered, SIGTERM, SIGINT or SIGHUP raises Preempted in the main thread: what runs has nothing to save.

    What is on disk is complete at any moment, so a second signal leaves it at once, with status 75. Python runs
    handlers between two bytecodes: native code comes back first. A training, which may compile for minutes, puts others
    in place of these, see `affinage.training.watchdog`. Outside of the main thread, where Python allows no signal
    handlers, this does nothing.
    """

    current: ClassVar["StopSignals | None"] = None

    def __init__(self) -> None:
        self._reason, self._since, self._cleanup = "", 0.0, contextlib.ExitStack()

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread() and StopSignals.current is None:
            self._cleanup.enter_context(handled_by(self._on_signal))
            StopSignals.current = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if StopSignals.current is not self:
            return
        StopSignals.current = None
        self._cleanup.close()
        mistake = isinstance(error, UserError) and not isinstance(error, TransientError)
        if self._reason and isinstance(error, Exception) and not (mistake or isinstance(error, Preempted)):
            raise Preempted(self._reason) from error  # a library has made another error of it

    def note(self, name: str, reason: str = "") -> None:
        """A signal came, and the step that was running may end, or has ended for a reason that stays the one."""
        self._reason = reason or f"{name}; a step that is not complete starts from its beginning"
        self._since = time.monotonic()

    @staticmethod
    def raise_pending() -> None:
        """Raise Preempted before something begins, if a signal came before, and somebody has gone on nevertheless."""
        if StopSignals.current is not None and StopSignals.current._reason:
            raise Preempted(StopSignals.current._reason)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._reason:
            self.note(signal.Signals(number).name)
            if _in_native_import(frame):
                leave(self._reason)
            raise Preempted(self._reason)
        if time.monotonic() - self._since > ONE_PRESS:
            leave(self._reason)


def _in_native_import(frame: FrameType | None) -> bool:
    """Whether a native module is being imported: an exception in the middle of JAX's aborts the process."""
    while frame is not None and not isinstance(frame.f_locals.get("self"), ExtensionFileLoader):
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Inside, `handler` gets SIGTERM, SIGINT and SIGHUP, but the latter not where nohup has it ignored.

    Outside of the main thread Python allows no handlers, and this does nothing.
    """
    numbers = [each for each in SIGNALS if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers} if in_main_thread else {}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class _WithoutReader:
    """A stream whose lines are dropped once nobody reads them."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        if name not in ("write", "flush"):
            return getattr(self._stream, name)

        def guarded(*words: str) -> Any:
            try:
                return getattr(self._stream, name)(*words)
            except OSError:
                self._stream = open(os.devnull, "w")  # noqa: SIM115  # from here on everything is written nowhere
                return len("".join(words))

        return guarded


@contextlib.contextmanager
def without_readers(*, of_output: bool = True) -> Iterator[None]:
    """Inside, work continues when the reader of its output has ended, as in `| head`, or its terminal is closed.

    Without `of_output` that holds for standard error alone, as where the disk of a log is full.
    """
    out, err = (stream and _WithoutReader(stream) for stream in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(out if of_output else sys.stdout), contextlib.redirect_stderr(err):
        yield


def die_with_parent() -> None:
    """Have the kernel kill this process when the launcher that $AFFINAGE_PARENT names ends. On Linux only."""
    parent = os.environ.get(PARENT)
    if parent is not None and platform.system() == "Linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):
            os.kill(os.getpid(), signal.SIGKILL)


def leave(why: str, status: int = EXIT_PREEMPTED) -> NoReturn:
    """Print one line and end this process now, whatever its threads do."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # AttributeError: there is no standard error
        show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
        os.write(sys.stderr.fileno(), f"{show_cursor}\nStopped: {why}. Run the same command to resume.\n".encode())
    os._exit(status)


# Once set, `left_when_done` ends this process without exit handlers, of which JAX's waits for the other processes.
skip_exit_handlers = threading.Event()


@contextlib.contextmanager
def left_when_done() -> Iterator[None]:
    """Inside is all that this process does. At the end it is left once its threads and exit handlers are done.

    Python's own way out would go on to take down daemon threads that are in native code, which now and then aborts the
    process: one that had done everything would look like one that failed, and be started again.
    """
    pid, status = os.getpid(), 1

    def end() -> None:
        if os.getpid() == pid:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    stream.flush()
            os._exit(status)

    atexit.register(end)  # what is registered first is called last
    try:
        yield
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
        raise
    finally:
        if skip_exit_handlers.is_set():
            end()
