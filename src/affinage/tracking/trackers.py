"""From the loop to the trackers: each has a thread and a bounded queue, and fails or hangs by itself."""

import contextlib
import importlib.util
import inspect
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, TypeVar

from affinage.errors import Preempted, UserError, did_you_mean, first_line
from affinage.secrets import masked

FILE = "trackers.json"  # in the folder of the training: the id of its run in each tracker
_WHEN_PREEMPTED = 5.0  # seconds at the end

Ending = Literal["finished", "stopped", "failed"]  # done; preempted, and to be resumed; by an error
Row = Mapping[str, Any]  # a line of metrics.jsonl
T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True)
class TrackedRun:
    """A training, as trackers see it."""

    name: str  # of the training, e.g. pretrain
    id: str = ""  # what `start` returned at the training's first start; "" at the first
    start: int = 0  # the step that it resumes from
    facts: Mapping[str, Any] = field(default_factory=dict)  # JSON-able: settings, mesh, versions


class Tracker(Protocol):
    """Takes the metrics of one training. All calls come from one thread, which may wait as long as it likes.

    What a method raises is reported once, and the training continues.
    """

    def start(self, run: TrackedRun) -> str:
        """Begin, or resume what is called `run.id`. Returns the id to resume with."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the metrics of a step. A step that is done again after a kill comes again, with the same values."""
        ...

    def finish(self, ending: Ending) -> None:
        """Write out what is left."""
        ...


_own: dict[str, Callable[..., Tracker]] = {}


def tracker(name: str) -> Callable[[T], T]:
    """Register a class with the methods of `Tracker`; its options in a recipe are its keyword arguments."""

    def add(made_by: T) -> T:
        _own[name] = made_by
        return made_by

    return add


def check_trackers(trackers: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that the trackers are known and installed, and have their options. Raises UserError."""
    from affinage.tracking.libraries import LIBRARIES, PACKAGES

    known = {**LIBRARIES, **_own}
    for name, options in trackers.items():
        where = f"runtime.trackers.{name}"
        if name not in known:
            fix = did_you_mean(name, known) or "Name the file that registers it in `plugins`."
            raise UserError(f"there is no tracker `{name}`", where=where, fix=fix)
        parameters = [each for each in inspect.signature(known[name]).parameters if each != "name"]
        for option in options:
            if option not in parameters:
                fix = did_you_mean(option, parameters) or f"It has {', '.join(parameters)}."
                raise UserError(f"the tracker {name} has no option `{option}`", where=where, fix=fix)
        if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
            what = f"the tracker {name} needs the package `{PACKAGES[name]}`"
            raise UserError(what, where=where, fix=f"Install it: pip install 'affinage[{name}]'")


def trackers_of(
    trackers: Mapping[str, Mapping[str, Any]], *, recipe: str, training: str, runs: Path
) -> dict[str, Callable[[], Tracker]]:
    """Return what makes each tracker, by name.

    Args:
        trackers: the options of each, by its name.
        recipe: the name of the recipe.
        training: the step.
        runs: the folder of all runs.

    Raises:
        UserError: there is no such tracker, or it has no such option.
    """
    from affinage.tracking.libraries import LIBRARIES, defaults

    check_trackers(trackers)
    given = {
        name: {"name": f"{recipe}/{training}", **found} for name, found in defaults(recipe, runs.absolute()).items()
    }
    return {
        name: partial(LIBRARIES[name], **{**given[name], **options})
        if name in LIBRARIES
        else partial(_own[name], **options)
        for name, options in trackers.items()
    }


class Trackers:
    """The trackers of a training. While entered, `log` hands lines over, which takes microseconds.

    A tracker that fails, hangs or is too slow is reported once. One that the training has no id of yet gets the lines
    of earlier starts, too.

    Args:
        makers: by name; each is called in the tracker's own thread, as it may import much.
        run: as trackers see it.
        folder: of the training; the ids are kept there.
        before: the lines of metrics.jsonl up to the step that the training resumes from.
        say: takes lines for the user.
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
        self.run, self.before, self.say, self.waiting = run, before, say, waiting
        self._file, self._ids, self._close_seconds = folder / FILE, threading.Lock(), close_seconds
        self._threads = [_Delivery(name, make, self) for name, make in makers.items()]

    def __enter__(self) -> "Trackers":
        for each in self._threads:
            each.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ending: Ending = "finished" if kind is None else "stopped" if issubclass(kind, Preempted) else "failed"
        seconds = min(self._close_seconds, _WHEN_PREEMPTED) if ending == "stopped" else self._close_seconds
        until = time.monotonic() + seconds
        for each in self._threads:
            each.ending = ending
        for each in self._threads:
            each.join(max(0.0, until - time.monotonic()))
            if each.is_alive():
                each.report("does not finish; it is left behind")

    def log(self, row: Row) -> None:
        """Hand over a line of metrics.jsonl."""
        for each in self._threads:
            each.put(row)

    def ids(self, **new: str) -> dict[str, str]:
        """The id of the training's run in each tracker, after adding a new one."""
        with self._ids:
            found: dict[str, str] = {}
            with contextlib.suppress(OSError, ValueError, TypeError):
                found = dict(json.loads(self._file.read_text(encoding="utf-8")))
            if new:
                part = self._file.with_suffix(".part")
                part.write_text(json.dumps({**found, **new}, indent=1) + "\n", encoding="utf-8")
                part.replace(self._file)
        return {**found, **new}


class _Delivery(threading.Thread):
    """The thread of one tracker."""

    def __init__(self, name: str, make: Callable[[], Tracker], all_trackers: Trackers) -> None:
        super().__init__(name=f"tracker {name}", daemon=True)
        self._tracker, self._make, self._all = name, make, all_trackers
        self._queue: queue.Queue[Row] = queue.Queue(all_trackers.waiting)
        self._reported = False
        self.ending: Ending | None = None

    def put(self, row: Row) -> None:
        try:
            if self.is_alive():
                self._queue.put_nowait(row)
        except queue.Full:
            self.report(f"is slower than the training: it loses lines, {self._queue.maxsize:,} wait for it")

    def run(self) -> None:
        tracker, known = None, self._all.ids().get(self._tracker, "")
        with self._reporting():
            made = self._make()
            self._all.ids(**{self._tracker: made.start(replace(self._all.run, id=known))})
            tracker = made
        if tracker is None:
            return
        for row in () if known else self._all.before:
            self._log(tracker, row)
        while self.ending is None or not self._queue.empty():
            with contextlib.suppress(queue.Empty):
                self._log(tracker, self._queue.get(timeout=0.1))
        with self._reporting():
            tracker.finish(self.ending)

    def _log(self, tracker: Tracker, row: Row) -> None:
        with self._reporting():
            tracker.log(row["step"], metrics_of(row))

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # SystemExit, too: some libraries exit where there is no key
            self.report(f"fails: {type(error).__name__}: {first_line(error)}")

    def report(self, what: str) -> None:
        if not self._reported:
            self._reported = True
            line = f"the tracker {self._tracker} {what}. The training continues; metrics.jsonl has every line."
            self._all.say(masked(line))


def metrics_of(row: Row) -> dict[str, float]:
    """The numbers of a line of metrics.jsonl by the names that trackers show: train/loss, validation/NAME/loss."""
    part = next((part for part in ("validation", "evaluation") if part in row), "")
    numbers = _numbers(row[part], part) if part else _numbers(row, "train")
    return {name: value for name, value in numbers if name != "train/step"}


def _numbers(values: Row, path: str) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{path}/{name}")
        elif isinstance(value, int | float):
            yield f"{path}/{name}", float(value)
