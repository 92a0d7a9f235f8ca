"""The job of a training, its replaceable parts, and the job on a mesh: shardings and compiled steps."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from affinage.checkpoint import CheckpointStore
from affinage.checkpoint.remote import Uploader
from affinage.config.recipe import RuntimeSettings
from affinage.config.training import ParallelSettings, PrecisionSettings, TrainSettings
from affinage.hardware.chips import Chip, chip
from affinage.hardware.devices import Hardware
from affinage.model import ApplyConfig, Declared, Graph, apply, decayed, init_params
from affinage.model.apply_config import capability_of, with_remat
from affinage.model.layer import BATCH, SEQUENCE
from affinage.parallel.sharding import MeshLayout, table_with
from affinage.parallel.strategy import Strategy, strategy_for
from affinage.tracking import Starts, TrackedRun
from affinage.training.layerwise import make_layerwise_optimizer, make_layerwise_step
from affinage.training.optimizer import make_optimizer
from affinage.training.state import (
    LossWindow,
    ParamSplit,
    Purpose,
    TrainState,
    abstract_state,
    random_key,
    split_params,
)
from affinage.training.step import Step, make_train_step, make_validation_step

PyTree = Any
HostBatch = Mapping[str, np.ndarray]
Hook = Callable[[int, TrainState], None]  # steps made, state; called after every step, must not keep the state
DeviceBatch = Mapping[str, Any]  # of jax.Array, or of numpy's where a CPU takes these


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
    """Scores a model while it is trained, whose state it must not keep, and decides whether the training goes on."""

    say: Callable[[str], None]  # shows people a line; the training sets it

    def due(self, step: int) -> bool:
        """Whether it looks at the state after this step."""

    def look(self, step: int, state: TrainState, stop: Callable[[], bool]) -> tuple[dict[str, Any] | None, str]:
        """JSON-able scores of the state, None without any; and why the training should end here, "" if it should not.

        `stop` is called now and then; once it is true the look is given up, with (None, ""), and made again later.
        """

    def rolled_back(self, step: int, state: TrainState) -> None:
        """Forget what came after this step: the training is back at it, with this state, and takes another way."""


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """One training run. Started again with the same job, it resumes from its newest checkpoint."""

    graph: Graph  # the model, with its loss
    settings: TrainSettings  # optimizer, schedule, batch, precision
    mesh: Mapping[str, int | str]  # devices along each axis; see `affinage.parallel.sharding.make_mesh`
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
    trackers: Starts = field(default_factory=dict)  # see `affinage.tracking`
    tracked: TrackedRun = field(default_factory=lambda: TrackedRun("train"))  # what trackers know of this training
    # Folder, which is only read, and step of another training: this one begins as if it had made the steps up to there.
    extends: tuple[Path, int] | None = None
    uploader: Uploader | None = None  # copies elsewhere what the first process saves; goes with a `store` that calls it
    store: CheckpointStore | None = None  # of the checkpoints; None: one in the folder
    hardware: Hardware = field(default_factory=Hardware)  # provides the devices, and is released at the end
    strategy: Strategy | None = None  # how the step is compiled; None: as the mesh requires


class Trainer:
    """Everything about a run that does not change while it runs."""

    def __init__(self, job: TrainJob, mesh: Mesh, batch: HostBatch) -> None:
        """`batch` is any batch of the feed, for its shapes."""
        device, sizes, settings = mesh.devices.flat[0], job.graph.sizes(batch), job.settings
        self.job, self.mesh, self.batch = job, mesh, batch
        self.chip, self.platform = chip(device.device_kind), str(device.platform)
        self.is_simulated = mesh.size > 1 and self.platform == "cpu"  # a CPU plays several devices
        self.layout = MeshLayout(mesh, table_with(job.parallel.sharding))
        self.strategy: Strategy = job.strategy or strategy_for(mesh, job.parallel)
        self.split = split_params(job.graph, settings)
        self.optimizer = optimizer_of(self.split, settings)
        self.rows = sizes[BATCH]
        self.tokens = math.prod(sizes.values())  # of a batch, those that do not count included
        # FLOPs of a step by the convention of `affinage.model.graph`, and a second of the mesh by the datasheet.
        self.flops_per_step = self.split.step_flops(self.rows, sizes.get(SEQUENCE, 1))
        self.peak_flops = None if self.chip.flops_per_device is None else self.chip.flops_per_device * mesh.size
        if self.rows != (expected := rows_per_step(settings, mesh.size)):
            raise ValueError(f"the feed yields {self.rows} rows a step, the settings say {expected}")
        micro_batches = settings.gradient_accumulation_steps
        self.layout.check(job.graph, self.rows, micro_batches, sizes.get(SEQUENCE, 0))
        self.strategy.check(job.graph, self.rows // micro_batches, self.layout)
        # Shapes, dtypes and shardings of the state.
        self.abstract = abstract_state(self.split, settings, self.optimizer, self.layout)

    def begin(self) -> TrainState:
        """The state before the first step."""
        job, abstract, dtype = self.job, self.abstract, jnp.dtype(self.job.settings.precision.params)

        def draw(declared: Declared, like: PyTree) -> PyTree:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
            drawn = jax.jit(lambda key: init_params(declared, key, dtype), out_shardings=shardings)
            return drawn(random_key(job.seed, Purpose.INITIAL_WEIGHTS))

        def others(params: PyTree) -> TrainState:
            ema = None if abstract.ema_params is None else jax.tree.map(lambda p: jnp.array(p, jnp.float32), params)
            window = LossWindow.empty(job.settings.health.spike_window)
            return TrainState(jnp.zeros((), jnp.int32), None, self.optimizer.init(params), ema, window)

        weights = abstract.params if self.split.adapters is None else abstract.frozen
        params = job.initial_params(weights) if job.initial_params is not None else draw(job.graph, weights)
        frozen = None
        if self.split.adapters is not None:
            params, frozen = draw(self.split.adapters, abstract.params), params
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract._replace(params=None, frozen=None))
        return jax.jit(others, out_shardings=shardings)(params)._replace(params=params, frozen=frozen)

    def compile_training(self) -> Callable[[TrainState, PyTree], tuple[TrainState, dict[str, jax.Array]]]:
        """The compiled training step; see `make_train_step`."""
        step = step_of(self.split, self.job.settings, self.adapted_config, self.job.seed)
        return self.strategy.compile(step, self.abstract, self._like(self.batch), donate=True)

    def compile_validation(self, batch: HostBatch) -> Callable[[PyTree, PyTree], dict[str, Any]]:
        """The compiled validation step for batches like `batch`; see `make_validation_step`."""
        step = make_validation_step(self.split, config=self.adapted_config)
        weights = (self.abstract.params, self.abstract.ema_params, self.abstract.frozen)
        return self.strategy.compile(step, weights, self._like(batch), donate=False)

    def compile_value(self, node: str, batch: HostBatch) -> Callable[[PyTree, PyTree], jax.Array]:
        """A compiled function from parameters and a batch to the value of a node, whole on every device."""
        config = replace(self.adapted_config, key=None, until=node)

        def value(params: PyTree, batch: PyTree) -> Any:
            return apply(self.job.graph, params, batch, config).values[node]

        return self.strategy.compile(value, self.abstract.params, self._like(batch), donate=False)

    @property
    def apply_config(self) -> ApplyConfig:
        """How the graph is applied, without what the strategy makes of it."""
        return ApplyConfig(
            compute_dtype=compute_dtype(self.job.settings.precision, self.chip),
            attention=self.job.settings.attention,
            platform=self.platform,
            capability=capability_of(self.mesh.devices.flat[0]),
            layout=self.layout,
            ring_attention=self.job.parallel.context_attention == "ring",
        )

    @property
    def adapted_config(self) -> ApplyConfig:
        """How the steps apply the graph."""
        return self.strategy.adapt(with_remat(self.apply_config, self.job.parallel.remat))

    def devices(self) -> dict[str, Any]:
        """What the run computes on, for people."""
        kind = self.mesh.devices.flat[0].device_kind
        return {"kind": kind, "count": self.mesh.size, "mesh": dict(self.mesh.shape)}

    # ---- batches ----

    def batches(self, number: int) -> Iterator[HostBatch]:
        """What this process needs of the batches from `number` on, from 0: its rows alone, if it can be."""
        placed = self.layout.batch_sharding.addressable_devices_indices_map((self.rows,))
        bounds = [index[0].indices(self.rows) for index in placed.values() if index is not None]
        first, last = min(bound[0] for bound in bounds), max(bound[1] for bound in bounds)
        size, feed = last - first, self.job.feed
        if size < self.rows and hasattr(feed, "iterate_part") and not (self.rows % size or first % size):
            own: Iterator[HostBatch] = feed.iterate_part(number, first // size, self.rows // size)
            return own
        return feed.iterate(number)

    def put(self, batch: HostBatch, rows: int | None = None) -> DeviceBatch:
        """A batch on the devices, its rows split over the mesh; of `rows` in all, this process may have its own."""
        if self.mesh.size == 1 and self.platform == "cpu":  # which takes the host's arrays in a fifth of the time
            return batch
        sharding = self.layout.batch_sharding
        if jax.process_count() == 1:
            return jax.device_put(dict(batch), sharding)
        return {
            name: jax.make_array_from_process_local_data(sharding, array, (rows or len(array), *array.shape[1:]))
            for name, array in batch.items()
        }

    def _like(self, batch: HostBatch) -> Mapping[str, jax.ShapeDtypeStruct]:
        sharding = self.layout.batch_sharding
        return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in batch.items()}


def optimizer_of(split: ParamSplit, settings: TrainSettings) -> optax.GradientTransformation:
    """The optimizer whose state a training with these settings holds."""
    if settings.optimizer_in_backward:
        return make_layerwise_optimizer(split.graph, settings)
    return make_optimizer(settings.optimizer, decayed(split.trainable))


def step_of(split: ParamSplit, settings: TrainSettings, config: ApplyConfig, seed: int) -> Step:
    """The training step that these settings require: what a run compiles, and what a plan traces."""
    make = make_layerwise_step if settings.optimizer_in_backward else make_train_step
    return make(split, settings, config=config, seed=seed)


def compute_dtype(settings: PrecisionSettings, chip: Chip) -> jnp.dtype:
    """The dtype that matrices are multiplied in."""
    if settings.compute == "auto":
        return jnp.dtype(jnp.bfloat16 if chip.bfloat16_flops else jnp.float32)
    return jnp.dtype(settings.compute)


def rows_per_step(settings: TrainSettings, devices: int) -> int:
    """Rows of the global batch; what a feed for `train` must yield."""
    if settings.batch_size is not None:
        return settings.batch_size
    assert settings.per_device_batch_size is not None  # the settings' own validation
    return settings.per_device_batch_size * devices
