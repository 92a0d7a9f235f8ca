"""The sharding table: which mesh axes each logical axis of an array is split over."""

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from affinage.config.parallel import LogicalAxis, MeshAxis
from affinage.errors import UserError

PyTree = Any
LogicalAxes = tuple[str | None, ...]

# Logical axis -> mesh axes. This is the whole policy; a recipe that wants another replaces lines of it.
TABLE: Mapping[str, tuple[str, ...]] = {
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
}

# Mesh axes that exist in order to split all weights; "expert" and "pipeline" split what has experts and layers.
WEIGHT_AXES = ("fsdp", "tensor")

UNSHARDED_TOLERANCE = 0.02  # share of the parameters that may be whole on every device although the mesh splits weights


Table = Mapping[str, tuple[str, ...]]


def table_with(replacements: Mapping[LogicalAxis, tuple[MeshAxis, ...]]) -> Table:
    """The sharding table with the lines that a recipe replaces.

    Raises:
        UserError: where the rows or the positions of an activation would be split twice over one mesh axis.
    """
    table = {**TABLE, **{str(axis): (*mesh_axes,) for axis, mesh_axes in replacements.items()}}
    if "expert_rows" not in replacements:
        table["expert_rows"] = tuple(axis for axis in table["batch"] if axis not in table["experts"])
    for other in ("sequence", "residual"):
        shared = set(table["batch"]) & set(table[other])
        if shared:
            raise UserError(
                f"both `batch` and `{other}` are split over {sorted(shared)[0]}",
                where="parallel.sharding",
                fix="A mesh axis splits either the rows of a batch or the positions of its sequences.",
            )
    return table


def partition_spec(axes: LogicalAxes, mesh: Mesh, table: Table = TABLE) -> PartitionSpec:
    """The split of an array with the given logical axes; None in `axes` is never split.

    A mesh axis splits an array once: where two logical axes claim it, the one further left has it. Mesh axes of size 1
    are left out, so that specs of equal meaning are equal.
    """
    taken: set[str] = set()
    parts: list[tuple[str, ...] | str | None] = []
    for axis in axes:
        if axis is not None and axis not in table:
            raise ValueError(f"logical axis {axis!r} is not in the sharding table: {', '.join(table)}")
        claimed = [name for name in table[axis] if mesh.shape[name] > 1 and name not in taken] if axis else []
        taken.update(claimed)
        parts.append(None if not claimed else claimed[0] if len(claimed) == 1 else tuple(claimed))
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, table: Table = TABLE) -> NamedSharding:
    """The split of a batch's arrays along their first axis, the rows."""
    return NamedSharding(mesh, partition_spec(("batch",), mesh, table))


def rows_split(mesh: Mesh, table: Table = TABLE) -> int:
    """Into how many parts a batch's rows are split."""
    return math.prod(mesh.shape[axis] for axis in table["batch"])


def param_shardings(
    mesh: Mesh, logical_axes: PyTree, abstract: PyTree, table: Table = TABLE, *, mostly_split: bool = True
) -> PyTree:
    """A NamedSharding for every parameter.

    Args:
        mesh: as `make_mesh` makes it.
        logical_axes: the tree of the parameters with a tuple of logical axis names (or None) for each leaf.
        abstract: the same tree with `jax.ShapeDtypeStruct` leaves.
        table: logical axis -> mesh axes.
        mostly_split: whether to refuse parameters of which much is whole on every device.

    Raises:
        UserError: where a size does not divide over its mesh axes, or where more than 2 % of the parameters would be
            whole on every device of a mesh that is there to split them, unless they need not be `mostly_split`.
    """

    def one(path: tuple, shape: jax.ShapeDtypeStruct, axes: LogicalAxes) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if len(axes) != len(shape.shape):
            raise ValueError(f"parameter {name} of shape {shape.shape} has logical axes {axes}")
        spec = partition_spec(axes, mesh, table)
        _check_divisible(name, shape.shape, axes, spec, mesh)
        return NamedSharding(mesh, spec)

    shardings = jax.tree_util.tree_map_with_path(one, abstract, logical_axes)
    if mostly_split:
        _check_enough_is_sharded(mesh, abstract, shardings)
    return shardings


def _check_divisible(name: str, shape: tuple[int, ...], axes: LogicalAxes, spec: PartitionSpec, mesh: Mesh) -> None:
    for size, axis, part in zip(shape, axes, spec, strict=False):
        names = (part,) if isinstance(part, str) else part or ()
        pieces = math.prod(mesh.shape[n] for n in names)
        if size % pieces:
            # Of as many devices, so that the other axes can take the rest.
            fitting = [n for n in range(1, size + 1) if size % n == 0 and mesh.size % n == 0]
            below = max(n for n in fitting if n < pieces)
            above = min((n for n in fitting if n > pieces), default=below)
            over = " x ".join(names)
            lower, upper = size // pieces * pieces, (size // pieces + 1) * pieces
            sizes = f"{lower} or {upper}" if lower else f"{upper}"
            raise UserError(
                f"{axis} = {size} of {name} does not divide over {over} = {pieces}",
                where="mesh",
                fix=f"{over} = {below}{f' or {above}' if above != below else ''} works with {axis} = {size}; "
                f"{axis} = {sizes} works with {over} = {pieces}.",
            )


def _check_enough_is_sharded(mesh: Mesh, abstract: PyTree, shardings: PyTree) -> None:
    """Refuse a run in which memory that the mesh should have split is held whole by every device."""
    splitting = [axis for axis in WEIGHT_AXES if mesh.shape[axis] > 1]
    if not splitting:
        return
    leaves = jax.tree_util.tree_leaves_with_path(abstract)
    whole = {
        jax.tree_util.keystr(path, simple=True, separator="."): math.prod(leaf.shape)
        for (path, leaf), sharding in zip(leaves, jax.tree.leaves(shardings), strict=True)
        if sharding.is_fully_replicated
    }
    share = sum(whole.values()) / sum(math.prod(leaf.shape) for _, leaf in leaves)
    if share > UNSHARDED_TOLERANCE:
        largest = max(whole, key=lambda name: whole[name])
        raise UserError(
            f"{share:.1%} of the parameters would be whole on every device although the mesh has "
            f"{' and '.join(f'{axis} {mesh.shape[axis]}' for axis in splitting)} (the largest is {largest})",
            where="mesh",
            fix=f"At most {UNSHARDED_TOLERANCE:.0%} may be. Give that parameter logical axes which the table splits, "
            "or use only `data` in the mesh.",
        )


def check_rows_divide(rows: int, micro_batches: int, mesh: Mesh, table: Table = TABLE) -> None:
    """Refuse a batch whose rows, or whose micro-batches' rows, cannot be split evenly over the mesh.

    Raises:
        UserError: naming the nearest batches that work.
    """
    pieces = rows_split(mesh, table) * micro_batches
    if rows % pieces:
        lower, upper = rows // pieces * pieces, (rows // pieces + 1) * pieces
        axes = [axis for axis in table["batch"] if mesh.shape[axis] > 1] or [table["batch"][0]]
        parts = f"{' x '.join(axes)} = {rows_split(mesh, table)}"
        parts += f" times {micro_batches} micro_batches" if micro_batches > 1 else ""
        rest = [axis for axis in table["batch"] if axis != "fsdp"]
        hint = f"The nearest batches that work: {f'{lower}, ' if lower else ''}{upper}."
        fewer = [n for n in range(1, micro_batches) if rows % (rows_split(mesh, table) * n) == 0]
        hint += f" Or gradient_accumulation_steps: {fewer[-1]}." if fewer else ""
        if "fsdp" in axes and rows % (pieces // mesh.shape["fsdp"]) == 0:
            hint += (
                f" Or let fsdp split the sequence: `parallel: {{sharding: {{batch: [{', '.join(rest)}], "
                "sequence: [fsdp, context], residual: [fsdp, context]}}`."
            )
        raise UserError(f"batch {rows} does not divide over {parts}", where="batch_size", fix=hint)


def check_positions_divide(length: int, mesh: Mesh, table: Table = TABLE) -> None:
    """Refuse rows whose positions cannot be split evenly over the mesh.

    Raises:
        UserError: naming the nearest lengths that work.
    """
    for axis in ("sequence", "residual"):
        pieces = math.prod(mesh.shape[name] for name in table[axis])
        if length % pieces:
            lower, upper = length // pieces * pieces, (length // pieces + 1) * pieces
            raise UserError(
                f"a context of {length} does not divide over {' x '.join(table[axis])} = {pieces}",
                where="packing.seq_len",
                fix=f"The nearest lengths that work: {f'{lower}, ' if lower else ''}{upper}.",
            )
