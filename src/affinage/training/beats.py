"""What every host is at, said by each once a second, so that one that is stuck can be named."""

import contextlib
import gc
import json
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NamedTuple

from affinage.hardware.hosts import HostLost, Hosts

AHEAD = 5.0  # seconds before the others are to be named that a host begins to look at what they say
_EVERY = 1.0  # seconds
_SILENT = 3.0  # seconds in which a host that lives has said something new, and the first one has answered
# The same where nothing is late yet, as in a compilation that keeps all processors busy. JAX ends all hosts after 45.
_SILENT_FOR_LONG = 10.0
_FOLDER = "affinage/beat"
_OTHERS = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))


class Doing(NamedTuple):
    """What a host is at."""

    begun: int  # how many things, counted alike on all hosts
    what: str  # the last of them
    late: bool  # it may soon have to be said who keeps it waiting


class _Seen(NamedTuple):
    """What a host said last, and since when it says nothing else."""

    said: dict[str, Any]
    since: float


class Beats:
    """Tells the other hosts what this one is at, and looks at what they are at where they keep it waiting.

    Looking begins some seconds before anybody has to be named, so that naming takes no time. It is not done always,
    as what all hosts say to all grows with the square of their number.
    """

    def __init__(self, hosts: Hosts, doing: Callable[[], Doing]) -> None:
        self._hosts, self._doing = hosts, doing
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
        while not self._ended.wait(_EVERY):
            number += 1
            doing, self._asked = self._doing(), self._asked or time.monotonic()
            said = {"beat": number, "count": doing.begun, "what": doing.what, "where": _where()}
            # JAX ends the process when the first host stays away; one that comes back is beaten to again.
            with contextlib.suppress(HostLost):
                self._hosts.tell(f"{_FOLDER}/{self._hosts.index}", json.dumps(said), anew=True)
                if doing.late:
                    self._look(self._hosts.told(_FOLDER))
                else:
                    self._looks_since = None
                self._asked = None

    def _look(self, told: Mapping[str, str]) -> None:
        """Note what every host says, and since when."""
        now, before = time.monotonic(), self._seen if self._looks_since is not None else {}
        seen = {}
        for host in range(self._hosts.count):
            said = json.loads(told.get(str(host), "{}"))
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
            if asked is not None and time.monotonic() - asked >= _SILENT:
                return "host 0 does not answer"
            # While the first one has yet to answer, what the others say now is not known.
            if asked is None and since is not None and looked - since >= _SILENT:
                return self._in_words(looked)
            if self._ended.wait(0.05):
                break
        return ""

    def silent(self) -> str:
        """Which hosts show no sign of life, in words; "" where this one sees none, or has not looked long enough."""
        asked, looked, since = self._asked, self._looked, self._looks_since
        if asked is not None and time.monotonic() - asked >= _SILENT_FOR_LONG:
            return "host 0 does not answer"
        if asked is not None or since is None:
            return ""
        return "; ".join(self._no_sign_of(host) for host in self._silent(looked, _SILENT_FOR_LONG))

    def _silent(self, looked: float, seconds: float) -> list[int]:
        return [host for host, seen in self._seen.items() if looked - seen.since >= seconds]

    def _no_sign_of(self, host: int) -> str:
        return f"host {host} shows no sign of life, last {_told(self._seen[host].said)}"

    def _in_words(self, looked: float) -> str:
        seen = self._seen
        silent = self._silent(looked, _SILENT)
        most = max(seen[host].said.get("count", 0) for host in seen)
        behind = [host for host in seen if seen[host].said.get("count", 0) < most and host not in silent]
        told = [self._no_sign_of(host) for host in silent]
        told += [f"host {host} is behind, {_told(seen[host].said)}" for host in behind]
        return "; ".join(told or [f"host {host} is {_told(seen[host].said)}" for host in seen])


def _told(beat: dict[str, Any]) -> str:
    return f"at {beat['what']} ({beat['where']})" if beat else "before its first sign"


def _frames() -> dict[int, FrameType]:
    """What each thread is at.

    Python 3.11 holds a lock meanwhile that each new thread needs. A collection in the midst of it, which lets others
    run, would stop the process for good (python/cpython#106883), so there is none.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def _where() -> str:
    """The innermost line of ours, or of the user's, that the main thread is at."""
    frame = _frames().get(threading.main_thread().ident or 0)
    while frame is not None and not _ours(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "nowhere"
    return f"{frame.f_code.co_name}, {frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def _ours(file: str) -> bool:
    return "/affinage/" in file or not file.startswith((*_OTHERS, "<"))
