"""From the loop to the trackers: each has a thread and a bounded queue, and fails or hangs by itself."""

import importlib.util
import inspect
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, TypeVar

from affinage.errors import Preempted, UserError, did_you_mean, first_line
from affinage.secrets import masked

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
    """Takes the metrics of one training, all from one thread. What a method raises is reported once.

    `start` begins, or resumes what is called `run.id`, and returns the id to resume with. A step that is done again
    after a kill is logged again, with the same values.
    """

    def start(self, run: TrackedRun) -> str: ...  # noqa: D102

    def log(self, step: int, values: Mapping[str, float]) -> None: ...  # noqa: D102

    def finish(self, ending: Ending) -> None: ...  # noqa: D102


_plugins: dict[str, Callable[..., Tracker]] = {}


def tracker(name: str) -> Callable[[T], T]:
    """Register a class with the methods of `Tracker`; its options in a recipe are its keyword arguments."""

    def add(maker: T) -> T:
        _plugins[name] = maker
        return maker

    return add


def trackers_of(
    trackers: Mapping[str, Mapping[str, Any]], *, recipe: str, training: str, runs: Path
) -> dict[str, Callable[[], Tracker]]:
    """Return what makes each tracker, by name; UserError for one that is unknown, not installed or has no such option.

    `runs` is the folder of all runs.
    """
    from affinage.tracking.libraries import LIBRARIES, PACKAGES

    makers: dict[str, Callable[[], Tracker]] = {}
    for name, options in trackers.items():
        where = f"runtime.trackers.{name}"
        maker = LIBRARIES.get(name) or _plugins.get(name)
        if maker is None:
            fix = did_you_mean(name, [*LIBRARIES, *_plugins]) or "Name the file that registers it in `plugins`."
            raise UserError(f"there is no tracker `{name}`", where=where, fix=fix)
        if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
            what = f"the tracker {name} needs the package `{PACKAGES[name]}`"
            raise UserError(what, where=where, fix=f"Install it: pip install 'affinage[{name}]'")
        own = {"name": f"{recipe}/{training}", "recipe": recipe, "runs": runs.absolute()} if name in LIBRARIES else {}
        try:
            inspect.signature(maker).bind(**own, **options)
        except TypeError as error:
            fix = f"Its options: {', '.join(each for each in inspect.signature(maker).parameters if each not in own)}."
            raise UserError(f"the tracker {name} {error}", where=where, fix=fix) from None
        makers[name] = partial(maker, **own, **options)
    return makers


class Trackers:
    """The trackers of a training. While entered, `log` hands lines over, which takes microseconds.

    Args:
        makers: by name; each is called in the tracker's own thread, as it may import much.
        run: as trackers see it.
        folder: of the training; the ids are kept there, in `tracker-NAME.id`.
        say: takes lines for the user: a tracker that fails, hangs or is too slow is reported once.
        waiting: the most lines that wait for a tracker; it loses those beyond.
        close_seconds: the time at the end, for all trackers together.
    """

    def __init__(
        self,
        makers: Mapping[str, Callable[[], Tracker]],
        run: TrackedRun,
        folder: Path,
        *,
        say: Callable[[str], None],
        waiting: int = 1000,
        close_seconds: float = 30.0,
    ) -> None:
        self.run, self.folder, self.say, self._waiting, self._close_seconds = run, folder, say, waiting, close_seconds
        self._threads = [_Delivery(name, maker, self) for name, maker in makers.items()]

    def __enter__(self) -> "Trackers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ending: Ending = "finished" if kind is None else "stopped" if issubclass(kind, Preempted) else "failed"
        seconds = min(self._close_seconds, _WHEN_PREEMPTED) if ending == "stopped" else self._close_seconds
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.lines.put(ending)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                thread.report("does not finish; it is left behind")

    def log(self, row: Row) -> None:
        """Hand over a line of metrics.jsonl."""
        for thread in self._threads:
            if thread.lines.qsize() >= self._waiting:
                thread.report(f"is slower than the training: it loses lines, {self._waiting:,} wait for it")
            elif thread.is_alive():
                thread.lines.put(row)


class _Delivery(threading.Thread):
    """The thread of one tracker."""

    def __init__(self, name: str, maker: Callable[[], Tracker], trackers: Trackers) -> None:
        super().__init__(name=f"tracker {name}", daemon=True)
        self._maker, self._trackers, self._id_file = maker, trackers, trackers.folder / f"tracker-{name}.id"
        self.lines: queue.SimpleQueue[Row | Ending] = queue.SimpleQueue()
        self._reported = False

    def run(self) -> None:
        if (tracker := self._guarded(self._start)) is None:
            return
        while not isinstance(line := self.lines.get(), str):
            self._guarded(tracker.log, line["step"], metrics_of(line))
        self._guarded(tracker.finish, line)

    def _start(self) -> Tracker:
        tracker = self._maker()
        known = self._id_file.read_text(encoding="utf-8") if self._id_file.exists() else ""
        self._id_file.write_text(tracker.start(replace(self._trackers.run, id=known)), encoding="utf-8")
        return tracker

    def _guarded(self, work: Callable[..., Any], *args: Any) -> Any:
        try:
            return work(*args)
        except BaseException as error:  # SystemExit, too: some libraries exit where there is no key
            self.report(f"fails: {type(error).__name__}: {first_line(error)}")

    def report(self, what: str) -> None:
        if not self._reported:
            self._reported = True
            self._trackers.say(masked(f"the {self.name} {what}. The training continues; metrics.jsonl has every line."))


def metrics_of(row: Row) -> dict[str, float]:
    """Return the numbers of a line of metrics.jsonl as trackers show them: train/loss, validation/NAME/loss."""
    part = next((part for part in ("validation", "evaluation") if part in row), "")
    numbers = _numbers(row[part], part) if part else _numbers(row, "train")
    return {name: value for name, value in numbers if name != "train/step"}


def _numbers(values: Row, path: str) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{path}/{name}")
        elif isinstance(value, int | float):
            yield f"{path}/{name}", float(value)
