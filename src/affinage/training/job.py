"""The job of a training, and the protocols of its replaceable parts."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from affinage.checkpoint.remote import Uploader
from affinage.config.parallel import ParallelSettings
from affinage.config.runtime import RuntimeSettings
from affinage.config.training import TrainSettings
from affinage.hardware.devices import Hardware, LocalDevices
from affinage.model import Graph
from affinage.parallel import Strategy
from affinage.tracking import Tracker
from affinage.training.state import TrainState

PyTree = Any
HostBatch = Mapping[str, np.ndarray]


class Feed(Protocol):
    """Training batches as a pure function of the step: there is nothing to save and nothing to lose."""

    def iterate(self, start_step: int) -> Iterator[HostBatch]:
        """Batches of steps start_step, start_step + 1, ..., without end.

        Keys and shapes are the same every time: `tokens` [B, S] and whatever else the graph's loss reads.
        """
        ...


@runtime_checkable
class DivisibleFeed(Feed, Protocol):
    """A feed that can read a part of the rows alone, so that each of several processes reads its own."""

    def iterate_part(self, start_step: int, part: int, parts: int) -> Iterator[HostBatch]:
        """See `Feed.iterate`; of every batch only its rows from part / parts to (part + 1) / parts."""
        ...


class ValidationSet(Protocol):
    """Rows in a fixed order, that are never trained on, in batches of one size."""

    @property
    def bytes(self) -> int:
        """Length of the text of these rows in UTF-8, for bits per byte."""
        ...

    def __iter__(self) -> Iterator[HostBatch]:
        """All rows once; the last batch is filled up with rows whose `loss_mask` is 0."""
        ...


class Checkpoints(Protocol):
    """Keeps states of a run, each under its step, whole or not at all; see `affinage.checkpoint.CheckpointStore`."""

    def steps(self) -> list[int]:
        """The steps that are there, oldest first."""
        ...

    def save(self, step: int, state: Mapping[str, PyTree], meta: Mapping[str, Any]) -> None:
        """Start to save trees of `jax.Array` by name, and JSON-able facts. The arrays may be donated afterwards."""
        ...

    def wait(self) -> None:
        """Wait until what was saved is there."""
        ...

    def check_save(self) -> None:
        """Raise what a save in the background has failed with. Called after every step, and does not block."""
        ...

    def forget_after(self, step: int) -> None:
        """Remove all later steps."""
        ...

    def restore_newest(
        self, abstract: Mapping[str, PyTree], accept: Callable[[Mapping[str, Any]], None], at_most: int | None
    ) -> tuple[int, dict[str, PyTree], dict[str, Any]] | None:
        """Step, state and facts of the newest step, up to `at_most` if there is one; None if there is none.

        Args:
            abstract: trees of `jax.ShapeDtypeStruct` with shardings, as the state is to come.
            accept: gets the facts before, and may raise.
            at_most: the newest up to this step is wanted; without any, the first one after it is taken.
        """
        ...


class Extension(NamedTuple):
    """A checkpoint that a training begins with, as if it had made the steps up to there itself.

    Attributes:
        training: the folder of the training that made it; only read.
        step: of the checkpoint.
    """

    training: Path
    step: int


Hook = Callable[[int, TrainState], None]  # steps made, state; called after every step, must not keep the state


class Monitor(Protocol):
    """Scores a model while it is trained, and decides whether the training goes on.

    Attributes:
        say: shows people a line; the training sets it.
    """

    say: Callable[[str], None]

    def due(self, step: int) -> bool:
        """Whether it looks at the state after this step."""
        ...

    def look(self, step: int, state: TrainState, stop: Callable[[], bool]) -> tuple[dict[str, Any] | None, str]:
        """JSON-able scores of the state, None without any; and why the training should end here, "" if it should not.

        Must not keep the state, and gives the same for a step again after a resume. `stop` is called now and then; when
        it returns true the look is given up, and (None, "") is returned: it is made again once the training resumes.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """One training run. Started again with the same job, it resumes from its newest checkpoint.

    Attributes:
        graph: the model, with its loss.
        settings: optimizer, schedule, batch, precision.
        mesh: devices along each axis; see `affinage.parallel.make_mesh`.
        seed: of the initial weights and of dropout.
        feed: training batches of the global batch size.
        folder: gets checkpoints/, metrics.jsonl and, last, summary.json.
        validation: by the name that metrics and reports use.
        initial_params: gets the abstract parameters with shardings, and returns the weights to begin with; None: random
            ones.
        name: of the run in messages, e.g. "pretrain".
        data: JSON-able facts that identify the feed's batches: with others, no checkpoint is resumed from.
        code: hashes of code besides affinage's that decides about the numbers, such as plug-ins: likewise.
        documents: what the batch of a step, counted from 1, was made of, as JSON; for reports of unhealthy steps.
        on_step: called in turn after every step.
        measured: gets every line of metrics.jsonl once it is written.
        monitor: scores the state on the way, and may end the training before its last step.
        parallel: how a step is split over the mesh.
        trackers: makers of what also gets the metrics, by name; see `affinage.tracking`.
        runtime: checkpoints, preemption, hangs, the trace; none of it changes the result.
        close_trackers_within: seconds at the end for what trackers are still sending.
        extends: a checkpoint of another training to begin with; the steps continue from its step.
        uploader: copies what the first process saves elsewhere; None: it stays in the folder.
        store: of the checkpoints; None: `affinage.checkpoint.CheckpointStore`, in the job's folder.
        hardware: provides the devices, and is released at the end.
        strategy: how the step is compiled; None: as the mesh requires, see `affinage.parallel.strategy_for`.
    """

    graph: Graph
    settings: TrainSettings
    mesh: Mapping[str, int | str]
    seed: int
    feed: Feed
    folder: Path
    validation: Mapping[str, ValidationSet] = field(default_factory=dict)
    initial_params: Callable[[PyTree], PyTree] | None = None
    name: str = "train"
    data: Mapping[str, Any] = field(default_factory=dict)
    code: Mapping[str, str] = field(default_factory=dict)
    documents: Callable[[int], Any] | None = None
    on_step: tuple[Hook, ...] = ()
    measured: Callable[[Mapping[str, Any]], None] = lambda _: None
    monitor: Monitor | None = None
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    runtime: RuntimeSettings = field(default_factory=RuntimeSettings)
    trackers: Mapping[str, Callable[[], Tracker]] = field(default_factory=dict)
    close_trackers_within: float = 30.0
    extends: Extension | None = None
    uploader: Uploader | None = None
    store: Checkpoints | None = None
    hardware: Hardware = field(default_factory=LocalDevices)
    strategy: Strategy | None = None


def rows_per_step(settings: TrainSettings, devices: int) -> int:
    """Rows of the global batch; what a feed for `train` must yield."""
    if settings.batch_size is not None:
        return settings.batch_size
    assert settings.per_device_batch_size is not None  # the settings' own validation
    return settings.per_device_batch_size * devices
