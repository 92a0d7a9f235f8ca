"""Watching over the hosts of a run: when one ends, what becomes of the others, and whether to start again."""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from affinage.errors import EXIT_PREEMPTED, EXIT_USER_ERROR, UserError
from affinage.launch.gang import Elastic, Ending, Gang, Launcher, Restarts
from affinage.launch.told import Told
from affinage.secrets import masked

_AFTER_75 = 5.0  # seconds for the others: hosts that stop together have saved when the first one leaves
_AFTER_2 = 5.0  # seconds in which the others find the same mistake
_AFTER_DEATH = 1.5  # seconds until the end of a host is told that the others have left for: its output may be held open
_AFTER_0 = 60.0  # seconds for the others when one is done
_LOOK_EVERY = 1.0  # seconds
_TO_GROW = 1800.0  # seconds for hosts to save before more of them start; nobody takes this machine away
_QUICK = 20.0  # seconds: a start that fails within them may do so for ever
_PATIENT = 3  # quick failures in a row that are not waited after
_PATIENT_IF_TOLD = 10  # the same, where the last one was told to stop, and saved: it went well as long as it was let
_LONGEST_PAUSE = 60.0  # seconds


def supervise(
    launcher: Launcher,
    command: Sequence[str],
    restarts: Restarts,
    *,
    grace: float = 35.0,
    room_every: float = 60.0,
    say: Callable[[str], None] = print,
) -> int:
    """Run a command of `affinage` on all hosts until it is done, starting them all again when one is lost.

    SIGTERM, SIGINT and SIGHUP are passed on to the hosts, and nothing is started again. Whatever happens, nothing that
    was started runs afterwards. Where a launcher is `Elastic` and finds room for more hosts, those that run are told to
    save, and all start again, which is counted as no preemption.

    Args:
        launcher: starts the hosts.
        command: arguments of `affinage`.
        restarts: how often.
        grace: seconds for the hosts to save when this process is told to stop.
        room_every: seconds between two looks for room for more hosts, and from a start to the first one.
        say: takes what there is to tell.

    Returns:
        The exit status for this process: 0 done, 2 a mistake of the user, 75 told to stop, 130 so twice by Ctrl-C,
        1 given up.

    Raises:
        Exception: of the launcher's first start. Once the hosts have been started, it counts as a failure.
    """
    spent = _Spent(restarts)
    with Told() as stop, contextlib.ExitStack() as cleanup:
        cleanup.callback(launcher.finish)
        while True:
            end = _run(launcher, command, stop, grace, room_every, say, first=not spent.begun)
            if stop.number and end.status < 0:  # the signal came before the host had begun to listen
                return EXIT_PREEMPTED
            if end.status in (0, EXIT_USER_ERROR) or stop.number:
                return end.status
            if end.grows and end.status == EXIT_PREEMPTED:
                spent.begun = True
                continue
            used, pause = spent.by(end)
            if pause is None:
                say(f"launch: {end.what}; given up after {used}")
                return EXIT_PREEMPTED if end.status == EXIT_PREEMPTED else 1
            say(f"launch: {end.what}; all hosts start again{f' in {pause:.0f} s' if pause else ''} ({used})")
            if stop.wait(pause):
                return EXIT_PREEMPTED


class _End(NamedTuple):
    """How one start ended."""

    status: int  # of the host that decided over the others'
    what: str
    lasted: float | None  # seconds; None where the hosts could not be started
    grows: bool = False  # it was told to end for the sake of a larger one


@dataclasses.dataclass
class _Spent:
    """What was used of the restarts since the last start that lasted."""

    restarts: Restarts
    begun: bool = False  # the hosts were started once
    preemptions: int = 0
    failures: int = 0
    quick: int = 0  # endings in a row, but of the killed, that came soon after their start
    unstarted: int = 0  # starts in a row that came to nothing

    def by(self, end: _End) -> tuple[str, float | None]:
        """Count an ending: what is used now, in words, and the seconds until the next start, None for no other."""
        if end.lasted is None:
            self.unstarted += 1
            pause = _growing(self.unstarted - 1)
        else:
            self.begun, self.unstarted = True, 0
            if end.lasted >= self.restarts.lasting:
                self.preemptions = self.failures = 0
            # One that was killed from outside may well go on; only what ends by itself will do so again.
            self.quick = self.quick + 1 if end.status > 0 and end.lasted < _QUICK else 0
            patient = _PATIENT_IF_TOLD if end.status == EXIT_PREEMPTED else _PATIENT
            pause = _growing(self.quick - patient) if self.quick > patient else 0.0
        if end.status == EXIT_PREEMPTED:
            self.preemptions += 1
            used, most, kind = self.preemptions, self.restarts.preemptions, "preemptions"
        else:
            self.failures += 1
            used, most, kind = self.failures, self.restarts.failures, "failures"
        return (f"{most} {kind}", None) if used > most else (f"{used} of {most} {kind}", pause)


def _growing(doublings: int) -> float:
    return _LONGEST_PAUSE if doublings > 10 else min(2.0**doublings, _LONGEST_PAUSE)


def _run(
    launcher: Launcher,
    command: Sequence[str],
    stop: Told,
    grace: float,
    room_every: float,
    say: Callable[[str], None],
    *,
    first: bool,
) -> _End:
    try:
        gang = launcher.start(command)
    except Exception as error:
        if stop.number:
            return _End(EXIT_PREEMPTED, "told to stop", None)
        if first:
            raise
        # The machines were there: one that is gone may come back, or be replaced.
        what = error.what if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        return _End(1, masked(f"the hosts could not be started: {what}").partition("\n")[0], None)
    began = time.monotonic()
    try:
        cause, grows = _watch(gang, launcher, stop, grace, room_every, say)
    finally:
        gang.end()
    return _End(cause.status, str(cause), time.monotonic() - began, grows)


def _watch(
    gang: Gang, launcher: Launcher, stop: Told, grace: float, room_every: float, say: Callable[[str], None]
) -> tuple[Ending, bool]:
    """The ending that decides over the others', and whether they were told to end for the sake of a larger start."""
    hosts, grows, room = launcher.hosts, False, 0
    look_at = time.monotonic() + room_every
    endings: list[Ending] = []
    until = tell_at = told_by = float("inf")
    told = 0
    while len(endings) < hosts and time.monotonic() < until:
        endings += gang.ended(min(_LOOK_EVERY, max(min(until, told_by) - time.monotonic(), 0.0)))
        if stop.count > told:
            gang.tell(stop.number or signal.SIGTERM)
            until = min(until, time.monotonic() + grace) if not told else until
            told = stop.count
        worst = _cause(endings)
        if worst is None:
            if time.monotonic() >= look_at and not told and not grows and isinstance(launcher, Elastic):
                room = room + 1 if launcher.has_room() else 0
                grows = room > 1  # at two looks: a machine may come and go
                look_at = time.monotonic() + room_every
                if grows:
                    say("launch: there is room for more hosts; these are told to save, and all start again")
                    gang.tell(signal.SIGINT)  # after which they take the time that their save needs
                    until = time.monotonic() + _TO_GROW
            continue
        if worst.status not in (0, EXIT_PREEMPTED, EXIT_USER_ERROR) and not told:
            # The others wait for it in vain; or it has left for one of them, which is then the one that is told of.
            died = _died(worst, endings)
            told_by = min(told_by, time.monotonic() + _AFTER_DEATH)
            if died is not None or not _for_another(worst) or time.monotonic() >= told_by or len(endings) == hosts:
                return _judged(died or _failed(worst, endings) or worst, endings, told=False), False
            continue
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
    if (told or grows) and _cause(endings) is None:
        return Ending(0, EXIT_PREEMPTED), grows and not told
    return _judged(_cause(endings) or Ending(0, 1), endings, bool(told)), grows


def _for_another(ending: Ending) -> bool:
    """Whether a host may have ended because another one is gone: JAX aborts those that miss its coordinator."""
    return ending.missed is not None or ending.status == -signal.SIGABRT


def _died(ending: Ending, endings: Sequence[Ending]) -> Ending | None:
    """Of the endings, that for which this one was: of the host that it names, or of one that was killed."""
    if not _for_another(ending):
        return None
    bad = _bad_by_themselves(endings)
    named = [each for each in bad if ending.missed is not None and each.host == ending.missed.host]
    return next(iter(named or [each for each in bad if each.status < 0]), None)


def _failed(ending: Ending, endings: Sequence[Ending]) -> Ending | None:
    """The first that failed by itself, where JAX has aborted this one, which names nobody, and no host was killed."""
    aborted = _for_another(ending) and ending.missed is None
    return next(iter(_bad_by_themselves(endings)), None) if aborted else None


def _bad_by_themselves(endings: Sequence[Ending]) -> list[Ending]:
    good = (0, EXIT_PREEMPTED, EXIT_USER_ERROR)
    return [each for each in endings if not _for_another(each) and (each.out_of_sight or each.status not in good)]


def _judged(cause: Ending, endings: Sequence[Ending], told: bool) -> Ending:
    """What was lost sight of has saved only if one that was not has: else it is as good as killed."""
    saved = any(ending.status == EXIT_PREEMPTED and not ending.out_of_sight for ending in endings)
    return dataclasses.replace(cause, status=-signal.SIGKILL) if cause.out_of_sight and not (saved or told) else cause


def _cause(endings: Sequence[Ending]) -> Ending | None:
    """The first ending that was not a good one: what comes after it may be for its sake. Else the first one."""
    return next((ending for ending in endings if ending.status != 0), endings[0] if endings else None)
