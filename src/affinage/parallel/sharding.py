"""Sharding: one table from the logical axes of arrays to the axes of the mesh, and all that follows from it."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from affinage.config.parallel import LogicalAxis, MeshAxis, ParallelSettings
from affinage.config.training import AttentionImplementation
from affinage.errors import UserError
from affinage.model.apply_config import ApplyConfig, Layout
from affinage.model.forward import logical_axes
from affinage.model.graph import Graph
from affinage.model.layer import SEQUENCE
from affinage.parallel.mesh import make_mesh

PyTree = Any
LogicalAxes = tuple[str | None, ...]
Table = Mapping[str, tuple[str, ...]]

# Logical axis -> mesh axes. This is the whole policy; a recipe that wants another replaces lines of it.
TABLE: Table = {
    # activations
    "batch": ("data", "fsdp", "expert"),
    "sequence": ("context",),  # of what goes through the matrices
    "residual": ("context",),  # the sequence between them; with "tensor" norms are sequence-sharded, too
    "keys": (),  # the sequence of keys and values: whole, as every query may look at all of them
    "width": (),
    "expert_rows": ("data", "fsdp"),  # rows of the experts' buffers: the axis "expert" splits these by expert
    # weights, and the activations that have their axes
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "ffn": ("tensor",),
    "vocab": ("tensor",),
    "experts": ("expert",),
    "layers": ("pipeline",),
    "stages": ("pipeline",),
}
STAGES = "pipeline"  # the mesh axis along which stand the stages of a pipeline
REPLICAS = "data"  # the mesh axis along which stand copies of the model, unless a table splits weights over it
_OF_SEQUENCES = frozenset({"sequence", "residual", "keys", "width"})  # logical axes of activations alone


def table_with(replacements: Mapping[LogicalAxis, tuple[MeshAxis, ...]]) -> Table:
    """The sharding table with the lines that a recipe replaces.

    Raises:
        UserError: where the rows or the positions of an activation would be split twice over one mesh axis.
    """
    table = {**TABLE, **{str(axis): (*mesh_axes,) for axis, mesh_axes in replacements.items()}}
    if "expert_rows" not in replacements:
        table["expert_rows"] = tuple(axis for axis in table["batch"] if axis not in table["experts"])
    for other in ("sequence", "residual"):
        if shared := sorted(set(table["batch"]) & set(table[other])):
            raise UserError(
                f"both `batch` and `{other}` are split over {shared[0]}",
                where="parallel.sharding",
                fix="A mesh axis splits either the rows of a batch or the positions of its sequences.",
            )
    return table


def partition_spec(axes: LogicalAxes, mesh: Mesh, table: Table = TABLE, without: Collection[str] = ()) -> PartitionSpec:
    """The split of an array with the given logical axes; None in `axes` is never split.

    A mesh axis splits an array once: where two logical axes claim it, the one further left has it. Mesh axes of size 1
    are left out, so that specs of equal meaning are equal, and so are those of `without`.
    """
    taken: set[str] = set()
    parts: list[tuple[str, ...] | str | None] = []
    for axis in axes:
        if axis is not None and axis not in table:
            raise ValueError(f"logical axis {axis!r} is not in the sharding table: {', '.join(table)}")
        claimed = [name for name in table[axis] if mesh.shape[name] > 1 and name not in taken] if axis else []
        taken.update(claimed)
        names = [name for name in claimed if name not in without]
        parts.append(tuple(names) if len(names) > 1 else names[0] if names else None)
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


@dataclass(frozen=True, eq=False)
class MeshLayout(Layout):
    """Arrays split over a mesh as the table says.

    Without pins XLA may gather the rows instead of the weights, and hold every device's activations on each.
    """

    mesh: Mesh
    table: Table = field(default_factory=lambda: TABLE)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MeshLayout) and (self.mesh, dict(self.table)) == (other.mesh, dict(other.table))

    def __hash__(self) -> int:
        return hash((self.mesh, frozenset(self.table.items())))

    @property
    def replicas(self) -> int:
        """Copies of the model along REPLICAS, each with rows of its own; 1 where that axis splits anything else."""
        lines = {line for line, axes in self.table.items() if REPLICAS in axes}
        outermost = self.table["batch"][:1] == (REPLICAS,)
        return self.mesh.shape[REPLICAS] if outermost and lines <= {"batch", "expert_rows"} else 1

    @property
    def of_a_replica(self) -> "MeshLayout":
        """The layout within one of the copies, of which a `jax.vmap` computes all."""
        return replace(self, table={line: _without(axes, REPLICAS) for line, axes in self.table.items()})

    # ---- stages of a pipeline ----

    @property
    def stages(self) -> int:
        """Stages of a pipeline, 1 without one."""
        return self.mesh.shape[STAGES]

    @property
    def own_stages(self) -> int:
        """Stages that the arrays of the program show: all; a plan's show one device's."""
        return self.stages

    @property
    def beside_stages(self) -> "MeshLayout":
        """The layout of nodes that are no stages: the devices of the pipeline split their rows, too."""
        return replace(self, table={**self.table, "batch": (*self.table["batch"], STAGES)})

    @property
    def of_a_stage(self) -> "MeshLayout":
        """The layout within one stage, of which a `jax.vmap` computes all."""
        return replace(self, table={**self.table, "batch": _without(self.table["batch"], STAGES)})

    def gather_rows(self, x: Float[Array, "B ..."]) -> Array:
        """See `Layout.gather_rows`."""
        return self.of_a_stage._pin_first(x, "batch") if self.stages > 1 else x

    def own_rows(self, x: Float[Array, "B ..."]) -> Array:
        """See `Layout.own_rows`."""
        return self._pin_first(x, "batch") if self.stages > 1 else x

    def at_first_stage(self, x: Float[Array, "M b ..."]) -> Float[Array, "P M b ..."]:
        """An array on the devices of the first stage, and zeros on the others'."""
        return self.pin_stages(jnp.pad(x[None], ((0, self.own_stages - 1), *[(0, 0)] * x.ndim)))

    def pin_stages(self, x: Float[Array, "P ..."]) -> Array:
        """Pins the first axis to the stages."""
        return self._pin_first(x, "stages") if self.own_stages > 1 else x

    def _pin_first(self, x: Array, axis: str) -> Array:
        """Pins the first axis alone; XLA splits the others."""
        (first,) = partition_spec((axis,), self.mesh, self.table) or (None,)
        spec = PartitionSpec(first, *(PartitionSpec.UNCONSTRAINED,) * (x.ndim - 1))
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def constrain(self, x: Array, axes: LogicalAxes) -> Array:
        """See `Layout.constrain`."""
        if self.mesh.size == 1:
            return x
        return jax.lax.with_sharding_constraint(
            x, NamedSharding(self.mesh, partition_spec(axes, self.mesh, self.table))
        )

    def mesh_axes(self, axis: str) -> tuple[str, ...]:
        """See `Layout.mesh_axes`."""
        return tuple(name for name in self.table[axis] if self.mesh.shape[name] > 1)

    def parts(self, *axes: str) -> int:
        """See `Layout.parts`; a mesh axis splits an array once, however many of its axes claim it."""
        return math.prod(self.mesh.shape[name] for name in {name for axis in axes for name in self.table[axis]})

    def mapped(
        self, function: Callable[..., Any], inputs: Sequence[Any], outputs: Any, *, over: Collection[str] | None = None
    ) -> Callable[..., Any]:
        """See `Layout.mapped`."""
        every = set(self.mesh.axis_names)
        apart = every if over is None else {STAGES, *(name for axis in over for name in self.mesh_axes(axis))}
        if self.mesh.size == 1 or all(self.mesh.shape[name] == 1 for name in apart):
            return function

        def specs(tree: Any) -> Any:
            return jax.tree.map(
                lambda axes: partition_spec(axes, self.mesh, self.table, every - apart), tree, is_leaf=_is_axes
            )

        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=specs(tuple(inputs)),
            out_specs=specs(outputs),
            axis_names=apart,
            check_vma=over is not None,  # a kernel's result does not say over which axes it varies
        )


def _without(axes: tuple[str, ...], removed: str) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis != removed)


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple) and all(axis is None or isinstance(axis, str) for axis in node)


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, table: Table = TABLE) -> NamedSharding:
    """The split of a batch's arrays along their first axis, the rows."""
    return NamedSharding(mesh, partition_spec(("batch",), mesh, table))


def apply_config_on(layout: MeshLayout, attention: AttentionImplementation, settings: ParallelSettings) -> ApplyConfig:
    """How a model is applied on a mesh, as far as a strategy can refuse it."""
    return ApplyConfig(attention=attention, layout=layout, ring_attention=settings.context_attention == "ring")


def param_shardings(mesh: Mesh, axes: PyTree, abstract: PyTree, table: Table = TABLE) -> PyTree:
    """A NamedSharding for every parameter, of trees of its logical axes and of `jax.ShapeDtypeStruct`.

    Raises:
        UserError: where a size does not divide over its mesh axes.
    """

    def one(path: tuple, shape: jax.ShapeDtypeStruct, axes: LogicalAxes) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if len(axes) != len(shape.shape):
            raise ValueError(f"parameter {name} of shape {shape.shape} has logical axes {axes}")
        spec = partition_spec(axes, mesh, table)
        for size, axis, part in zip(shape.shape, axes, spec, strict=False):
            over = (part,) if isinstance(part, str) else part or ()
            require_divisible(f"{axis} = {size} of {name}", size, over, mesh, where="mesh")
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(one, abstract, axes)


def serving_layout(
    sizes: Mapping[str, int | str],
    devices: Sequence[jax.Device],
    axes: Any,
    abstract: Any,
    replacements: Mapping[LogicalAxis, tuple[MeshAxis, ...]] | None = None,
) -> tuple[MeshLayout, Any]:
    """How a model is used that was trained on a mesh of these sizes: the layout, and its parameters' shardings.

    Generation has neither stages nor long sequences to split: the devices of `pipeline` and `context` split the
    weights as `fsdp` does, or, where a width does not divide, hold copies as `data`. `replacements` are the lines of
    the sharding table that the recipe has replaced.
    """
    table, shape = serving_table(replacements or {}), dict(make_mesh(sizes, devices).shape)
    folded = shape[STAGES] * shape["context"]
    shape |= {STAGES: 1, "context": 1}
    mesh = make_mesh(shape | {"fsdp": shape["fsdp"] * folded}, devices)
    try:
        return MeshLayout(mesh, table), param_shardings(mesh, axes, abstract, table)
    except UserError:
        mesh = make_mesh(shape | {"data": shape["data"] * folded}, devices)
        return MeshLayout(mesh, table), param_shardings(mesh, axes, abstract, table)


def serving_table(replacements: Mapping[LogicalAxis, tuple[MeshAxis, ...]]) -> Table:
    """The sharding table of a recipe for generation, in which sequences are whole."""
    return table_with({**replacements, "sequence": (), "residual": ()})


# ---- what does not fit ----


def multiples(size: int, pieces: int) -> str:
    """The multiples of `pieces` next to a size."""
    below = size // pieces * pieces
    return " or ".join(str(n) for n in (below, below + pieces) if n)


def require_divisible(
    what: str, size: int, axes: Sequence[str], mesh: Mesh, *, where: str, times: int = 1, fix: str = ""
) -> None:
    """Refuse a size that `times` the devices along mesh `axes` do not divide.

    Raises:
        UserError: naming the nearest sizes that work, and `fix`.
    """
    pieces = math.prod(mesh.shape[axis] for axis in axes)
    if size % (pieces * times):
        split = f"{' x '.join(axes)} = {pieces}" + (f" times {times} micro-batches" if times > 1 else "")
        nearest = f"The nearest that work: {multiples(size, pieces * times)}. {fix}"
        raise UserError(f"{what} does not divide over {split}", where=where, fix=nearest.strip())


def check_rows_divide(rows: int, micro_batches: int, mesh: Mesh, table: Table = TABLE) -> None:
    """Refuse a batch of which micro-batches cannot be split evenly over the mesh; raises UserError."""
    axes = [axis for axis in table["batch"] if mesh.shape[axis] > 1]
    fix = "With few rows, fsdp can split the sequence: see docs/parallel.md." if "fsdp" in axes else ""
    require_divisible(f"batch {rows}", rows, axes, mesh, where="batch_size", times=micro_batches, fix=fix)


def check_positions_divide(length: int, mesh: Mesh, table: Table = TABLE) -> None:
    """Refuse rows whose positions cannot be split evenly over the mesh; raises UserError."""
    for axis in ("sequence", "residual"):
        require_divisible(f"a context of {length}", length, table[axis], mesh, where="packing.seq_len")


def check_axes_used(graph: Graph, sizes: Mapping[str, int], table: Table) -> None:
    """Refuse a mesh with an axis along which nothing of the model is split, so that all its devices do the same work.

    The axis of a pipeline is left to `Pipeline.check`.

    Raises:
        UserError: naming the axis.
    """
    leaves = jax.tree.leaves(logical_axes(graph), is_leaf=lambda leaf: isinstance(leaf, tuple))
    used = {"batch", *(name for axes in leaves for name in axes if name is not None)}
    if any(SEQUENCE in shape.dims for _, shape in graph.inputs):
        used |= _OF_SEQUENCES
    for axis, size in sizes.items():
        if size > 1 and axis != STAGES and not any(axis in table[line] for line in used):
            raise UserError(
                f"nothing of this model is split along {axis} = {size}: those {size} devices would do the same work",
                where="mesh",
                fix="Give them to data or fsdp.",
            )
