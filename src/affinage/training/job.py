"""The job of a training, and the protocols of its replaceable parts."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from affinage.checkpoint import CheckpointStore
from affinage.checkpoint.remote import Uploader
from affinage.config.recipe import RuntimeSettings
from affinage.config.training import ParallelSettings, TrainSettings
from affinage.hardware.devices import Hardware
from affinage.model import Graph
from affinage.parallel import Strategy
from affinage.tracking import TrackedRun, Tracker
from affinage.training.state import TrainState

PyTree = Any
HostBatch = Mapping[str, np.ndarray]
Hook = Callable[[int, TrainState], None]  # steps made, state; called after every step, must not keep the state


class Feed(Protocol):
    """Training batches as a pure function of the step: there is nothing to save and nothing to lose.

    A feed may also have `iterate_part(number, part, parts)`, which yields of every batch only the rows from
    part / parts to (part + 1) / parts: then each of several processes reads its own rows alone.
    """

    def iterate(self, number: int) -> Iterator[HostBatch]:
        """The batches `number`, `number` + 1, ..., without end; batch 0 is that of the first step.

        Keys and shapes are the same every time: `tokens` [B, S] and whatever else the graph's loss reads.
        """


class ValidationSet(Protocol):
    """Rows in a fixed order, that are never trained on, in batches of one size."""

    @property
    def bytes(self) -> int:
        """Length of the text of these rows in UTF-8, for bits per byte."""

    def __iter__(self) -> Iterator[HostBatch]:
        """All rows once; the last batch is filled up with rows whose `loss_mask` is 0."""


class Monitor(Protocol):
    """Scores a model while it is trained, and decides whether the training goes on."""

    say: Callable[[str], None]  # shows people a line; the training sets it

    def due(self, step: int) -> bool:
        """Whether it looks at the state after this step."""

    def look(self, step: int, state: TrainState, stop: Callable[[], bool]) -> tuple[dict[str, Any] | None, str]:
        """JSON-able scores of the state, None without any; and why the training should end here, "" if it should not.

        Must not keep the state. `stop` is called now and then; when it returns true the look is given up, with
        (None, ""): it is made again, with the same scores, once the training resumes.
        """


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """One training run. Started again with the same job, it resumes from its newest checkpoint."""

    graph: Graph  # the model, with its loss
    settings: TrainSettings  # optimizer, schedule, batch, precision
    mesh: Mapping[str, int | str]  # devices along each axis; see `affinage.parallel.make_mesh`
    seed: int  # of the initial weights and of dropout
    feed: Feed  # training batches of the global batch size
    folder: Path  # gets checkpoints/, metrics.jsonl and, last, summary.json
    validation: Mapping[str, ValidationSet] = field(default_factory=dict)  # by the name that metrics use
    # From the abstract parameters with shardings to the weights to begin with; None: random ones.
    initial_params: Callable[[PyTree], PyTree] | None = None
    name: str = "train"  # of the run in messages, e.g. pretrain
    data: Mapping[str, Any] = field(default_factory=dict)  # JSON-able facts that identify the feed's batches
    code: Mapping[str, str] = field(default_factory=dict)  # hashes of plug-ins that decide about the numbers
    on_step: tuple[Hook, ...] = ()  # called in turn after every step
    measured: Callable[[Mapping[str, Any]], None] = lambda _: None  # gets every line of metrics.jsonl
    monitor: Monitor | None = None  # scores the state on the way, and may end the training
    parallel: ParallelSettings = field(default_factory=ParallelSettings)  # how a step is split over the mesh
    runtime: RuntimeSettings = field(default_factory=RuntimeSettings)  # none of it changes the result
    trackers: Mapping[str, Callable[[], Tracker]] = field(default_factory=dict)  # see `affinage.tracking`
    tracked: TrackedRun = field(default_factory=lambda: TrackedRun("train"))  # what trackers know of this training
    # Folder, which is only read, and step of another training: this one begins as if it had made the steps up to there.
    extends: tuple[Path, int] | None = None
    uploader: Uploader | None = None  # copies elsewhere what the first process saves; goes with a `store` that calls it
    store: CheckpointStore | None = None  # of the checkpoints; None: one in the folder
    hardware: Hardware = field(default_factory=Hardware)  # provides the devices, and is released at the end
    strategy: Strategy | None = None  # how the step is compiled; None: as the mesh requires


def rows_per_step(settings: TrainSettings, devices: int) -> int:
    """Rows of the global batch; what a feed for `train` must yield."""
    if settings.batch_size is not None:
        return settings.batch_size
    assert settings.per_device_batch_size is not None  # the settings' own validation
    return settings.per_device_batch_size * devices
