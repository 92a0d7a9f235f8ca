"""From the loop to the trackers: each has a thread and a queue that forgets rather than fills up."""

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from affinage.errors import Preempted
from affinage.secrets import masked
from affinage.tracking.tracker import Ending, TrackedRun, Tracker, metrics_of

FILE = "trackers.json"  # in the folder of the training: the id of its run in each tracker

_WHEN_STOPPED = 5.0  # seconds

Row = Mapping[str, Any]  # a line of metrics.jsonl


class Trackers:
    """The trackers of a training. While entered, lines are handed over by `log`, which takes microseconds.

    A tracker that fails or hangs, at its start, in between or at its end, is told of once by `say`. One that the
    training has no id of yet gets the lines before, too.

    Args:
        makers: by name; each is called in the tracker's own thread, as it may import much.
        run: as it is told to trackers.
        folder: of the training; its ids are kept there.
        before: the lines of metrics.jsonl up to the step that the training goes on from.
        say: tells the user.
        waiting: the most lines that wait for a tracker; it loses those beyond.
        close_seconds: the time at the end, for all trackers together.
    """

    def __init__(
        self,
        makers: Mapping[str, Callable[[], Tracker]],
        run: TrackedRun,
        folder: Path,
        *,
        before: Sequence[Row],
        say: Callable[[str], None],
        waiting: int = 1000,
        close_seconds: float = 30.0,
    ) -> None:
        self._close_seconds = close_seconds
        ids = _Ids(folder / FILE)
        self._deliveries = [
            _Delivery(name, make, run, ids, before=before, say=say, most=waiting) for name, make in makers.items()
        ]

    def __enter__(self) -> "Trackers":
        for each in self._deliveries:
            each.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ending: Ending = "finished" if kind is None else "stopped" if issubclass(kind, Preempted) else "failed"
        # Who was told to stop has little time left.
        seconds = min(self._close_seconds, _WHEN_STOPPED) if ending == "stopped" else self._close_seconds
        until = time.monotonic() + seconds
        for each in self._deliveries:
            each.end(ending)
        for each in self._deliveries:
            each.wait(max(0.0, until - time.monotonic()))

    def log(self, row: Row) -> None:
        """Hand over a line of metrics.jsonl."""
        for each in self._deliveries:
            each.put(row)


class _Ids:
    """The ids of a training's runs, in a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = {}
        self.known: dict[str, str] = (
            {n: i for n, i in found.items() if isinstance(i, str)} if isinstance(found, dict) else {}
        )

    def keep(self, name: str, given: str) -> None:
        with self._lock:
            if self.known.get(name) != given:
                self.known[name] = given
                part = self._path.with_suffix(".part")
                part.write_text(json.dumps(self.known, indent=1) + "\n", encoding="utf-8")
                part.replace(self._path)


class _Delivery:
    """One tracker's thread."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Tracker],
        run: TrackedRun,
        ids: _Ids,
        *,
        before: Sequence[Row],
        say: Callable[[str], None],
        most: int,
    ) -> None:
        self._name, self._make, self._run, self._ids = name, make, run, ids
        self._before = () if name in ids.known else tuple(before)
        self._say = say
        self._queue: queue.Queue[Row] = queue.Queue(most)
        self._ending: Ending | None = None
        self._told = False
        self._arrived = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, row: Row) -> None:
        try:
            self._queue.put_nowait(row)
        except queue.Full:
            self._tell(f"is slower than the training: it does not get all lines, of which {self._queue.maxsize:,} wait")

    def end(self, ending: Ending) -> None:
        self._ending = ending

    def wait(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._tell("does not come to its end; it is left behind")

    def _work(self) -> None:
        try:
            tracker = self._make()
            started = tracker.start(
                TrackedRun(self._run.name, self._ids.known.get(self._name, ""), self._run.start, self._run.facts)
            )
            self._ids.keep(self._name, started)
        except BaseException as error:  # SystemExit, too: some libraries leave where there is no key
            self._failed(error)
            self._drain()
            return
        for row in self._before:
            self._log(tracker, row)
        while (line := self._next()) is not None:
            self._log(tracker, line)
        try:
            tracker.finish(self._ending or "stopped")
        except BaseException as error:
            self._failed(error)

    def _next(self) -> Row | None:
        """The next line; None when there are no more."""
        while True:
            try:
                return self._queue.get(timeout=0.1)
            except queue.Empty:
                if self._ending is not None:
                    return None

    def _log(self, tracker: Tracker, row: Row) -> None:
        try:
            tracker.log(row["step"], metrics_of(row))
        except BaseException as error:
            self._failed(error)

    def _drain(self) -> None:
        while self._next() is not None:
            pass

    def _failed(self, error: BaseException) -> None:
        lines = str(error).strip().splitlines()
        self._tell(f"fails: {type(error).__name__}: {lines[0][:500] if lines else ''}".rstrip(": "))

    def _tell(self, what: str) -> None:
        if not self._told:
            self._told = True
            self._say(masked(f"the tracker {self._name} {what}. The training goes on; metrics.jsonl has every line."))
