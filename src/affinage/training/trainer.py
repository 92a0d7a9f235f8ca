"""A job on a mesh: the shardings of its state and batches, and its compiled steps."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from affinage.config.training import PrecisionSettings, TrainSettings
from affinage.hardware.chips import Chip, chip
from affinage.model import ApplyConfig, Declared, apply, init_params
from affinage.model.apply_config import capability_of, with_remat
from affinage.model.layer import BATCH, SEQUENCE
from affinage.parallel import MeshLayout, Strategy, apply_config_on, batch_sharding, strategy_for, table_with
from affinage.parallel.sharding import check_axes_used, check_positions_divide, check_rows_divide
from affinage.training.frozen import ParamSplit, split_params
from affinage.training.job import DivisibleFeed, HostBatch, TrainJob, rows_per_step
from affinage.training.layerwise import check_remat, make_layerwise_optimizer, make_layerwise_step
from affinage.training.optimizer import learning_rate
from affinage.training.state import Purpose, TrainState, abstract_state, begin, random_key
from affinage.training.step import Step, make_full_optimizer, make_train_step, make_validation_step

PyTree = Any
DeviceBatch = Mapping[str, Any]  # of jax.Array, or of numpy's where a CPU takes these


@dataclass(frozen=True)
class Trainer:
    """Everything about a run that does not change while it runs."""

    job: TrainJob
    mesh: Mesh
    batch: HostBatch  # any batch of the feed, for its shapes

    def __post_init__(self) -> None:
        rows, expected = self.rows, rows_per_step(self.job.settings, self.mesh.size)
        if rows != expected:
            raise ValueError(f"the feed yields {rows} rows a step, the settings say {expected}")
        parts = self.job.settings.gradient_accumulation_steps
        check_axes_used(self.job.graph, self.mesh.shape, self.layout.table)
        check_rows_divide(rows, parts, self.mesh, self.layout.table)
        if SEQUENCE in self._sizes:
            check_positions_divide(self._sizes[SEQUENCE], self.mesh, self.layout.table)
        check_remat(self.job.settings, self.job.parallel.remat)
        self.strategy.check(self.job.graph, rows // parts, self.apply_config)

    # ---- sizes and speeds ----

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return self.job.graph.sizes(self.batch)

    @property
    def rows(self) -> int:
        """Rows of a batch."""
        return self._sizes[BATCH]

    @property
    def tokens(self) -> int:
        """Tokens of a batch, those that do not count included; of a model without tokens its rows."""
        return math.prod(self._sizes.values())

    @cached_property
    def flops_per_step(self) -> int:
        """Floating point operations of one training step, by the convention of `affinage.model.analysis`."""
        return self.split.step_flops(self.rows, self._sizes.get(SEQUENCE, 1))

    @property
    def peak_flops(self) -> float | None:
        """bfloat16 FLOP/s of the whole mesh by the datasheet; None where it is not known."""
        per_device = self.chip.flops_per_device
        return None if per_device is None else per_device * self.mesh.size

    @property
    def is_simulated(self) -> bool:
        """Whether a CPU plays several devices."""
        return self.mesh.size > 1 and self._platform == "cpu"

    @property
    def _platform(self) -> str:
        return str(self.mesh.devices.flat[0].platform)

    @cached_property
    def chip(self) -> Chip:
        """The kind of chip that the mesh is made of."""
        return chip(self.mesh.devices.flat[0].device_kind)

    # ---- the state and the compiled functions ----

    @cached_property
    def layout(self) -> MeshLayout:
        """The mesh with the job's sharding table."""
        return MeshLayout(self.mesh, table_with(self.job.parallel.sharding))

    @cached_property
    def strategy(self) -> Strategy:
        """How the steps become programs."""
        return self.job.strategy or strategy_for(self.mesh, self.job.parallel)

    @cached_property
    def split(self) -> ParamSplit:
        """The trainable and the frozen parameters."""
        return split_params(self.job.graph, self.job.settings)

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """The job's optimizer."""
        return optimizer_of(self.split, self.job.settings)

    @cached_property
    def abstract(self) -> TrainState:
        """Shapes, dtypes and shardings of the state."""
        return abstract_state(self.split, self.job.settings, self.optimizer, self.layout, with_window=True)

    def begin(self) -> TrainState:
        """The state before the first step."""

        def draw(declared: Declared, abstract: PyTree) -> PyTree:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
            dtype = jnp.dtype(self.job.settings.precision.params)
            drawn = jax.jit(lambda key: init_params(declared, key, dtype), out_shardings=shardings)
            return drawn(random_key(self.job.seed, Purpose.INITIAL_WEIGHTS))

        initial = self.job.initial_params or (lambda abstract: draw(self.job.graph, abstract))
        frozen = initial(self.abstract.frozen) if self.split.has_frozen else None
        if self.split.adapters is not None:
            params = draw(self.split.adapters, self.abstract.params)
        elif frozen is not None:
            params = jax.tree.map(jnp.copy, frozen)
        else:
            params = initial(self.abstract.params)
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

    def learning_rate(self, step: int) -> float:
        """The learning rate of the update that makes step number `step`, counted from 1."""
        return float(learning_rate(self.job.settings.schedule, self.job.settings.steps)(jnp.asarray(step - 1)))

    @property
    def apply_config(self) -> ApplyConfig:
        """How the graph is applied, without what the strategy makes of it."""
        return dataclasses.replace(
            apply_config_on(self.layout, self.job.settings.attention, self.job.parallel),
            compute_dtype=compute_dtype(self.job.settings.precision, self.chip),
            platform=self._platform,
            capability=capability_of(self.mesh.devices.flat[0]),
        )

    @property
    def adapted_config(self) -> ApplyConfig:
        """How the steps apply the graph."""
        return self.strategy.adapt(with_remat(self.apply_config, self.job.parallel.remat))

    # ---- batches ----

    def batches(self, start_step: int) -> Iterator[HostBatch]:
        """What this process needs of the batches from `start_step` on: its rows alone, if the feed can read these."""
        part, parts = self._share
        if isinstance(self.job.feed, DivisibleFeed) and parts > 1:
            return self.job.feed.iterate_part(start_step, part, parts)
        return self.job.feed.iterate(start_step)

    def put_share(self, batch: HostBatch) -> DeviceBatch:
        """A batch of `batches` on the devices, its rows split over the mesh."""
        return self.put(batch, self.rows)

    def put(self, batch: HostBatch, rows: int | None = None) -> DeviceBatch:
        """A batch on the devices, its rows split over the mesh; of `rows` in all, this process may have its own alone.

        A single CPU has nothing to wait for: compiled programs take the host's arrays in a fifth of the time.
        """
        if self.mesh.size == 1 and self._platform == "cpu":
            return batch
        sharding = self._batch_sharding
        if jax.process_count() == 1:
            return jax.device_put(dict(batch), sharding)
        return {
            name: jax.make_array_from_process_local_data(sharding, array, (rows or len(array), *array.shape[1:]))
            for name, array in batch.items()
        }

    @cached_property
    def _share(self) -> tuple[int, int]:
        """Which of how many equal parts of a batch's rows the devices of this process need; (0, 1): others, or all."""
        placed = self._batch_sharding.addressable_devices_indices_map((self.rows,))
        bounds = [index[0].indices(self.rows) for index in placed.values() if index is not None]
        first, last = min(bound[0] for bound in bounds), max(bound[1] for bound in bounds)
        size = last - first
        return (0, 1) if self.rows % size or first % size else (first // size, self.rows // size)

    @cached_property
    def _batch_sharding(self) -> jax.sharding.NamedSharding:
        return batch_sharding(self.mesh, self.layout.table)

    def _like(self, batch: HostBatch) -> Mapping[str, jax.ShapeDtypeStruct]:
        sharding = self._batch_sharding
        return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in batch.items()}


def optimizer_of(split: ParamSplit, settings: TrainSettings) -> optax.GradientTransformation:
    """The optimizer whose state a training with these settings holds."""
    if settings.optimizer_in_backward:
        return make_layerwise_optimizer(split.graph, settings)
    return make_full_optimizer(split, settings)


def step_of(split: ParamSplit, settings: TrainSettings, config: ApplyConfig, seed: int) -> Step:
    """The training step that these settings require: what a run compiles, and what a plan traces."""
    make = make_layerwise_step if settings.optimizer_in_backward else make_train_step
    return make(split, settings, config=config, seed=seed)


def compute_dtype(settings: PrecisionSettings, chip: Chip) -> jnp.dtype:
    """The dtype that matrices are multiplied in."""
    if settings.compute == "auto":
        return jnp.dtype(jnp.bfloat16 if chip.multiplies_bfloat16 else jnp.float32)
    return jnp.dtype(settings.compute)
