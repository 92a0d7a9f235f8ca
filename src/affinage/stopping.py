"""How a process ends: told by a signal, at any moment, also while it is in native code; or when it is done."""

import atexit
import contextlib
import ctypes
import os
import platform
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, ClassVar, NoReturn

from affinage.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_USER_ERROR, Preempted, TransientError, UserError

# SIGHUP, which Windows has not, is sent by the end of an ssh session.
SIGNALS = (signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
STOPPED = "Stopped: "  # before the reason for which a process is left
ONE_PRESS = 1.0  # seconds: signals closer than this are one wish, told by a shell and a launcher, or by quick keys
PARENT = "AFFINAGE_PARENT"  # the process without which this one shall not go on
PARENT_SIGNAL = "AFFINAGE_PARENT_SIGNAL"  # number of the signal that it then gets; default: SIGKILL
_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_PATIENCE = 3.0  # seconds for the main thread to come back from native code, such as XLA's compiler
_UNWINDS = 15.0  # seconds for what was under way to end after Preempted

Listener = Callable[[signal.Signals], None]
_farewells: list[Callable[[bool], None]] = []
_around_stops: list[Callable[[], contextlib.AbstractContextManager[None]]] = []


class GivenUp(Preempted):
    """A signal came where nobody listens: what was under way is given up, and the other hosts are to do likewise."""


class OwnProcess:
    """While entered, this process is a run's own, and may be left at any moment: what is on disk is whole anyway.

    Python runs signal handlers between two bytecodes of the main thread, so one that compiles for a minute hears of a
    signal a minute later. Here a thread hears of it at once. As long as nobody listens, see `listen`, the main thread
    raises Preempted, and if it does not come to that within three seconds the process is left. It is left at once where
    Python has nobody to raise it to, later where it goes on all the same, as a library has swallowed that; or whoever
    listens next is told. Outside the main thread,
    where Python allows no handlers, it does nothing.

    Ctrl-Z stops it as any other, once the thread has heard of it: see `around_stops`.
    """

    current: ClassVar["OwnProcess | None"] = None

    def __init__(self) -> None:
        self._listener: Listener | None = None
        self._raised = threading.Event()
        self._heeded = threading.Event()  # it has come through, or somebody listens
        self._why = ""  # Preempted was raised
        self._before: dict[int, signal.Handlers | int | None] = {}

    def __enter__(self) -> "OwnProcess":
        if threading.current_thread() is threading.main_thread() and OwnProcess.current is None:
            self._ear, self._mouth = socket.socketpair()
            self._mouth.setblocking(False)
            self._unraisable_before, sys.unraisablehook = sys.unraisablehook, self._unraisable
            self._fd_before = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
            for number in heeded():
                self._before[number] = signal.signal(number, self._in_main)  # type: ignore[assignment]
            # Only Linux tells whether somebody could have it go on.
            if platform.system() == "Linux" and signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
                self._before[signal.SIGTSTP] = signal.SIG_DFL
                signal.signal(signal.SIGTSTP, lambda number, frame: None)
            threading.Thread(target=self._hear, name="signals", daemon=True).start()
            OwnProcess.current = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if OwnProcess.current is self:
            OwnProcess.current = None
            self._heeded.set()
            for number, handler in self._before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._fd_before)
            sys.unraisablehook = self._unraisable_before
            self._mouth.close()
            mistake = isinstance(error, UserError) and not isinstance(error, TransientError)
            if self._why and isinstance(error, Exception) and not (mistake or isinstance(error, Preempted)):
                raise GivenUp(self._why) from error  # a library, or who waits for it, has made an error of it

    @property
    def listened_to(self) -> bool:
        """Whether somebody is told of signals."""
        return self._listener is not None

    @contextlib.contextmanager
    def listen(self, listener: Listener) -> Iterator[None]:
        """Inside, `listener` is told of every signal, in a thread of its own, and nothing is raised."""
        self._listener = listener
        self._heeded.set()
        try:
            yield
        finally:
            self._listener = None
            self._heeded.clear()

    def _hear(self) -> None:
        with self._ear:
            while numbers := self._ear.recv(16):
                for number in numbers:
                    if number in SIGNALS:
                        self._tell(signal.Signals(number))
                    elif number == signal.SIGTSTP and OwnProcess.current is self and _may_be_stopped():
                        _stop()

    def _tell(self, number: signal.Signals) -> None:
        drop_what_nobody_reads()
        if self._listener is None and self._raised.wait(_PATIENCE):
            self._heeded.wait(_UNWINDS)
        if self._listener is not None:
            self._listener(number)
        elif OwnProcess.current is self:
            leave(f"{number.name}; the stage that was running begins anew", told=True)

    def _in_main(self, number: int, frame: FrameType | None) -> None:
        if self._listener is None and not self._raised.is_set():
            self._why = f"{signal.Signals(number).name}; the stage that was running begins anew"
            self._raised.set()
            raise GivenUp(self._why)

    def _unraisable(self, lost: Any) -> None:
        """Hear of an error that Python cannot raise, as in a finalizer or a callback of its garbage collection."""
        if isinstance(lost.exc_value, Preempted):
            self._heeded.set()  # nobody comes through with it, so that the process is left
        else:
            self._unraisable_before(lost)


def around_stops(held: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Have Ctrl-Z enter this before it stops a run's own process, and leave it when that goes on."""
    _around_stops.append(held)


def _stop() -> None:
    with contextlib.ExitStack() as held:
        for each in _around_stops:
            held.enter_context(each())
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # all threads, this one before it comes back


def _may_be_stopped() -> bool:
    """Whether Ctrl-Z may stop this process: not where no shell could have it go on, as the kernel has it by itself.

    Its group must have a parent of another group in this session (POSIX calls one without "orphaned").
    """
    group, session, pid = os.getpgrp(), os.getsid(0), os.getppid()
    with contextlib.suppress(OSError, ValueError, IndexError):  # one has ended
        while pid > 0:
            if os.getpgid(pid) != group:
                return os.getsid(pid) == session
            with open(f"/proc/{pid}/stat", errors="replace") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
    return False


@contextlib.contextmanager
def nothing_to_lose(after_interrupt: int = EXIT_INTERRUPTED) -> Iterator[None]:
    """Inside, where nothing has begun, a signal ends this process at once, without a traceback.

    Not for native code that takes long: Python would hear of the signal after it. The status is that of a run that has
    stopped (75), after SIGINT `after_interrupt`.
    """

    def leave_at_once(number: int, frame: FrameType | None) -> NoReturn:
        os._exit(after_interrupt if number == signal.SIGINT else EXIT_PREEMPTED)

    before = {number: signal.signal(number, leave_at_once) for number in heeded()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def heeded() -> list[signal.Signals]:
    """Those of SIGNALS that this process is to hear of: not SIGHUP where nohup has it ignored."""
    return [each for each in SIGNALS if each.name != "SIGHUP" or signal.getsignal(each) != signal.SIG_IGN]


def drop_what_nobody_reads() -> None:
    """Whoever read this process's output may be what ended; a line that nobody takes must not keep it from saving."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            asked = select.poll()
            asked.register(stream.fileno(), 0)
            if any(event & select.POLLERR for _, event in asked.poll(0)):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


class _WithoutReaders:
    """A stream whose lines are dropped once nobody reads them."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(BrokenPipeError):
            self._stream.write(text)
            return len(text)
        drop_what_nobody_reads()
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._stream.flush()
            return
        drop_what_nobody_reads()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def without_readers() -> Iterator[None]:
    """Inside, work goes on when the program that reads its output has ended, as in `affinage run RECIPE | head`."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_WithoutReaders, before)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def open_standard_streams() -> None:
    """Open those that this process was started without (`2>&-`), onto nothing.

    The next file to be opened, such as one of a checkpoint, would get their number, and what libraries write to it.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere == number:
                setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))
            else:  # somebody has that number already
                os.close(nowhere)


@contextlib.contextmanager
def left_when_done() -> Iterator[None]:
    """Inside is all that this process does. Then it is left, once its threads and exit handlers are done.

    Python's own way out would go on to take down threads of libraries (daemons) that are in native code, which now and
    then aborts the process: one that had done everything would end like one that failed, and be started again.
    """
    _LastWord.of = os.getpid()
    reserve_last_word()
    try:
        yield
        _LastWord.status = 0
    except SystemExit as ended:
        _LastWord.status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise
    except KeyboardInterrupt:
        _LastWord.status = EXIT_INTERRUPTED
        raise


class _LastWord:
    """What `left_when_done` has to say at the end."""

    reserved = False
    of: ClassVar[int | None] = None  # the process that is to be left
    status: ClassVar[int] = 1

    @staticmethod
    def say() -> None:
        if os.getpid() == _LastWord.of:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody reads it any more
                    stream.flush()
            os._exit(_LastWord.status)


def reserve_last_word() -> None:
    """Make `left_when_done` leave after the exit handlers of all that is imported from now on.

    For a process that imports what others, forked from it, are to leave with; else it is soon enough by itself.
    """
    if not _LastWord.reserved:
        _LastWord.reserved = True
        atexit.register(_LastWord.say)  # what is registered first is called last


def die_with_parent() -> None:
    """Get a signal when the process that started this one, and is named in AFFINAGE_PARENT, ends. On Linux only."""
    parent, number = os.environ.get(PARENT), int(os.environ.get(PARENT_SIGNAL, signal.SIGKILL))
    if parent is None or platform.system() != "Linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != int(parent):
        os.kill(os.getpid(), number)


@contextlib.contextmanager
def at_leaving(farewell: Callable[[bool], None]) -> Iterator[None]:
    """Inside, `leave` calls this first, with its `told`, where the process is to be started again; for some seconds."""
    _farewells.append(farewell)
    try:
        yield
    finally:
        _farewells.remove(farewell)


def leave(why: str, status: int = EXIT_PREEMPTED, *, told: bool = False) -> NoReturn:
    """End this process now, whatever its threads do; `told`: for a signal that a host got where nobody listens."""
    if status == EXIT_PREEMPTED:
        for farewell in list(_farewells):
            farewell(told)
    drop_what_nobody_reads()
    then = "" if status == EXIT_USER_ERROR else " Run the same command to go on."
    with contextlib.suppress(OSError, ValueError, AttributeError):  # AttributeError: there is no standard error
        show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
        os.write(sys.stderr.fileno(), f"{show_cursor}\n{STOPPED}{why}.{then}\n".encode())
    os._exit(status)
