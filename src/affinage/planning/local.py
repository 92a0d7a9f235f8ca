"""A run as one device of its mesh sees it: its rows, its part of the model, its share of every weight."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from affinage.config.parallel import ParallelSettings
from affinage.config.training import AttentionImplementation, TrainSettings
from affinage.errors import UserError
from affinage.hardware.mesh import axis_to_free
from affinage.model import Graph, parse
from affinage.model.analysis import Analysis, analyse
from affinage.model.parameter import Parameter, map_parameters
from affinage.parallel.choice import call_on
from affinage.parallel.layout import MeshLayout
from affinage.parallel.mesh import AXES, axis_sizes
from affinage.parallel.pipeline import AXIS as STAGES
from affinage.parallel.pipeline import Pipeline
from affinage.parallel.sharding import Table, check_positions_divide, check_rows_divide, partition_spec, table_with
from affinage.parallel.used_axes import check_axes_used
from affinage.planning.experts import of_one_owner
from affinage.training.frozen import frozen_of
from affinage.training.job import rows_per_step
from affinage.training.layerwise import as_it_is_done, check_remat, check_update


@dataclass(frozen=True)
class Split:
    """A model and its batch, split over a mesh of devices that need not exist.

    Attributes:
        graph: the whole model.
        sizes: devices along each mesh axis.
        rows: of the global batch.
        context: tokens of a row.
        micro_batches: parts that a batch goes through one after the other.
        parallel: how the work is split beside the mesh.
    """

    graph: Graph
    sizes: Mapping[str, int]
    rows: int
    context: int
    micro_batches: int
    parallel: ParallelSettings = field(default_factory=ParallelSettings)

    @property
    def stages(self) -> int:
        """Stages of a pipeline, 1 without one."""
        return self.sizes[STAGES]

    @cached_property
    def pipeline_parts(self) -> int:
        """Micro-batches that are in the pipeline at once."""
        if self.stages == 1:
            return 1
        return self._pipeline.parts(self.rows // self.micro_batches, self.layout)

    @property
    def ticks(self) -> int:
        """How often a stage's layers are gone through in a micro-batch of the step, idle ticks included."""
        return self.pipeline_parts * self.parallel.pipeline_rounds + self.stages - 1 if self.stages > 1 else 1

    @property
    def _pipeline(self) -> Pipeline:
        return Pipeline(micro_batches=self.parallel.pipeline_micro_batches, rounds=self.parallel.pipeline_rounds)

    def check(self, attention: AttentionImplementation) -> None:
        """Refuse what cannot be split like this, with attention computed by `attention`.

        Raises:
            UserError: naming the nearest settings that work.
        """
        check_axes_used(self.graph, self.sizes, self.table)
        check_rows_divide(self.rows, self.micro_batches, self.layout.mesh, self.table)
        check_positions_divide(self.context, self.layout.mesh, self.table)
        if self.stages > 1:
            call = call_on(self.layout, attention, self.parallel)
            self._pipeline.check(self.graph, self.rows // self.micro_batches, call)

    @cached_property
    def table(self) -> Table:
        """Logical axis -> mesh axes."""
        return table_with(self.parallel.sharding)

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.sizes.values())

    @cached_property
    def mesh(self) -> AbstractMesh:
        """The mesh without devices."""
        return AbstractMesh(tuple(self.sizes[a] for a in AXES), AXES, (AxisType.Auto,) * len(AXES))

    @property
    def layout(self) -> MeshLayout:
        """The mesh with its table, as training has it."""
        return MeshLayout(self.mesh, self.table)  # type: ignore[arg-type]

    def parts(self, axis: str) -> int:
        """Into how many parts a logical axis is split."""
        return math.prod(self.sizes[name] for name in self.table[axis])

    @property
    def row_parts(self) -> int:
        """Into how many parts the rows are split."""
        return self.parts("batch")

    @property
    def local_rows(self) -> int:
        """Rows of a micro-batch on one device."""
        return max(1, self.rows // self.micro_batches // self.row_parts)

    @property
    def costs(self) -> Analysis:
        """Operations of every node."""
        return _analysed(json.dumps(self.graph.to_dict()), self.rows, self.context)

    @property
    def local_context(self) -> int:
        """Tokens of a row on one device."""
        return max(1, self.context // self.parts("sequence"))

    @property
    def owners(self) -> int:
        """Devices that experts lie on and that send each other their tokens.

        1 where that is left to XLA's partitioner, as in a pipeline: the experts of a device are then a smaller layer.
        """
        parts = self.parts("experts")
        exchanging = self.parts("batch") == self.parts("expert_rows") * parts
        return parts if exchanging and self.stages == 1 else 1

    @cached_property
    def local_text(self) -> str:
        """JSON of the model that one device multiplies with, but with the experts of all `owners`."""
        graph = self.graph.to_dict()
        for name, entry in graph["nodes"].items():
            self._narrow(entry, self.graph[name].kind)
        return json.dumps(graph)

    @cached_property
    def local_graph(self) -> Graph:
        """The model that one device multiplies with: its heads, hidden units, ids and experts, of all layers."""
        return _parsed(self.local_text, self.owners)

    def _narrow(self, entry: dict[str, Any], kind: Any) -> None:
        if isinstance(entry.get("vocab"), int):
            entry["vocab"] = max(2, entry["vocab"] // self.parts("vocab"))
        attention = getattr(kind, "attention", None)
        if attention is not None:
            (width,) = {shape.width for shape in (self.graph.shapes[entry["in"]],)}
            entry["attention"] |= {
                "heads": max(1, attention.heads // self.parts("heads")),
                "kv_heads": max(1, attention.groups_of // self.parts("kv_heads")),
                "head_dim": attention.head_width(width),
            }
        ffn = entry.get("ffn")
        if isinstance(ffn, dict):
            ffn["width"] = max(1, ffn["width"] // self.parts("ffn"))
            if "experts" in ffn and self.owners == 1:
                ffn["experts"] = max(ffn.get("top_k", 1), ffn["experts"] // self.parts("experts"))

    @cached_property
    def shares(self) -> dict[tuple[int, ...], float]:
        """Shape of a whole weight in `local_graph` -> the part of it that one device holds."""
        held: dict[tuple[int, ...], float] = {}

        def note(whole: Parameter, local: Parameter) -> None:
            spec = partition_spec(whole.axes, self.layout.mesh, self.table)
            elements = math.prod(shard_shape(whole.shape, spec, self.sizes))
            held[local.shape] = min(held.get(local.shape, 1.0), elements / local.size)

        pairs = zip(_declared(self.graph), _declared(self.local_graph), strict=True)
        for whole, local in pairs:
            note(whole, local)
        return held


@lru_cache(maxsize=64)
def _parsed(text: str, owners: int = 1) -> Graph:
    return of_one_owner(parse(json.loads(text)), owners)


@lru_cache(maxsize=16)
def _analysed(graph: str, rows: int, context: int) -> Analysis:
    return analyse(_parsed(graph), rows, context)


def _declared(graph: Graph) -> list[Parameter]:
    found: list[Parameter] = []
    map_parameters(lambda _, parameter: found.append(parameter), graph.parameters)
    return found


def shard_shape(shape: tuple[int, ...], spec: PartitionSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The part of an array of `shape` that one device holds."""
    parts = []
    for index, size in enumerate(shape):
        entry = spec[index] if index < len(spec) else None
        axes = (entry,) if isinstance(entry, str) else entry or ()
        parts.append(-(-size // math.prod(sizes[axis] for axis in axes)))
    return tuple(parts)


def lay_out(
    graph: Graph,
    settings: TrainSettings,
    mesh: Mapping[str, int | str],
    context: int,
    devices: int,
    parallel: ParallelSettings | None = None,
) -> Split:
    """The split of a training run on `devices` devices.

    Raises:
        UserError: as training would: where mesh, batch and model do not divide, with the nearest settings that work.
    """
    sizes = axis_sizes(mesh, devices)
    used = math.prod(sizes.values())
    if used != devices:
        near = " or ".join(f"--set 'mesh={mesh}'" for mesh in nearest_meshes(sizes, devices))
        raise UserError(
            f"the mesh has {used} device{'s' if used > 1 else ''}, the slice {devices}",
            where="mesh",
            fix=f"The nearest meshes: {near}. Or --set mesh.{axis_to_free(mesh)}=auto, which takes all there are.",
        )
    asked = parallel or ParallelSettings()
    check_remat(settings, asked.remat)
    done = as_it_is_done(settings, asked)
    split = Split(graph, sizes, rows_per_step(settings, devices), context, settings.gradient_accumulation_steps, done)
    split.check(settings.attention)
    check_update(frozen_of(graph, settings), settings, in_stages=split.stages > 1)
    return split


def nearest_meshes(sizes: Mapping[str, int], devices: int) -> list[str]:
    """Meshes of so many devices in which one axis differs, the two that change it least; else FSDP alone."""
    found: list[tuple[float, str]] = []
    for axis in AXES:
        others = math.prod(size for name, size in sizes.items() if name != axis)
        if devices % others == 0 and (sizes[axis] > 1 or axis in ("data", "fsdp")):
            changed = {**sizes, axis: devices // others}
            shown = ", ".join(f"{name}: {changed[name]}" for name in AXES if changed[name] > 1)
            found.append((abs(math.log(changed[axis] / sizes[axis])), f"{{{shown}}}"))
    near = list(dict.fromkeys(shown for _, shown in sorted(found, key=lambda pair: pair[0])))
    alone = {name: 1 for name in AXES if sizes[name] > 1} | {"fsdp": devices}  # the sizes that it replaces, too
    return near[:2] or ["{" + ", ".join(f"{name}: {size}" for name, size in alone.items()) + "}"]


def state_bytes(tree: Any, sizes: Mapping[str, int]) -> int:
    """Bytes on one device of a tree of `jax.ShapeDtypeStruct` with shardings."""
    return sum(
        math.prod(shard_shape(leaf.shape, leaf.sharding.spec, sizes)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
