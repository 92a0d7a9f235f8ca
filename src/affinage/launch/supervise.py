"""Watching over the hosts of a run: when one ends, what becomes of the others, and whether to start again."""

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType

from affinage.errors import EXIT_PREEMPTED, EXIT_USER_ERROR
from affinage.launch.gang import Ending, Gang, Launcher, Restarts

_AFTER_75 = 5.0  # seconds for the others: hosts that stop together have saved when the first one leaves
_AFTER_2 = 5.0  # seconds in which the others find the same mistake
_AFTER_0 = 60.0  # seconds for the others when one is done
_LOOK_EVERY = 1.0  # seconds
_QUICK = 20.0  # seconds: a start that fails within them may do so for ever
_PATIENT = 3  # quick failures in a row that are not waited after
_LONGEST_PAUSE = 60.0  # seconds
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def supervise(
    launcher: Launcher,
    command: Sequence[str],
    restarts: Restarts,
    *,
    grace: float = 35.0,
    say: Callable[[str], None] = print,
) -> int:
    """Run a command of `affinage` on all hosts until it is done, starting them all again when one is lost.

    SIGTERM, SIGINT and SIGHUP are passed on to the hosts, and nothing is started again. Whatever happens, nothing that
    was started runs afterwards.

    Args:
        launcher: starts the hosts.
        command: arguments of `affinage`.
        restarts: how often.
        grace: seconds for the hosts to save when this process is told to stop.
        say: takes what there is to tell.

    Returns:
        The exit status for this process: 0 done, 2 a mistake of the user, 75 told to stop, 130 so twice by Ctrl-C,
        1 given up.
    """
    preemptions = failures = quick = 0
    with _Stop() as stop:
        while True:
            began = time.monotonic()
            cause = _run(launcher, command, stop, grace, say)
            if cause.status in (0, EXIT_USER_ERROR) or stop.number:
                return cause.status
            if cause.status == EXIT_PREEMPTED:
                preemptions += 1
                used, most, what = preemptions, restarts.preemptions, "preemptions"
            else:
                failures += 1
                used, most, what = failures, restarts.failures, "failures"
            if used > most:
                say(f"launch: {cause}; given up after {most} {what}")
                return EXIT_PREEMPTED if what == "preemptions" else 1
            # One that was killed from outside may well go on; only what ends by itself will do so again.
            quick = quick + 1 if cause.status > 0 and time.monotonic() - began < _QUICK else 0
            pause = min(2.0 ** (quick - _PATIENT), _LONGEST_PAUSE) if quick > _PATIENT else 0.0
            say(f"launch: {cause}; all hosts start again ({used} of {most} {what})")
            if stop.wait(pause):
                return EXIT_PREEMPTED


def _run(launcher: Launcher, command: Sequence[str], stop: "_Stop", grace: float, say: Callable[[str], None]) -> Ending:
    """One start; the ending of the host that decided over the others'."""
    gang = launcher.start(command)
    try:
        return _watch(gang, launcher.hosts, stop, grace, say)
    finally:
        gang.end()


def _watch(gang: Gang, hosts: int, stop: "_Stop", grace: float, say: Callable[[str], None]) -> Ending:
    endings: list[Ending] = []
    until = tell_at = float("inf")
    told = 0
    while len(endings) < hosts and time.monotonic() < until:
        endings += gang.ended(min(_LOOK_EVERY, max(until - time.monotonic(), 0.0)))
        if stop.count > told:
            gang.tell(stop.number or signal.SIGTERM)
            until = min(until, time.monotonic() + grace) if not told else until
            told = stop.count
        worst = _cause(endings)
        if worst is None:
            continue
        if worst.status not in (0, EXIT_PREEMPTED, EXIT_USER_ERROR) and not told:
            return worst  # the others wait for it in vain
        if until == float("inf"):
            patience = {0: _AFTER_0, EXIT_PREEMPTED: _AFTER_75}.get(worst.status, _AFTER_2)
            until = time.monotonic() + (grace if worst.out_of_sight else patience)
            if worst.status == EXIT_PREEMPTED:
                # One that is out of sight tells the others itself, where they train; twice told is once too often.
                tell_at = time.monotonic() + (_AFTER_75 if worst.out_of_sight else 0.0)
        if time.monotonic() >= tell_at:
            gang.tell(signal.SIGTERM)
            tell_at = float("inf")
    if len(endings) < hosts:
        late = [str(host) for host in range(hosts) if host not in {ending.host for ending in endings}]
        say(f"launch: host {', '.join(late)} did not end in time, and is killed")
    if told and _cause(endings) is None:
        return Ending(0, EXIT_PREEMPTED)
    return _judged(_cause(endings) or Ending(0, 1), endings, bool(told))


def _judged(cause: Ending, endings: Sequence[Ending], told: bool) -> Ending:
    """What was lost sight of has saved only if one that was not has: else it is as good as killed."""
    saved = any(ending.status == EXIT_PREEMPTED and not ending.out_of_sight for ending in endings)
    return dataclasses.replace(cause, status=-signal.SIGKILL) if cause.out_of_sight and not (saved or told) else cause


def _cause(endings: Sequence[Ending]) -> Ending | None:
    """The first ending that was not a good one: what comes after it may be for its sake. Else the first one."""
    return next((ending for ending in endings if ending.status != 0), endings[0] if endings else None)


class _Stop:
    """While entered, notes the signals that ask this process to stop, where it may have handlers."""

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self.count = 0

    def __enter__(self) -> "_Stop":
        self._cleanup = contextlib.ExitStack()
        if threading.current_thread() is threading.main_thread():
            for number in _STOPS:
                self._cleanup.callback(signal.signal, number, signal.signal(number, self._on_signal))
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def wait(self, seconds: float) -> bool:
        """Pause; whether it was to stop meanwhile."""
        until = time.monotonic() + seconds
        while not self.number and time.monotonic() < until:
            time.sleep(0.1)
        return self.number is not None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.number = signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number)
        self.count += 1
