"""What a host says of another one that keeps it waiting, and how whoever watches over both reads it in its output."""

import re
from typing import NamedTuple

from affinage.stopping import STOPPED

_GONE, _BEHIND, _MUTE, _SILENT = "is gone", "is behind", "does not answer", "shows no sign of life"
_BEFORE = "before its first sign"


class Missed(NamedTuple):
    """A host for whose sake another one leaves."""

    host: int
    how: str  # as the other one says it, such as "is gone"


def gone(host: int, reason: str = "") -> str:
    """It is dead, or taken for it."""
    return f"host {host} {_GONE}" + (f": {reason}" if reason else "")


def mute(host: int) -> str:
    """It is asked, and says nothing."""
    return f"host {host} {_MUTE}"


def silent(host: int, last: str) -> str:
    """It says nothing by itself; `last` is from `at`."""
    return f"host {host} {_SILENT}, last {last}"


def behind(host: int, now: str) -> str:
    """It has not come as far as others; `now` is from `at`."""
    return f"host {host} {_BEHIND}, {now}"


def waited_for(host: int, now: str) -> str:
    """It is as far as the others, and works; `now` is from `at`."""
    return f"host {host} is {now}"


def at(what: str, where: str) -> str:
    """What a host does, and in which line."""
    return f"at {what} ({where})"


def at_nothing_yet() -> str:
    """It has said nothing since it began."""
    return _BEFORE


_HOST = r"host (?P<host>\d+) "
# "Stopped: host 1 is gone", "Stopped: NAME: step 7 has not ended for 27 s: host 1 is behind, at step 6",
# "Stopped: NAME: step 7 has not ended for 27 s, and host 1 shows no sign of life"
_HOW = "|".join((_GONE, _BEHIND, _MUTE, _SILENT))
_SAID = re.compile(rf"(?:{STOPPED}(?:.*?(?:: |, and ))?)?{_HOST}(?P<how>{_HOW})\b")
# "Stopped: NAME: the save has not ended for 540 s: host 1 is at the save (write, x.py:3)"; of several none is missed
_WAITED_FOR = re.compile(rf"{STOPPED}(?!.*; host \d).*?: {_HOST}(?P<how>is (?:{_BEFORE}|at .+?(?= \()))")


def missed_by(line: str) -> Missed | None:
    """The host for whose sake another one leaves, where a line of that one's output says so."""
    found = _SAID.match(line) or _WAITED_FOR.match(line)
    return None if found is None else Missed(int(found["host"]), found["how"])
