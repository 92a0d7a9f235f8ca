"""A training step as one device of a mesh runs it: its rows, its part of the model, and the trace of its program."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import jax
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jaxtyping import Array

from affinage.config.training import ParallelSettings, TrainSettings
from affinage.hardware.chips import Slice
from affinage.hardware.devices import measured_speed
from affinage.model import ApplyConfig, Graph, parse
from affinage.model.apply_config import HOPPER, with_remat
from affinage.model.forward import batch_shapes
from affinage.model.layer import Axes
from affinage.model.layers.kernels import queries_are_split
from affinage.parallel.sharding import AXES, STAGES, TABLE, MeshLayout, axis_sizes, table_with
from affinage.parallel.strategy import Pipeline
from affinage.planning.trace import Traced, Weights, padding, walk
from affinage.training.layerwise import LAYERWISE_REMAT, check_update
from affinage.training.state import TrainState, abstract_state, split_params
from affinage.training.trainer import compute_dtype, optimizer_of, rows_per_step, step_of

_WIDER_UNITS = ("TPU v6e", "TPU7x")  # whose matrix unit is 256 x 256; that of older TPUs is 128 x 128
_BEFORE_HOPPER = frozenset({"A100 80GB", "A100 40GB", "L4"})
_traces: dict[tuple[Any, ...], tuple[Jaxpr, int]] = {}  # devices of many meshes run the same step


@dataclass(frozen=True)
class PerDevice:
    """A model and its batch, divided over a mesh of devices that need not exist."""

    graph: Graph  # the whole model
    settings: TrainSettings
    sizes: Mapping[str, int]  # devices along each mesh axis
    rows: int  # sequences of the global batch
    seq_len: int  # tokens of a row
    parallel: ParallelSettings  # how the work is split beside the mesh
    where: Slice  # the devices

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
        return MeshLayout(_abstract_mesh(self.sizes), table_with(self.parallel.sharding))

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
        graph = self.graph.to_dict()
        for name, entry in graph["nodes"].items():
            node = self.graph[name]
            if isinstance(entry.get("vocab"), int):
                entry["vocab"] = max(2, entry["vocab"] // self.layout.parts("vocab"))
            attention, ffn = getattr(node.layer, "attention", None), entry.get("ffn")
            if attention is not None:
                entry["attention"] |= {
                    "heads": max(1, attention.heads // self.layout.parts("heads")),
                    "kv_heads": max(1, attention.groups_of // self.layout.parts("kv_heads")),
                    "head_dim": attention.head_width(node.takes[0].width),
                }
            if isinstance(ffn, dict):
                ffn["width"] = max(1, ffn["width"] // self.layout.parts("ffn"))
                if "experts" in ffn:
                    ffn["experts"] = max(ffn.get("top_k", 1), ffn["experts"] // self.layout.parts("experts"))
            if "repeat" in entry:
                entry["repeat"] //= self.stages
            elif node.hidden and node.takes == (self.graph.shapes[name],) and self.where.platform != "cpu":
                entry["repeat"] = 1  # a layer that is written out is planned as one that is repeated
            if "repeat" in entry and self.where.platform == "gpu":
                entry["scan"] = True  # of unrolled layers, each would seem to read the arrays of all of them
        return _parsed(json.dumps(graph))

    @cached_property
    def state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state of the whole model; raises UserError if a size does not divide."""
        split = split_params(self.graph, self.settings)
        return abstract_state(split, self.settings, optimizer_of(split, self.settings), self.layout)

    def bytes_of(self, tree: Any) -> int:
        """Bytes on one device of a part of the state."""
        leaves = jax.tree.leaves(tree)
        return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)

    @cached_property
    def apply_config(self) -> ApplyConfig:
        """How the whole model is applied, without `remat` and what a pipeline makes of it."""
        on_gpu, old = self.where.platform == "gpu", self.where.chip.name in _BEFORE_HOPPER
        return ApplyConfig(
            compute_dtype=compute_dtype(self.settings.precision, self.where.chip),
            attention=self.settings.attention,
            platform=self.where.platform,
            capability=((8, 0) if old else HOPPER) if on_gpu else None,
            layout=self.layout,
            ring_attention=self.parallel.context_attention == "ring",
        )

    @property
    def matrix_unit(self) -> int:
        """Rows and columns that a TPU multiplies at once; 1 on other chips, whose units are smaller than any model."""
        return 1 if self.where.platform != "tpu" else 256 if self.where.chip.name in _WIDER_UNITS else 128

    @cached_property
    def traced(self) -> Traced:
        """The operations of the step of one device; all devices have equal ones."""
        # What of the parallel settings is in the shapes, or not in the program.
        elsewhere = {"sharding", "xla_flags", "pipeline_micro_batches"}
        program = (self.local_graph, self.settings.model_dump_json(), self.parallel.model_dump_json(exclude=elsewhere))
        shape = (self.local_rows // self.stages, self.local_seq_len, self.layout.parts("sequence"), self.stages)
        config, parts = self.apply_config, self.pipeline_parts
        key = (*program, *shape, parts, str(config.compute_dtype), config.platform, config.capability)
        if key not in _traces:
            _traces[key] = self._trace()
        jaxpr, count = _traces[key]
        shares: dict[tuple[int, ...], float] = {}
        pairs = zip(jax.tree.leaves(self.graph.parameters), jax.tree.leaves(self.local_graph.parameters), strict=True)
        for whole, local in pairs:
            own = NamedSharding(self.layout.mesh, self.layout.spec(whole.axes)).shard_shape(whole.shape)
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
        return walk(jaxpr, self.where.platform, weights)

    def _trace(self) -> tuple[Jaxpr, int]:
        """The training step of one device, and how many of its arguments are weights (the first ones)."""
        graph, settings, neighbors = self.local_graph, self.settings, self.layout.parts("sequence")
        split, layout = split_params(graph, settings), _DeviceLayout(_abstract_mesh({}), TABLE, neighbors, self.stages)
        config = with_remat(replace(self.apply_config, layout=layout, planned=True), self.parallel.remat)
        if self.stages > 1:
            config = replace(self.pipeline, micro_batches=self.pipeline_parts).adapt(config)
        step = step_of(split, settings, config, seed=0)
        state = abstract_state(split, settings, optimizer_of(split, settings), layout)
        batch = batch_shapes(graph, self.local_rows // self.stages * self.micro_batches, self.local_seq_len)

        def of_weights(weights: Any, rest: TrainState, batch: Any) -> Any:
            params, frozen = weights
            return step(rest._replace(params=params, frozen=frozen), batch)

        weights, rest = (state.params, state.frozen), state._replace(params=None, frozen=None)
        axes = [(name, size) for name, size in (("neighbor", neighbors), ("stage", self.stages)) if size > 1]
        traced = jax.make_jaxpr(of_weights, axis_env=axes)(weights, rest, batch)
        return traced.jaxpr, len(jax.tree.leaves(weights))

    def _kernel_flops(self, node: Any) -> float:
        """Operations of one product of a kernel of attention, on the device whose queries see most keys."""
        attention = getattr(node.layer, "attention", None)
        if attention is None:
            return 0.0
        head, first = attention.head_width(self.graph.shapes[node.inputs[0]].width), 0
        if self.where.platform == "tpu" and queries_are_split(self.seq_len, self.layout.parts("sequence")):
            first = self.seq_len - self.local_seq_len
        pairs, rows = attention.pairs(self.seq_len, first), self.local_rows / self.pipeline_parts
        return 2.0 * rows * attention.heads * pairs * head * padding(head, self.matrix_unit)


def per_device(
    graph: Graph,
    settings: TrainSettings,
    mesh: Mapping[Any, int | str],
    seq_len: int,
    where: Slice,
    parallel: ParallelSettings,
) -> PerDevice:
    """Divide a training over the devices of a slice; UserError, as of a training: mesh, batch, model do not divide."""
    sizes = axis_sizes(mesh, where.devices, all_of_them=True)
    if where.platform == "cpu":
        flops, bandwidth = measured_speed()
        chip = replace(where.chip, float32_flops=flops, memory_bandwidth=bandwidth)
        where = replace(where, chip=chip)
    if all(name != "tokens" for name, _ in graph.inputs):
        seq_len = 1
    if settings.optimizer_in_backward:
        parallel = parallel.model_copy(update={"remat": LAYERWISE_REMAT})
    rows = rows_per_step(settings, where.devices)
    device = PerDevice(graph, settings, sizes, rows, seq_len, parallel, where)
    device.layout.check(graph, rows, device.micro_batches, seq_len)
    if device.stages > 1:
        device.pipeline.check(graph, rows // device.micro_batches, device.layout)
    check_update(split_params(graph, settings), settings, in_stages=device.stages > 1)
    return device


def _abstract_mesh(sizes: Mapping[str, int]) -> Any:  # in the place of a Mesh
    return AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES, (AxisType.Auto,) * len(AXES))


@lru_cache(maxsize=64)
def _parsed(text: str) -> Graph:
    return parse(json.loads(text))


@dataclass(frozen=True)
class _DeviceLayout(MeshLayout):
    """The layout of one device, which has everything whole; what goes to others in a run goes over named axes."""

    neighbors: int = 1  # devices that the positions of a row lie on
    pipeline: int = 1  # stages, of which the device has one

    @property
    def stages(self) -> int:
        return self.pipeline

    def parts(self, *axes: str) -> int:
        return self.neighbors if axes == ("sequence",) else 1

    def mesh_axes(self, axis: str) -> tuple[str, ...]:
        return ("neighbor",) if axis == "sequence" and self.neighbors > 1 else ()

    def whole(self, length: int, axis: str) -> int:
        return length * self.parts(axis)

    def gather_rows(self, x: Array) -> Array:
        return jax.lax.all_gather(x, "stage", tiled=True) if self.pipeline > 1 else x

    def own_rows(self, x: Array) -> Array:
        return _own_part(x, 0, "stage", self.pipeline) if self.pipeline > 1 else x

    def resplit(self, x: Array, before: Axes, after: Axes) -> Array:
        if self.neighbors > 1 and "sequence" in before:
            return jax.lax.all_gather(x, "neighbor", axis=before.index("sequence"), tiled=True)
        if self.neighbors > 1 and "sequence" in after:
            return _own_part(x, after.index("sequence"), "neighbor", self.neighbors)
        return x


def _own_part(x: Array, axis: int, over: str, parts: int) -> Array:
    own = x.shape[axis] // parts
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(over) * own, own, axis)
