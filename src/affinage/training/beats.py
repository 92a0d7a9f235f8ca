"""What every host is at, said by each once a second, so that one that is stuck can be named."""

import json
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from typing import Any

from affinage.hardware.hosts import HostLost, Hosts

_EVERY = 1.0  # seconds
_BETWEEN_LOOKS = 3.0  # seconds in which a host that lives has said something new
_ANSWER = 5.0  # seconds for the first host, who keeps what is said, to answer
_FOLDER = "affinage/beat"
_OTHERS = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))


class Beats:
    """Tells the other hosts what this one is at.

    Args:
        hosts: of the run.
        doing: how many things this host has begun, and what the last one is; counted alike on all hosts.
    """

    def __init__(self, hosts: Hosts, doing: Callable[[], tuple[int, str]]) -> None:
        self._hosts, self._doing = hosts, doing
        self._ended = threading.Event()
        if hosts.count > 1:
            threading.Thread(target=self._beat, name="beats", daemon=True).start()

    def close(self) -> None:
        """Say no more."""
        self._ended.set()

    def _beat(self) -> None:
        number = 0
        while not self._ended.wait(_EVERY):
            number += 1
            count, what = self._doing()
            said = {"beat": number, "count": count, "what": what, "where": _where()}
            try:
                self._hosts.tell(f"{_FOLDER}/{self._hosts.index}", json.dumps(said), anew=True)
            except HostLost:
                return

    def blame(self) -> str:
        """Which hosts keep the others waiting, in words; "" for a run with one host. Takes some seconds."""
        if self._hosts.count == 1:
            return ""
        before = self._look()
        time.sleep(_BETWEEN_LOOKS)
        now = self._look()
        if before is None or now is None:
            return "host 0 does not answer"
        silent = [host for host in now if now[host].get("beat") == before[host].get("beat")]
        most = max(beat.get("count", 0) for beat in now.values())
        behind = [host for host in now if now[host].get("count", 0) < most and host not in silent]
        told = [f"host {host} shows no sign of life, last {_told(now[host])}" for host in silent]
        told += [f"host {host} is behind, {_told(now[host])}" for host in behind]
        return "; ".join(told or [f"host {host} is {_told(now[host])}" for host in now])

    def _look(self) -> dict[int, dict[str, Any]] | None:
        """The latest word of every host; None if the first does not answer."""
        found: list[dict[str, str]] = []
        asking = threading.Thread(target=lambda: found.append(self._hosts.told(_FOLDER)), daemon=True)
        asking.start()
        asking.join(_ANSWER)
        if not found:
            return None
        return {host: json.loads(found[0].get(str(host), "{}")) for host in range(self._hosts.count)}


def _told(beat: dict[str, Any]) -> str:
    return f"at {beat['what']} ({beat['where']})" if beat else "before its first sign"


def _where() -> str:
    """The innermost line of ours, or of the user's, that the main thread is at."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and not _ours(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "nowhere"
    return f"{frame.f_code.co_name}, {frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def _ours(file: str) -> bool:
    return "/affinage/" in file or not file.startswith((*_OTHERS, "<"))
