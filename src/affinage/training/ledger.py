"""Where the seconds of a run went, every one of them in one account."""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

# lost: work that was done and not saved, before a kill or a rewind. paused: between two starts. idle: what is none of
# the others, such as opening files.
ACCOUNTS = ("compute", "compile", "data", "validation", "save", "restore", "lost", "paused", "idle")


class Ledger:
    """Seconds by account, over all starts of a run. The clock never stands: at any moment one account is running."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(ACCOUNTS, 0.0)
        self._stalls: list[float] = []
        self._running, self._since = "idle", time.perf_counter()

    @property
    def running(self) -> str:
        """The account that time goes to now."""
        return self._running

    @property
    def training(self) -> float:
        """Seconds of the steps, with those in which the devices waited for data."""
        self._turn(self._running)
        return self._seconds["compute"] + self._seconds["data"]

    def carry(self, earlier: Mapping[str, float], stalls: list[float]) -> None:
        """Add the accounts of the starts before this one, and how long each save stalled the loop."""
        for account, seconds in earlier.items():
            if account in self._seconds:
                self._seconds[account] += seconds
        self._stalls = [*stalls, *self._stalls]

    def book(self, account: str, seconds: float) -> None:
        """Add seconds that were not measured here."""
        self._seconds[account] += seconds

    def move(self, seconds: float, source: str, target: str) -> None:
        """Take seconds from one account to another."""
        self._turn(self._running)
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def lose_since(self, earlier: Mapping[str, float]) -> None:
        """What came after `earlier`, the accounts of a checkpoint, was for nothing."""
        self._turn(self._running)
        for account in ("compute", "data", "validation", "save"):
            self.move(self._seconds[account] - earlier.get(account, 0.0), account, "lost")

    @contextlib.contextmanager
    def account(self, name: str) -> Iterator[None]:
        """The time inside goes to this account, but for what is inside of another one in it."""
        before = self._turn(name)
        try:
            yield
        finally:
            self._turn(before)

    @contextlib.contextmanager
    def stall(self) -> Iterator[None]:
        """The time inside is that for which a save stalls the loop."""
        start = time.perf_counter()
        with self.account("save"):
            yield
        self._stalls.append(round(time.perf_counter() - start, 6))

    @property
    def stalls(self) -> list[float]:
        """Seconds for which each save stalled the loop."""
        return list(self._stalls)

    def rounded(self) -> dict[str, float]:
        """The accounts and their total, in seconds."""
        self._turn(self._running)
        return {name: round(s, 3) for name, s in {**self._seconds, "total": sum(self._seconds.values())}.items()}

    def _turn(self, account: str) -> str:
        now = time.perf_counter()
        self._seconds[self._running] += now - self._since
        before, self._running, self._since = self._running, account, now
        return before


class LifeSign:
    """A file whose time of change says when a run was last alive, so that its next start knows what was lost.

    Without a path, as on all hosts but the first, nothing is said and nothing known.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        now = self._now = time.time()
        self.before: float | None = None  # seconds since 1970; None at the first start
        self.began = now
        if path is None:
            return
        try:
            self.before = path.stat().st_mtime
            self.began = float(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self.before = None
            path.write_text(f"{now:.3f}\n", encoding="utf-8")
        self.show()

    def show(self) -> None:
        """Say that the run is alive."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                os.utime(self._path)

    def book(self, ledger: Ledger, saved: float | None) -> None:
        """Book what was lost since the state was saved that this start goes on from, and the time between the starts.

        Args:
            ledger: of this start, which began when this object was made.
            saved: seconds since 1970; None if it goes on from the beginning.
        """
        if self._path is None:
            return
        # Of a state that was saved on another machine nobody here knows when that died.
        before = saved if self.before is None else self.before
        if before is not None:
            last = min(before, self._now)
            ledger.book("lost", max(0.0, last - (self.began if saved is None else saved)))
            ledger.book("paused", self._now - last)
