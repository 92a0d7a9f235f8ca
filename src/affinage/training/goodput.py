"""Where the seconds of a run went: every one of them is in one account."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# lost: work that was done and not saved, before a kill or a rollback. paused: between two starts. idle: all the rest,
# such as opening files.
ACCOUNTS = ("compute", "compile", "data", "validation", "save", "restore", "lost", "paused", "idle")


class GoodputTimer:
    """Seconds by account, over all starts of a run. The clock never stops: at any moment one account is running.

    Args:
        written: a file that the training writes to; its time of change says when the start before this one ended.
    """

    def __init__(self, written: Path | None = None) -> None:
        self._seconds = dict.fromkeys(ACCOUNTS, 0.0)
        self._running, self._since, self._started = "idle", time.perf_counter(), time.time()
        self._last = written.stat().st_mtime if written is not None and written.exists() else 0.0

    def resume(self, meta: Mapping[str, Any]) -> None:
        """Add the accounts of the starts before this one, as the checkpoint that was restored has them.

        What was done after it is `lost`.
        """
        for account, seconds in meta.get("seconds", {}).items():
            self._seconds[account] += seconds
        if (saved := meta.get("clock")) is not None:
            last = max(saved, min(self._last, self._started))
            self._seconds["lost"] += last - saved
            self._seconds["paused"] += self._started - last

    @contextlib.contextmanager
    def account(self, name: str) -> Iterator[None]:
        """Inside, the time goes to this account, except for what is inside of another one in it."""
        before = self._running
        self._switch(name)
        try:
            yield
        finally:
            self._switch(before)

    def move(self, seconds: float, source: str, target: str) -> None:
        """Take seconds from one account to another."""
        self._switch(self._running)
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def lose_since(self, meta: Mapping[str, Any]) -> None:
        """Account for a rollback to the checkpoint with these facts: what came after it was for nothing."""
        for account in ("compute", "data", "validation", "save"):
            self.move(self.seconds()[account] - meta.get("seconds", {}).get(account, 0.0), account, "lost")

    def seconds(self) -> dict[str, float]:
        """The accounts, rounded."""
        self._switch(self._running)
        return {name: round(seconds, 3) for name, seconds in self._seconds.items()}

    @property
    def goodput(self) -> float:
        """The share of all seconds since the first start in which the devices computed steps that count."""
        self._switch(self._running)
        return self._seconds["compute"] / max(sum(self._seconds.values()), 1e-9)

    def _switch(self, account: str) -> None:
        now = time.perf_counter()
        self._seconds[self._running] += now - self._since
        self._running, self._since = account, now
