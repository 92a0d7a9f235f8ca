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
from affinage.parallel.mesh import AXES, make_mesh

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
STAGES = "pipeline"  # the mesh axis of a pipeline
REPLICAS = "data"  # the mesh axis along which stand copies of the model, unless a table splits weights over it
UNSHARDED_TOLERANCE = 0.02  # share of the parameters that may be whole on every device although the mesh splits weights
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
        table = {line: tuple(axis for axis in axes if axis != REPLICAS) for line, axes in self.table.items()}
        return replace(self, table=table)

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
        return replace(self, table={**self.table, "batch": (*self.of_a_stage.table["batch"], STAGES)})

    @property
    def of_a_stage(self) -> "MeshLayout":
        """The layout within one stage, of which a `jax.vmap` computes all."""
        return replace(self, table={**self.table, "batch": tuple(a for a in self.table["batch"] if a != STAGES)})

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


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple) and all(axis is None or isinstance(axis, str) for axis in node)


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, table: Table = TABLE) -> NamedSharding:
    """The split of a batch's arrays along their first axis, the rows."""
    return NamedSharding(mesh, partition_spec(("batch",), mesh, table))


def rows_split(mesh: Mesh, table: Table = TABLE) -> int:
    """Into how many parts a batch's rows are split."""
    return math.prod(mesh.shape[axis] for axis in table["batch"])


def apply_config_on(layout: MeshLayout, attention: AttentionImplementation, settings: ParallelSettings) -> ApplyConfig:
    """How a model is applied on a mesh, as far as a strategy can refuse it."""
    return ApplyConfig(attention=attention, layout=layout, ring_attention=settings.context_attention == "ring")


def param_shardings(
    mesh: Mesh, axes: PyTree, abstract: PyTree, table: Table = TABLE, *, mostly_split: bool = True
) -> PyTree:
    """A NamedSharding for every parameter, of trees of its logical axes and of `jax.ShapeDtypeStruct`.

    Raises:
        UserError: where a size does not divide over its mesh axes, or where more than 2 % of the parameters would be
            whole on every device of a mesh that is there to split them, unless they need not be `mostly_split`.
    """

    def one(path: tuple, shape: jax.ShapeDtypeStruct, axes: LogicalAxes) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if len(axes) != len(shape.shape):
            raise ValueError(f"parameter {name} of shape {shape.shape} has logical axes {axes}")
        spec = partition_spec(axes, mesh, table)
        for size, axis, part in zip(shape.shape, axes, spec, strict=False):
            names = (part,) if isinstance(part, str) else part or ()
            pieces, over = math.prod(mesh.shape[n] for n in names), " x ".join(names)
            if size % pieces:
                # Of as many devices, so that the other axes can take the rest.
                fitting = [n for n in range(1, size + 1) if size % n == 0 and mesh.size % n == 0]
                raise UserError(
                    f"{axis} = {size} of {name} does not divide over {over} = {pieces}",
                    where="mesh",
                    fix=f"{over} = {max(n for n in fitting if n < pieces)} works with {axis} = {size}; "
                    f"{axis} = {multiples(size, pieces, ' or ')} works with {over} = {pieces}.",
                )
        return NamedSharding(mesh, spec)

    shardings = jax.tree_util.tree_map_with_path(one, abstract, axes)
    splitting = [f"{axis} {mesh.shape[axis]}" for axis in ("fsdp", "tensor") if mesh.shape[axis] > 1]
    if mostly_split and splitting:
        sizes = {
            jax.tree_util.keystr(path, simple=True, separator="."): math.prod(leaf.shape)
            for path, leaf in jax.tree_util.tree_leaves_with_path(abstract)
        }
        whole = [
            name
            for name, sharding in zip(sizes, jax.tree.leaves(shardings), strict=True)
            if sharding.is_fully_replicated
        ]
        share = sum(sizes[name] for name in whole) / sum(sizes.values())
        if share > UNSHARDED_TOLERANCE:
            raise UserError(
                f"{share:.1%} of the parameters would be whole on every device although the mesh has "
                f"{' and '.join(splitting)} (the largest is {max(whole, key=lambda name: sizes[name])})",
                where="mesh",
                fix=f"At most {UNSHARDED_TOLERANCE:.0%} may be. Give that parameter logical axes which the table "
                "splits, or use only `data` in the mesh.",
            )
    return shardings


def multiples(size: int, pieces: int, word: str = ", ") -> str:
    """The multiples of `pieces` next to a size."""
    below = size // pieces * pieces
    return word.join(str(n) for n in (below, below + pieces) if n)


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
    table, mesh = serving_table(replacements or {}), make_mesh(sizes, devices)
    folded = mesh.shape[STAGES] * mesh.shape["context"]
    shape = {**mesh.shape, STAGES: 1, "context": 1}
    try:
        mesh = make_mesh(shape | {"fsdp": shape["fsdp"] * folded}, devices)
        return MeshLayout(mesh, table), param_shardings(mesh, axes, abstract, table)
    except UserError:
        if folded == 1:
            raise
    mesh = make_mesh(shape | {"data": shape["data"] * folded}, devices)
    return MeshLayout(mesh, table), param_shardings(mesh, axes, abstract, table)


def serving_table(replacements: Mapping[LogicalAxis, tuple[MeshAxis, ...]]) -> Table:
    """The sharding table of a recipe for generation, in which sequences are whole."""
    return table_with({**replacements, "sequence": (), "residual": ()})


# ---- what does not fit ----


def check_rows_divide(rows: int, micro_batches: int, mesh: Mesh, table: Table = TABLE) -> None:
    """Refuse a batch whose rows, or whose micro-batches' rows, cannot be split evenly over the mesh.

    Raises:
        UserError: naming the nearest batches that work.
    """
    split = rows_split(mesh, table)
    pieces = split * micro_batches
    if rows % pieces == 0:
        return
    axes = [axis for axis in table["batch"] if mesh.shape[axis] > 1] or [table["batch"][0]]
    parts = f"{' x '.join(axes)} = {split}" + (f" times {micro_batches} micro_batches" if micro_batches > 1 else "")
    hint = f"The nearest batches that work: {multiples(rows, pieces)}."
    if fewer := [n for n in range(1, micro_batches) if rows % (split * n) == 0]:
        hint += f" Or gradient_accumulation_steps: {fewer[-1]}."
    if "fsdp" in axes and rows % (pieces // mesh.shape["fsdp"]) == 0:
        rest = ", ".join(axis for axis in table["batch"] if axis != "fsdp")
        lines = f"batch: [{rest}], sequence: [fsdp, context], residual: [fsdp, context]"
        hint += f" Or let fsdp split the sequence: `parallel: {{sharding: {{{lines}}}}}`."
    raise UserError(f"batch {rows} does not divide over {parts}", where="batch_size", fix=hint)


def check_positions_divide(length: int, mesh: Mesh, table: Table = TABLE) -> None:
    """Refuse rows whose positions cannot be split evenly over the mesh.

    Raises:
        UserError: naming the nearest lengths that work.
    """
    for axis in ("sequence", "residual"):
        pieces = math.prod(mesh.shape[name] for name in table[axis])
        if length % pieces:
            raise UserError(
                f"a context of {length} does not divide over {' x '.join(table[axis])} = {pieces}",
                where="packing.seq_len",
                fix=f"The nearest lengths that work: {multiples(length, pieces)}.",
            )


def check_axes_used(graph: Graph, sizes: Mapping[str, int], table: Table) -> None:
    """Refuse a mesh with an axis along which nothing of the model is split, so that all its devices do the same work.

    The axis of a pipeline is left to `Pipeline.check`.

    Raises:
        UserError: naming the nearest mesh that works.
    """
    for axis, size in sizes.items():
        if size > 1 and axis != STAGES and not _lines(graph, axis, table):
            rows = table["batch"][0] if table["batch"] else "data"
            changed = {**sizes, axis: 1, rows: sizes[rows] * size}
            shown = ", ".join(f"{name}: {changed[name]}" for name in AXES if changed[name] > 1)
            raise UserError(
                f"nothing of this model is split along {axis} = {size}: those {size} devices would do the same work",
                where="mesh",
                fix=f"Set `mesh: {{{shown}}}`.",
            )


def without_experts(graph: Graph, table: Table) -> str:
    """A warning of a mesh with the axis `expert`, where it splits no more than the rows; "" where it does."""
    if _lines(graph, "expert", table) != {"batch"}:
        return ""
    return (
        "no node of the model has experts, so `mesh.expert` splits only the rows of a batch, which is what `mesh.data` "
        "is for: give its devices to that, or to `mesh.fsdp`, which splits the weights, too"
    )


def _lines(graph: Graph, axis: str, table: Table) -> set[str]:
    """The lines of the table by which a mesh axis splits something of this model."""
    leaves = jax.tree.leaves(logical_axes(graph), is_leaf=lambda leaf: isinstance(leaf, tuple))
    used = {"batch", *(name for axes in leaves for name in axes if name is not None)}
    if any(SEQUENCE in shape.dims for _, shape in graph.inputs):
        used |= _OF_SEQUENCES
    if "experts" in used:
        used.add("expert_rows")
    return {line for line in used if axis in table[line]}
