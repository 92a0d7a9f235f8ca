"""A training step as one device of a mesh runs it: its rows, its part of the model, and the trace of its program."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jaxtyping import Array
from typing_extensions import override

from affinage.config.parallel import ParallelSettings
from affinage.config.training import TrainSettings
from affinage.errors import UserError
from affinage.hardware.chips import Chip
from affinage.hardware.mesh import AXES, axis_sizes
from affinage.hardware.slices import Slice
from affinage.model import ApplyConfig, Graph, parse
from affinage.model.apply_config import HOPPER, with_remat
from affinage.model.forward import batch_shapes
from affinage.model.layer import Axes, parameters_in
from affinage.model.layers.kernels import queries_are_split
from affinage.parallel import Pipeline, sharding
from affinage.parallel.sharding import STAGES, TABLE, MeshLayout, apply_config_on, partition_spec, table_with
from affinage.planning.trace import Traced, Weights, padding, walk
from affinage.training.job import rows_per_step
from affinage.training.layerwise import LAYERWISE_REMAT, check_update
from affinage.training.state import ParamSplit, TrainState, abstract_state, split_params
from affinage.training.trainer import compute_dtype, optimizer_of, step_of

_WIDER_UNITS = ("TPU v6e", "TPU7x")  # whose matrix unit is 256 x 256; that of older TPUs is 128 x 128
_BEFORE_HOPPER = frozenset({"A100 80GB", "A100 40GB", "L4"})


@dataclass(frozen=True)
class PerDevice:
    """A model and its batch, divided over a mesh of devices that need not exist."""

    graph: Graph  # the whole model
    settings: TrainSettings
    sizes: Mapping[str, int]  # devices along each mesh axis
    rows: int  # sequences of the global batch
    seq_len: int  # tokens of a row
    parallel: ParallelSettings  # how the work is split beside the mesh
    chip: Chip  # of every device
    platform: str

    @property
    def micro_batches(self) -> int:
        """Parts that a batch goes through one after the other."""
        return self.settings.gradient_accumulation_steps

    @property
    def stages(self) -> int:
        """Stages of a pipeline, 1 without one."""
        return self.sizes[STAGES]

    @property
    def pipeline(self) -> Pipeline:
        """How the stages share the rows."""
        return Pipeline(micro_batches=self.parallel.pipeline_micro_batches, rounds=self.parallel.pipeline_rounds)

    @cached_property
    def pipeline_parts(self) -> int:
        """Micro-batches that are in the pipeline at once."""
        return 1 if self.stages == 1 else self.pipeline.parts(self.rows // self.micro_batches, self.layout)

    @cached_property
    def layout(self) -> MeshLayout:
        """The mesh without devices, with its table."""
        return MeshLayout(_abstract_mesh(self.sizes), table_with(self.parallel.sharding))  # type: ignore[arg-type]

    @property
    def local_rows(self) -> int:
        """Rows of a micro-batch on one device."""
        return max(1, self.rows // self.micro_batches // self.layout.parts("batch"))

    @property
    def local_seq_len(self) -> int:
        """Tokens of a row on one device."""
        return max(1, self.seq_len // self.layout.parts("sequence"))

    @cached_property
    def local_graph(self) -> Graph:
        """The model that one device multiplies with: its layers, heads, hidden units, ids and experts."""
        return _parsed(self._local_text)

    @cached_property
    def _local_text(self) -> str:
        """JSON of the local model: the settings of nodes divided along the logical axes of their parameters."""
        graph = self.graph.to_dict()
        for name, entry in graph["nodes"].items():
            if isinstance(entry.get("vocab"), int):
                entry["vocab"] = max(2, entry["vocab"] // self.layout.parts("vocab"))
            attention, ffn = getattr(self.graph[name].layer, "attention", None), entry.get("ffn")
            if attention is not None:
                entry["attention"] |= {
                    "heads": max(1, attention.heads // self.layout.parts("heads")),
                    "kv_heads": max(1, attention.groups_of // self.layout.parts("kv_heads")),
                    "head_dim": attention.head_width(self.graph.shapes[entry["in"]].width),
                }
            if isinstance(ffn, dict):
                ffn["width"] = max(1, ffn["width"] // self.layout.parts("ffn"))
                if "experts" in ffn:
                    ffn["experts"] = max(ffn.get("top_k", 1), ffn["experts"] // self.layout.parts("experts"))
            if "repeat" in entry:
                entry["repeat"] //= self.stages
                if self.platform == "gpu":
                    entry["scan"] = True  # of unrolled layers, each would seem to read the arrays of all of them
        return json.dumps(graph)

    @cached_property
    def split(self) -> ParamSplit:
        """What is trained of the whole model."""
        return split_params(self.graph, self.settings)

    @cached_property
    def state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state of the whole model; raises UserError if a size does not divide."""
        return abstract_state(self.split, self.settings, optimizer_of(self.split, self.settings), self.layout)

    def bytes_of(self, tree: Any) -> int:
        """Bytes on one device of a part of the state."""
        leaves = jax.tree.leaves(tree)
        return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)

    @cached_property
    def apply_config(self) -> ApplyConfig:
        """How the whole model is applied, as far as collectives depend on it."""
        return replace(
            apply_config_on(self.layout, self.settings.attention, self.parallel),
            compute_dtype=compute_dtype(self.settings.precision, self.chip),
            platform=self.platform,
        )

    @property
    def matrix_unit(self) -> int:
        """Rows and columns that a TPU multiplies at once; 1 on other chips, whose units are smaller than any model."""
        return 1 if self.platform != "tpu" else 256 if self.chip.name in _WIDER_UNITS else 128

    @cached_property
    def traced(self) -> Traced:
        """The operations of the step of one device; all devices have equal ones."""
        changed: dict[str, Any] = {"sharding": {}, "xla_flags": {}}  # which are in the shapes, or not in the program
        if self.stages > 1:
            changed["pipeline_micro_batches"] = self.pipeline_parts
        capability = None
        if self.platform == "gpu":
            capability = (8, 0) if self.chip.name in _BEFORE_HOPPER else HOPPER
        jaxpr, count = _trace(
            self._local_text,
            type(self.settings),
            self.settings.model_dump_json(),
            self.parallel.model_copy(update=changed).model_dump_json(),
            self.local_rows // self.stages,
            self.local_seq_len,
            (str(self.apply_config.compute_dtype), self.platform, capability),
            self.layout.parts("sequence"),
            self.stages,
        )
        shares: dict[tuple[int, ...], float] = {}
        pairs = zip(parameters_in(self.graph.parameters), parameters_in(self.local_graph.parameters), strict=True)
        for whole, local in pairs:
            spec = partition_spec(whole.axes, self.layout.mesh, self.layout.table)
            own = NamedSharding(self.layout.mesh, spec).shard_shape(whole.shape)
            share = math.prod(own) / local.size
            shares[local.shape] = min(shares.get(local.shape, 1.0), share)
        nodes = self.local_graph.nodes
        weights = Weights(
            count=count,
            shares=shares,
            vocabularies={vocab for node in nodes if (vocab := getattr(node.layer, "vocab", None))},
            kernel_flops={node.name: self._kernel_flops(node) for node in nodes},
            matrix_unit=self.matrix_unit,
        )
        return walk(jaxpr, self.platform, weights)

    def _kernel_flops(self, node: Any) -> float:
        """Operations of one product of a kernel of attention, on the device whose queries see most keys."""
        attention = getattr(node.layer, "attention", None)
        if attention is None:
            return 0.0
        head, first = attention.head_width(self.graph.shapes[node.inputs[0]].width), 0
        if self.platform == "tpu" and queries_are_split(self.seq_len, self.layout.parts("sequence")):
            first = self.seq_len - self.local_seq_len
        pairs, rows = attention.pairs(self.seq_len, first), self.local_rows / self.pipeline_parts
        return 2.0 * rows * attention.heads * pairs * head * padding(head, self.matrix_unit)


def per_device(
    graph: Graph,
    settings: TrainSettings,
    mesh: Mapping[Any, int | str],
    seq_len: int,
    where: Slice,
    requested: ParallelSettings,
) -> PerDevice:
    """Divide a training run over the devices of a slice.

    Raises:
        UserError: as training would: if mesh, batch and model do not divide, with the nearest settings that do.
    """
    sizes, devices = axis_sizes(mesh, where.devices), where.devices
    used = math.prod(sizes.values())
    if used != devices:
        raise UserError(
            f"the mesh has {used} device{'s' if used > 1 else ''}, the slice {devices}",
            where="mesh",
            fix="Set one axis to auto, which takes all there are, such as --set mesh.data=auto.",
        )
    if all(name != "tokens" for name, _ in graph.inputs):
        seq_len = 1
    layerwise = {"remat": LAYERWISE_REMAT} if settings.optimizer_in_backward else {}
    done = requested.model_copy(update=layerwise)
    rows = rows_per_step(settings, devices)
    device = PerDevice(graph, settings, sizes, rows, seq_len, done, where.chip, where.platform)
    sharding.check_axes_used(graph, sizes, device.layout.table)
    sharding.check_rows_divide(rows, device.micro_batches, device.layout.mesh, device.layout.table)
    sharding.check_positions_divide(seq_len, device.layout.mesh, device.layout.table)
    if device.stages > 1:
        config = apply_config_on(device.layout, settings.attention, done)
        device.pipeline.check(graph, rows // device.micro_batches, config)
    check_update(device.split, settings, in_stages=device.stages > 1)
    return device


def _abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    return AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES, (AxisType.Auto,) * len(AXES))


@lru_cache(maxsize=64)
def _parsed(text: str) -> Graph:
    return parse(json.loads(text))


@lru_cache(maxsize=128)
def _trace(
    graph_text: str,
    kind: type[TrainSettings],
    settings_text: str,
    parallel_text: str,
    rows: int,
    seq_len: int,
    target: tuple[str, str, tuple[int, int] | None],
    neighbors: int,
    stages: int,
) -> tuple[Jaxpr, int]:
    """The training step of one device, and how many of its arguments are weights (the first ones).

    Devices of many meshes run the same step, so all arguments can be hashed: model and settings are JSON; `rows` of a
    micro-batch have `seq_len` tokens here; `target` is the dtype of the products, the platform, and the capability of a
    GPU; see `_DeviceLayout` for the others.
    """
    graph, settings = _parsed(graph_text), kind.model_validate_json(settings_text)
    parallel, split = ParallelSettings.model_validate_json(parallel_text), split_params(graph, settings)
    layout = _DeviceLayout(_abstract_mesh({}), TABLE, neighbors, stages)  # type: ignore[arg-type]
    dtype, platform, capability = target
    config = ApplyConfig(
        compute_dtype=jnp.dtype(dtype),
        platform=platform,
        capability=capability,
        attention=settings.attention,
        layout=layout,
        ring_attention=parallel.context_attention == "ring",
        planned=True,
    )
    config = with_remat(config, parallel.remat)
    if stages > 1:
        config = Pipeline({}, parallel.pipeline_micro_batches, parallel.pipeline_rounds).adapt(config)
    step = step_of(split, settings, config, seed=0)
    state = abstract_state(split, settings, optimizer_of(split, settings), layout)
    batch = batch_shapes(graph, rows * settings.gradient_accumulation_steps, seq_len)

    def of_weights(weights: Any, rest: TrainState, batch: Any) -> Any:
        params, frozen = weights
        return step(rest._replace(params=params, frozen=frozen), batch)

    weights, rest = (state.params, state.frozen), state._replace(params=None, frozen=None)
    axes = [(name, size) for name, size in (("neighbor", neighbors), ("stage", stages)) if size > 1]
    traced = jax.make_jaxpr(of_weights, axis_env=axes)(weights, rest, batch)
    return traced.jaxpr, len(jax.tree.leaves(weights))


@dataclass(frozen=True, eq=False)
class _DeviceLayout(MeshLayout):
    """The layout of one device, which has everything whole; what goes to others in a run goes over named axes.

    `neighbors` are devices that the positions of a row lie on; the device has one of `pipeline` stages.
    """

    neighbors: int = 1
    pipeline: int = 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _DeviceLayout) and hash(self) == hash(other)

    def __hash__(self) -> int:
        return hash((self.neighbors, self.pipeline))

    @property
    @override
    def stages(self) -> int:
        return self.pipeline

    @property
    @override
    def own_stages(self) -> int:
        return 1

    @override
    def parts(self, *axes: str) -> int:
        return self.neighbors if axes == ("sequence",) else 1

    @override
    def mesh_axes(self, axis: str) -> tuple[str, ...]:
        return ("neighbor",) if axis == "sequence" and self.neighbors > 1 else ()

    @override
    def whole(self, length: int, axis: str) -> int:
        return length * self.parts(axis)

    @override
    def gather_rows(self, x: Array) -> Array:
        return jax.lax.all_gather(x, "stage", tiled=True) if self.pipeline > 1 else x

    @override
    def own_rows(self, x: Array) -> Array:
        return _own_part(x, 0, "stage", self.pipeline) if self.pipeline > 1 else x

    @override
    def resplit(self, x: Array, before: Axes, after: Axes) -> Array:
        if self.neighbors > 1 and "sequence" in before:
            return jax.lax.all_gather(x, "neighbor", axis=before.index("sequence"), tiled=True)
        if self.neighbors > 1 and "sequence" in after:
            return _own_part(x, after.index("sequence"), "neighbor", self.neighbors)
        return x


def _own_part(x: Array, axis: int, over: str, parts: int) -> Array:
    own = x.shape[axis] // parts
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(over) * own, own, axis)
