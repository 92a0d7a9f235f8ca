"""The processes of a run: which of them this one is, how they find each other, and what they agree on.

All of them run the same code in the same order, and agree through the key-value store of JAX's coordination service,
whose heartbeats end all of them when one dies or stops answering.
"""

import collections
import contextlib
import ctypes
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from affinage.errors import TransientError, UserError, first_line
from affinage.stopping import leave, skip_exit_handlers

COORDINATOR, NUM_PROCESSES, PROCESS_ID = "AFFINAGE_COORDINATOR", "AFFINAGE_NUM_PROCESSES", "AFFINAGE_PROCESS_ID"
DETECT = "auto"
TO_START = 300.0  # seconds in which all processes must have started
_TO_AGREE = 300.0  # seconds; once all processes are there, agreeing takes milliseconds
_TO_SHUT_DOWN = 60  # seconds
_LAST_TO_LEAVE = 1.0  # seconds: JAX aborts the others, which may be about to leave, too, when the first one is gone
_SLICE = 0.5  # seconds of a wait during which Python's signal handlers do not run


class ProcessLost(TransientError):
    """Another process did not answer in time, or is gone."""


@dataclass(frozen=True)
class Placement:
    """Which of how many processes this one is, and where they find each other; `auto` leaves both to JAX."""

    coordinator: str  # ADDRESS:PORT, on which the first process listens
    count: int | None = None
    index: int | None = None


@dataclass(eq=False)
class Processes:
    """All processes of the run that this one belongs to."""

    index: int = 0
    count: int = 1
    notify_preemption: Callable[[], None] = lambda: None  # has JAX agree with all processes on a step to stop at
    current: ClassVar["Processes"]  # this process alone, until `init_distributed` is entered
    _calls: collections.Counter[str] = field(default_factory=collections.Counter)
    _together: bool = False

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and decides."""
        return self.index == 0

    @property
    def together(self) -> bool:
        """Whether all processes are at the same piece of work; otherwise each has only its own devices."""
        return self.count == 1 or self._together

    @staticmethod
    def at_work() -> "Processes":
        """Return the processes that share this piece of work: all of the run, or this one alone."""
        return Processes.current if Processes.current.together else Processes()

    @contextlib.contextmanager
    def all_at_work(self) -> Iterator[None]:
        """Inside, the devices of all processes compute one program; every process must enter it."""
        before, self._together = self._together, True
        try:
            yield
        finally:
            self._together = before

    def broadcast(self, name: str, value: Any, *, seconds: float | None = _TO_AGREE) -> Any:
        """Return the first process's value, as JSON represents it. All processes must call this equally often.

        Raises ProcessLost where the first process does not call this within `seconds`; None: as long as it lives.
        """
        if self.count == 1:
            return value
        from jax.errors import JaxRuntimeError

        key = self._key("broadcast", name)
        text = json.dumps(value) if self.first else ""
        if self.first:
            self._client.key_value_set(key, text)
        until = float("inf") if seconds is None else time.monotonic() + seconds
        while not text:
            try:
                text = str(self._client.blocking_key_value_get(key, int(1000 * _SLICE)))
            except JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise ProcessLost(f"process 0 cannot be reached: {first_line(error)}") from error
                if time.monotonic() >= until:
                    raise ProcessLost(f"process 0 has not announced `{name}` within {seconds:g} s") from error
        return json.loads(text)

    def all_min(self, name: str, value: int, *, seconds: float = _TO_AGREE) -> int:
        """Return the smallest of the values of all processes. All processes must call this equally often."""
        if self.count == 1:
            return value
        key = self._key("gather", name)
        self._client.key_value_set(f"{key}/{self.index}", str(value))
        self.barrier(name, seconds=seconds)
        return min(int(text) for _, text in self._client.key_value_dir_get(key))

    def barrier(self, name: str, *, seconds: float = _TO_AGREE) -> None:
        """Wait until all processes have called this; ProcessLost names those that have not in time."""
        if self.count == 1:
            return
        from jax.errors import JaxRuntimeError

        try:
            self._client.wait_at_barrier(self._key("barrier", name), int(1000 * seconds))
        except JaxRuntimeError as error:
            what = f"not all processes came to `{name}` within {seconds:g} s: {first_line(error)}"
            raise ProcessLost(what) from error

    def _key(self, kind: str, name: str) -> str:
        call = f"affinage/{kind}/{name}"
        self._calls[call] += 1  # by name, as threads may call this in another order
        return f"{call}/{self._calls[call]}"

    @property
    def _client(self) -> Any:
        from jax._src import distributed  # the public functions have no time limits and take arrays only

        return distributed.global_state.client


Processes.current = Processes()
_joined: Placement | None = None


def placement() -> Placement | None:
    """Return the place that the environment gives this process; None if it is alone.

    AFFINAGE_COORDINATOR=auto leaves it to JAX, which knows Slurm, Open MPI, Kubernetes and pods of TPUs. UserError:
    variables are missing, or contradict each other.
    """
    coordinator, count, index = (os.environ.get(name, "") for name in (COORDINATOR, NUM_PROCESSES, PROCESS_ID))
    if coordinator in ("", DETECT):
        return (_joined or Placement(DETECT)) if coordinator else None
    if re.fullmatch(r".*:\d+", coordinator) and count.isdecimal() and index.isdecimal() and int(index) < int(count):
        return Placement(coordinator, int(count), int(index))
    where = f"{COORDINATOR}={coordinator}, {NUM_PROCESSES}={count}, {PROCESS_ID}={index}"
    fix = f"Give each process {COORDINATOR}=ADDRESS:PORT (of process 0), {NUM_PROCESSES}=N and {PROCESS_ID}=0..N-1."
    raise UserError("these variables do not give this process its place", where=where, fix=fix)


def is_first() -> bool:
    """Return whether this process prints for all, as far as that is known before `init_distributed`."""
    return not getattr(placement(), "index", 0)


@contextlib.contextmanager
def init_distributed(heartbeat_timeout: float = 30.0) -> Iterator[Processes]:
    """Inside, this process is one of those that the environment names, joined by `jax.distributed`; alone without any.

    Enter it before JAX has computed anything. Where another process dies, or does not answer for `heartbeat_timeout`
    seconds, JAX aborts this one. The processes are left with status 1 if not all of them start in time.
    """
    global _joined
    here, before = placement(), Processes.current
    if here is None or before.count > 1:
        yield before
        return
    import jax

    try:
        notify_preemption = _connect(here, heartbeat_timeout)
        _joined = Placement(here.coordinator, jax.process_count(), jax.process_index())
        Processes.current = Processes(jax.process_index(), jax.process_count(), notify_preemption)
        yield Processes.current
        jax.distributed.shutdown()
    except BaseException:
        skip_exit_handlers.set()  # the others may be in a collective that never ends
        if Processes.current.first:
            time.sleep(_LAST_TO_LEAVE)
        raise
    finally:
        Processes.current = before


def _connect(here: Placement, heartbeat_timeout: float) -> Callable[[], None]:
    """Join the others; returns what notifies JAX of a preemption."""
    import jax

    which = "this process" if here.count is None else f"process {here.index} of {here.count}"
    why = f"{COORDINATOR}={here.coordinator}: {which} did not meet the others within {TO_START:g} s; start affinage in"
    why += " every process, each with its own number, and open the port between them"
    too_late = threading.Timer(TO_START, leave, (why, 1))  # JAX itself would abort with a page of stacks
    too_late.daemon = True
    too_late.start()
    python_handler = signal.getsignal(signal.SIGTERM)
    address = None if here.coordinator == DETECT else here.coordinator
    try:
        jax.distributed.initialize(
            address,
            here.count,
            here.index,
            cluster_detection_method=None if address is None else "deactivate",
            coordinator_bind_address=os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", address),
            initialization_timeout=int(TO_START) + 60,
            heartbeat_timeout_seconds=round(heartbeat_timeout),
            shutdown_timeout_seconds=_TO_SHUT_DOWN,
        )
        jax.local_devices()  # now: the first question after devices waits until all processes have asked it
    except (RuntimeError, ValueError) as error:
        what, where = f"JAX cannot join the processes: {error}", f"{COORDINATOR}={here.coordinator}"
        raise UserError(what, where=where, fix="See docs/clusters.md.") from error
    finally:
        too_late.cancel()
    return _take_sigterm_back(python_handler)


def _take_sigterm_back(python_handler: Any) -> Callable[[], None]:
    """Set Python's handler of SIGTERM again, which JAX has replaced by its own; return a function that calls JAX's.

    JAX's handler only notes the signal, for the agreement on a step to stop at. It must not be the only one: during a
    compilation nobody would learn of the signal.
    """
    if threading.current_thread() is not threading.main_thread() or python_handler is None:
        return lambda: None
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    of_jax = libc.signal(signal.SIGTERM, None)
    signal.signal(signal.SIGTERM, python_handler)
    call = ctypes.CFUNCTYPE(None, ctypes.c_int)(of_jax)
    return lambda: call(signal.SIGTERM)
