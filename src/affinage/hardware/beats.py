"""What every host is at, said by each once a second, so that one that is stuck can be named."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from affinage.hardware import missed
from affinage.hardware.hosts import HostLost, Hosts
from affinage.hardware.movement import is_waiting
from affinage.hardware.stacks import where

AHEAD = 5.0  # seconds before the others are to be named that a host begins to look at what they say
# Seconds in which a host that lives has said something new where nothing is late yet, as in a compilation that keeps
# all processors busy. JAX ends all hosts after 45.
SILENT_FOR_LONG = 10.0
_FOLDER = "affinage/beat"
_FIRST = "affinage/beat of the first"  # for those who look at it alone


class Doing(NamedTuple):
    """What a host is at."""

    begun: int  # how many things, counted alike on all hosts
    what: str  # the last of them
    late: bool  # it may soon have to be said who keeps it waiting
    still: float = 0.0  # seconds for which it has done nothing, and waits for nobody
    waits: bool = False  # for the first host, the only one that it then looks at


class _Seen(NamedTuple):
    """What a host said last, and since when it says nothing else."""

    said: str
    since: float

    @property
    def beat(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.said)
        return found


class Beats:
    """Tells the other hosts what this one is at, and looks at what they are at where they keep it waiting.

    Looking begins some seconds before anybody has to be named, so that naming takes no time. It is not done always,
    as what all hosts say to all grows with the square of their number.

    Args:
        hosts: of the run.
        doing: says what this one is at.
        every: seconds between two signs of life.
        patience: seconds in which a host that lives has said something new, and the first one has answered.
    """

    def __init__(self, hosts: Hosts, doing: Callable[[], Doing], *, every: float = 1.0, patience: float = 3.0) -> None:
        self._hosts, self._doing, self._every, self._patience = hosts, doing, every, patience
        self._ended = threading.Event()
        self._asked: float | None = None  # when the first host was asked what it has not answered yet
        self._seen: dict[int, _Seen] = {}
        self._looks_since: float | None = None
        self._looked = 0.0
        if hosts.count > 1:
            threading.Thread(target=self._beat, name="beats", daemon=True).start()

    def close(self) -> None:
        """Say no more."""
        self._ended.set()

    def _beat(self) -> None:
        number = 0
        while not self._ended.wait(self._every):
            number += 1
            doing, self._asked = self._doing(), self._asked or time.monotonic()
            beat = {"beat": number, "count": doing.begun, "what": doing.what, "where": where(), "still": doing.still}
            said = json.dumps(beat | {"waits": is_waiting()})
            # JAX ends the process when the first host stays away; one that comes back is beaten to again.
            with contextlib.suppress(HostLost):
                self._hosts.tell(f"{_FOLDER}/{self._hosts.index}", said, anew=True)
                if self._hosts.first:
                    self._hosts.tell(f"{_FIRST}/0", said, anew=True)
                if doing.late:
                    self._look(self._hosts.told(_FOLDER), range(self._hosts.count))
                elif doing.waits:
                    self._look(self._hosts.told(_FIRST), range(1))
                else:
                    self._looks_since, self._seen = None, {}
                self._asked = None

    def _look(self, told: Mapping[str, str], hosts: range) -> None:
        """Note what these hosts say, and since when."""
        now, before = time.monotonic(), self._seen if self._looks_since is not None else {}
        seen = {}
        for host in hosts:
            said = told.get(str(host), "{}")
            known = before.get(host)
            seen[host] = known if known is not None and known.said == said else _Seen(said, now)
        self._seen = seen
        self._looks_since, self._looked = self._looks_since or now, now

    def blame(self) -> str:
        """Which hosts keep the others waiting, in words; "" for a run with one host.

        Waits until there was time for a sign of life, where this host has not said early enough that it is late.
        """
        until = time.monotonic() + 2 * AHEAD
        while self._hosts.count > 1 and time.monotonic() < until:
            asked, looked, since = self._asked, self._looked, self._looks_since
            if asked is not None and time.monotonic() - asked >= self._patience:
                return missed.mute(0)
            # While the first one has yet to answer, what the others say now is not known.
            if asked is None and since is not None and looked - since >= self._patience:
                return self._in_words(looked)
            if self._ended.wait(0.05):
                break
        return ""

    def silent(self) -> str:
        """Which hosts show no sign of life, in words; "" where this one sees none, or has not looked long enough."""
        return self._silent_for(SILENT_FOR_LONG)

    def lost(self, seconds: float) -> str:
        """`silent`, where it is so for as many seconds, too."""
        return self._silent_for(max(seconds, SILENT_FOR_LONG))

    def first_stands_still(self, seconds: float) -> str:
        """What the first host is at, if it says that it does nothing for so long; else ""."""
        seen = self._seen.get(0)
        first = {} if seen is None else seen.beat
        return missed.waited_for(0, _told(first)) if first.get("still", 0.0) >= seconds else ""

    def _silent_for(self, seconds: float) -> str:
        asked = self._asked
        if asked is not None and time.monotonic() - asked >= seconds:
            return missed.mute(0)
        looked, seen = self._looked, self._seen  # its thread may forget them meanwhile
        return "; ".join(_no_sign_of(host, seen[host]) for host in _silent(seen, looked, seconds))

    def _in_words(self, looked: float) -> str:
        seen = self._seen
        beats = {host: found.beat for host, found in seen.items()}
        silent = _silent(seen, looked, self._patience)
        most = max((beat.get("count", 0) for beat in beats.values()), default=0)
        behind = [host for host, beat in beats.items() if beat.get("count", 0) < most and host not in silent]
        told = [_no_sign_of(host, seen[host]) for host in silent]
        told += [missed.behind(host, _told(beats[host])) for host in behind]
        at_work = [host for host, beat in beats.items() if not beat.get("waits")] or list(beats)
        return "; ".join(told or [missed.waited_for(host, _told(beats[host])) for host in at_work])


def _silent(seen: Mapping[int, _Seen], looked: float, seconds: float) -> list[int]:
    return [host for host, found in seen.items() if looked - found.since >= seconds]


def _no_sign_of(host: int, seen: _Seen) -> str:
    return missed.silent(host, _told(seen.beat))


def _told(beat: dict[str, Any]) -> str:
    return missed.at(beat["what"], beat["where"]) if beat else missed.at_nothing_yet()
