"""A job on a mesh: the shardings of its state and batches, and its compiled steps."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from affinage.config.training import PrecisionSettings, TrainSettings
from affinage.hardware.chips import Chip, chip
from affinage.model import ApplyConfig, Declared, apply, decayed, init_params
from affinage.model.apply_config import capability_of, with_remat
from affinage.model.layer import BATCH, SEQUENCE
from affinage.parallel import MeshLayout, Strategy, strategy_for, table_with
from affinage.training.job import HostBatch, TrainJob, rows_per_step
from affinage.training.layerwise import make_layerwise_optimizer, make_layerwise_step
from affinage.training.optimizer import make_optimizer
from affinage.training.state import ParamSplit, Purpose, TrainState, abstract_state, begin, random_key, split_params
from affinage.training.step import Step, make_train_step, make_validation_step

PyTree = Any
DeviceBatch = Mapping[str, Any]  # of jax.Array, or of numpy's where a CPU takes these


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
        self.abstract = abstract_state(self.split, settings, self.optimizer, self.layout, with_window=True)

    def begin(self) -> TrainState:
        """The state before the first step."""

        def draw(declared: Declared, abstract: PyTree) -> PyTree:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
            dtype = jnp.dtype(self.job.settings.precision.params)
            drawn = jax.jit(lambda key: init_params(declared, key, dtype), out_shardings=shardings)
            return drawn(random_key(self.job.seed, Purpose.INITIAL_WEIGHTS))

        initial = self.job.initial_params or (lambda abstract: draw(self.job.graph, abstract))
        if self.split.adapters is None:
            return begin(self.abstract, initial(self.abstract.params), self.optimizer)
        params, frozen = draw(self.split.adapters, self.abstract.params), initial(self.abstract.frozen)
        return begin(self.abstract, params, self.optimizer, frozen)

    def compile_training(self) -> Callable[[TrainState, PyTree], tuple[TrainState, dict[str, jax.Array]]]:
        """The compiled training step; see `make_train_step`."""
        step = step_of(self.split, self.job.settings, self.adapted_config, self.job.seed)
        return self.strategy.compile_training(step, self.abstract, self._like(self.batch))

    def compile_validation(self, batch: HostBatch) -> Callable[[PyTree, PyTree], dict[str, Any]]:
        """The compiled validation step for batches like `batch`; see `make_validation_step`."""
        step = make_validation_step(self.split, config=self.adapted_config)
        weights = (self.abstract.params, self.abstract.ema_params, self.abstract.frozen)
        return self.strategy.compile_evaluation(step, weights, self._like(batch))

    def compile_value(self, node: str, batch: HostBatch) -> Callable[[PyTree, PyTree], jax.Array]:
        """A compiled function from parameters and a batch to the value of a node, whole on every device."""
        config = dataclasses.replace(self.adapted_config, key=None, until=node)

        def value(params: PyTree, batch: PyTree) -> Any:
            return apply(self.job.graph, params, batch, config).values[node]

        return self.strategy.compile_evaluation(value, self.abstract.params, self._like(batch))

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
