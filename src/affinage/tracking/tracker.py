"""What a tracker is."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

Ending = Literal["finished", "stopped", "failed"]  # done; told to stop, and to go on later; by an error


@dataclass(frozen=True)
class TrackedRun:
    """A training, as trackers are told of it."""

    name: str  # of the training, e.g. pretrain
    id: str = ""  # what `start` gave at the training's first start; "" at the first
    start: int = 0  # the step that it goes on from
    facts: Mapping[str, Any] = field(default_factory=dict)  # JSON-able: settings, mesh, versions

    def to_json(self) -> dict[str, Any]:
        """As JSON; `TrackedRun(**value)` is the way back."""
        return asdict(self)


class Tracker(Protocol):
    """Takes the metrics of one training. All calls come from one thread, which may wait as long as it likes.

    Whatever a method raises is told once, and the training goes on.
    """

    def start(self, run: TrackedRun) -> str:
        """Begin, or go on with what is called `run.id`. Returns the id to go on with."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the metrics of a step. One that was done again after a kill may come again, with the same values."""
        ...

    def finish(self, ending: Ending) -> None:
        """Write out what is left; nothing comes after it but another start of the run, in another process."""
        ...


def metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics.jsonl by the names that trackers show: train/loss, validation/NAME/loss."""
    part = next((part for part in ("validation", "evaluation") if part in row), "")
    numbers = _numbers(row[part], part) if part else _numbers(row, "train")
    return {name: value for name, value in numbers if name != "train/step"}


def _numbers(values: Mapping[str, Any], path: str) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        inside = f"{path}/{name}"
        if isinstance(value, Mapping):
            yield from _numbers(value, inside)
        elif isinstance(value, int | float):
            yield inside, float(value)
