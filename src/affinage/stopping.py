"""How a process ends: on a signal, at any moment, also while it is in native code; or when its work is done."""

import atexit
import contextlib
import ctypes
import os
import platform
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, ClassVar, NoReturn

from affinage.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, Preempted, TransientError, UserError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PARENT = "AFFINAGE_PARENT"  # the process id of the launcher; a process ends with it
_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_TO_UNWIND = 10.0  # seconds for the main thread to come back from native code and run its `finally` blocks

Listener = Callable[[signal.Signals], None]


class StopSignals:
    """While entered, a thread of this process hears SIGTERM, SIGINT and SIGHUP at once.

    Python runs signal handlers in the main thread between two bytecodes, so a process that compiles for a minute would
    hear of a signal a minute later. Without a listener, see `listen`, the main thread raises Preempted, and the process
    is left with status 75 where that takes too long: what is on disk is complete at any moment. Outside of the main
    thread, where Python allows no signal handlers, this does nothing.
    """

    current: ClassVar["StopSignals | None"] = None
    pending: ClassVar[str] = ""  # a signal that came too late for the training that heard it

    def __init__(self) -> None:
        self._listener: Listener | None = None
        self._ended = threading.Event()  # or somebody listens
        self._raised = ""  # why Preempted was raised

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread() and StopSignals.current is None:
            reader, self._writer = socket.socketpair()
            self._writer.setblocking(False)
            self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            self._before = {number: signal.signal(number, self._in_main_thread) for number in heeded()}
            threading.Thread(target=self._hear, args=[reader], name="signals", daemon=True).start()
            StopSignals.current, StopSignals.pending = self, ""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if StopSignals.current is not self:
            return
        StopSignals.current = None
        self._ended.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._writer.close()
        mistake = isinstance(error, UserError) and not isinstance(error, TransientError)
        if self._raised and isinstance(error, Exception) and not (mistake or isinstance(error, Preempted)):
            raise Preempted(self._raised) from error  # a library has made another error of it

    @staticmethod
    def raise_pending() -> None:
        """Raise Preempted before something begins, if a signal came while the last thing ended."""
        name, StopSignals.pending = StopSignals.pending, ""
        if name:
            raise Preempted(f"{name} when a step was done")

    @contextlib.contextmanager
    def listen(self, listener: Listener) -> Iterator[None]:
        """Inside, `listener` is called for every signal, in the thread, and nothing is raised."""
        self._listener = listener
        self._ended.set()
        try:
            yield
        finally:
            self._listener = None
            self._ended.clear()

    def _hear(self, reader: socket.socket) -> None:
        with reader:
            while numbers := reader.recv(16):
                for number in map(signal.Signals, numbers):
                    if self._listener is None:
                        self._ended.wait(_TO_UNWIND)
                    if self._listener is not None:
                        self._listener(number)
                    elif StopSignals.current is self:
                        leave(_lost(number))

    def _in_main_thread(self, number: int, frame: FrameType | None) -> None:
        if self._listener is None and not self._raised:
            self._raised = _lost(signal.Signals(number))
            raise Preempted(self._raised)


def _lost(number: signal.Signals) -> str:
    return f"{number.name}; the step that was running starts from its beginning"


def heeded() -> list[signal.Signals]:
    """Return those of SIGNALS that this process reacts to: not SIGHUP where nohup has it ignored."""
    return [each for each in SIGNALS if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]


@contextlib.contextmanager
def handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Inside, `handler` gets SIGTERM, SIGINT and SIGHUP; outside of the main thread Python allows no handlers."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in heeded()} if in_main_thread else {}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def nothing_to_lose(after_interrupt: int) -> contextlib.AbstractContextManager[None]:
    """Inside, a signal ends this process at once, with the status of a preempted run; after SIGINT another one."""

    def leave_at_once(number: int, frame: FrameType | None) -> NoReturn:
        os._exit(after_interrupt if number == signal.SIGINT else EXIT_PREEMPTED)

    return handled_by(leave_at_once)


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
def without_readers() -> Iterator[None]:
    """Inside, work continues when the reader of its output has ended, as in `| head`, or its terminal is closed."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream and _WithoutReader(stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


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


_skip_exit_handlers = threading.Event()


def skip_exit_handlers() -> None:
    """Have `left_when_done` end this process without exit handlers, of which JAX's waits for the other processes."""
    _skip_exit_handlers.set()


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
        if _skip_exit_handlers.is_set():
            end()
