"""The mesh, and one table from the logical axes of arrays to its axes, with all that follows from it."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from affinage.config.training import LogicalAxis, MeshAxis
from affinage.errors import UserError
from affinage.model.apply_config import Axes, Layout
from affinage.model.graph import Graph
from affinage.model.layer import SEQUENCE

PyTree = Any
Table = Mapping[str, tuple[str, ...]]
Lines = Mapping[LogicalAxis, tuple[MeshAxis, ...]]  # of a table, which a recipe replaces

# Axes of a mesh, outermost first: neighbors along `tensor` exchange the most, so they get the devices that are nearest
# to each other.
AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")

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


def make_mesh(sizes: Mapping[str, int | str], devices: Sequence[jax.Device]) -> Mesh:
    """A mesh with every axis of `AXES`, whose sizes are those of `axis_sizes`; `devices` are of all hosts."""
    shape = tuple(axis_sizes(sizes, len(devices), all_of_them=jax.process_count() > 1).values())
    # On a TPU the grid follows the wires of the torus; elsewhere it is the order of the devices.
    grid = mesh_utils.create_device_mesh(shape, devices[: math.prod(shape)], allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))


def axis_sizes(sizes: Mapping[str, int | str], count: int, *, all_of_them: bool) -> dict[str, int]:
    """The sizes of all `AXES` on `count` devices: 1 by default, and "auto" takes what the others leave.

    Without `all_of_them` some devices may be left over. UserError: two are auto, or the sizes do not fit the devices.
    """
    fixed = dict.fromkeys(AXES, 1) | {axis: int(size) for axis, size in sizes.items() if size != "auto"}
    free, used = [axis for axis, size in sizes.items() if size == "auto"], math.prod(fixed.values())
    fits = count % used == 0 if free else used == count or (used < count and not all_of_them)
    if fits and len(free) < 2:
        return fixed | dict.fromkeys(free, count // used)
    made = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    widest = "data" if used <= count else max(fixed, key=lambda axis: fixed[axis])
    axis = free[0] if free else widest
    fix = f"Let one axis be auto (--set mesh.{axis}=auto, --mesh {axis}=auto), and the others divide the {count}."
    raise UserError(f"the mesh {made or 'of 1 device'} does not fit {count} devices", where="mesh", fix=fix)


def table_with(replaced: Lines) -> Table:
    """The sharding table with the lines that a recipe replaces; UserError: an axis would split rows and positions."""
    table = {**TABLE, **{str(axis): (*mesh_axes,) for axis, mesh_axes in replaced.items()}}
    if "expert_rows" not in replaced:
        table["expert_rows"] = tuple(axis for axis in table["batch"] if axis not in table["experts"])
    for other in ("sequence", "residual"):
        if shared := sorted(set(table["batch"]) & set(table[other])):
            what, fix = f"both `batch` and `{other}` are split over {shared[0]}", "A mesh axis splits one of the two."
            raise UserError(what, where="parallel.sharding", fix=fix)
    return table


@dataclass(frozen=True)
class MeshLayout(Layout):
    """Arrays split over a mesh as the table says; without pins XLA may gather the rows instead of the weights."""

    mesh: Mesh
    table: Table = field(default_factory=lambda: TABLE, hash=False)

    def spec(self, axes: Axes, without: Collection[str] = ()) -> PartitionSpec:
        """The split of an array with these logical axes. Of two that claim a mesh axis, the one further left has it.

        Mesh axes of size 1 are left out, so that specs of equal meaning are equal, and so are those of `without`.
        """
        taken: set[str] = set()
        parts: list[tuple[str, ...]] = []
        for axis in axes:
            names = [name for name in self.mesh_axes(axis) if name not in taken] if axis else []
            taken.update(names)
            parts.append(tuple(name for name in names if name not in without))
        while parts and not parts[-1]:
            parts.pop()
        return PartitionSpec(*parts)

    @cached_property
    def batch_sharding(self) -> NamedSharding:
        """The split of a batch's arrays along their first axis, the rows."""
        return NamedSharding(self.mesh, self.spec(("batch",)))

    def param_shardings(self, axes: PyTree, abstract: PyTree) -> PyTree:
        """A NamedSharding for every parameter, by logical axes and `jax.ShapeDtypeStruct`s. UserError: one has none."""

        def one(path: tuple, shape: jax.ShapeDtypeStruct, axes: Axes) -> NamedSharding:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            spec = self.spec(axes)
            for size, axis, part in zip(shape.shape, axes, spec, strict=False):
                over = (part,) if isinstance(part, str) else part or ()
                self._require_divisible(f"{axis} = {size} of {name}", size, over, where="mesh")
            return NamedSharding(self.mesh, spec)

        return jax.tree_util.tree_map_with_path(one, abstract, axes)

    def check(self, graph: Graph, rows: int, micro_batches: int, seq_len: int, where: str = "packing.seq_len") -> None:
        """Refuse, by a UserError, rows of `seq_len` tokens (0: none) that do not split, and axes that split nothing."""
        self.check_rows(rows, micro_batches)
        used = {"batch", *(name for parameter in jax.tree.leaves(graph.parameters) for name in parameter.axes if name)}
        if any(SEQUENCE in shape.dims for _, shape in graph.inputs):
            used |= {"sequence", "residual", "keys", "width"}  # of activations alone
        for axis, size in self.mesh.shape.items():
            if size > 1 and not any(axis in self.table[line] for line in used):
                what = f"nothing of this model is split along {axis} = {size}"
                fix = f"Give those {size} devices, which would do the same work, to data or fsdp."
                raise UserError(what, where="mesh", fix=fix)
        for line in ("sequence", "residual"):
            self._require_divisible(f"a context of {seq_len}", seq_len, self.table[line], where=where)

    def check_rows(self, rows: int, micro_batches: int) -> None:
        """Refuse, by a UserError, a batch of which micro-batches do not split evenly over the mesh."""
        what, axes = f"batch {rows} of all devices", self.mesh_axes("batch")
        self._require_divisible(what, rows, axes, where="batch_size", times=micro_batches)

    def _require_divisible(self, what: str, size: int, axes: Sequence[str], *, where: str, times: int = 1) -> None:
        pieces = math.prod(self.mesh.shape[axis] for axis in axes)
        if size % (pieces * times):
            split = [f"{' x '.join(axes)} = {pieces}"] if axes else []
            split += [f"{times} micro-batches"] if times > 1 else []
            other = f", or {' x '.join(axes)} of a size that divides {size}" if where == "mesh" else ""
            nearest = f"The nearest that work: {multiples(size, pieces * times)}{other}."
            raise UserError(f"{what} does not divide over {' times '.join(split)}", where=where, fix=nearest)

    @property
    def replicas(self) -> int:
        """Copies of the model along REPLICAS, each with rows of its own; 1 where that axis splits anything else."""
        lines = {line for line, axes in self.table.items() if REPLICAS in axes}
        outermost = self.table["batch"][:1] == (REPLICAS,)
        return self.mesh.shape[REPLICAS] if outermost and lines <= {"batch", "expert_rows"} else 1

    def without(self, removed: str) -> "MeshLayout":
        """The layout along the other mesh axes, of what a `jax.vmap` computes side by side along this one."""
        lines = {line: tuple(axis for axis in axes if axis != removed) for line, axes in self.table.items()}
        return replace(self, table=lines)

    def constrain(self, x: Array, axes: Axes) -> Array:
        if self.mesh.size == 1:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, self.spec(axes)))

    def mesh_axes(self, axis: str) -> tuple[str, ...]:
        return tuple(name for name in self.table[axis] if self.mesh.shape[name] > 1)

    def parts(self, *axes: str) -> int:
        return math.prod(self.mesh.shape[name] for name in {name for axis in axes for name in self.table[axis]})

    def mapped(
        self, function: Callable[..., Any], inputs: Sequence[Any], outputs: Any, *, over: Collection[str] | None = None
    ) -> Callable[..., Any]:
        every = set(AXES)
        apart = every if over is None else {STAGES, *(name for axis in over for name in self.mesh_axes(axis))}
        if all(self.mesh.shape[name] == 1 for name in apart):
            return function

        def is_axes(node: Any) -> bool:
            return isinstance(node, tuple) and all(axis is None or isinstance(axis, str) for axis in node)

        specs = partial(jax.tree.map, partial(self.spec, without=every - apart), is_leaf=is_axes)
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=specs(tuple(inputs)),
            out_specs=specs(outputs),
            axis_names=apart,
            check_vma=over is not None,  # a kernel's result does not say over which axes it varies
        )

    # ---- stages of a pipeline ----

    @property
    def stages(self) -> int:
        """Stages of a pipeline, 1 without one."""
        return self.mesh.shape[STAGES]

    def pin_first(self, x: Float[Array, "N ..."], axis: str) -> Array:
        """Pins the first axis of an array alone; XLA splits the others."""
        (first,) = self.spec((axis,)) or (None,)
        spec = PartitionSpec(first, *(PartitionSpec.UNCONSTRAINED,) * (x.ndim - 1))
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def gather_rows(self, x: Float[Array, "B ..."]) -> Array:
        """The rows that every stage of a pipeline needs, from those that a device has of nodes beside the stages."""
        return self.without(STAGES).pin_first(x, "batch")

    def own_rows(self, x: Float[Array, "B ..."]) -> Array:
        """The reverse of `gather_rows`."""
        return self.pin_first(x, "batch")


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def serving_layout(
    sizes: Mapping[str, int | str], devices: Sequence[jax.Device], axes: PyTree, abstract: PyTree, replaced: Lines
) -> tuple[MeshLayout, Any]:
    """How a model is used that was trained on a mesh of these sizes: the layout, and its parameters' shardings.

    The devices of `pipeline` and `context` split the weights as `fsdp` does, or, where a width does not divide, hold
    copies as `data`. `replaced` are the recipe's lines of the sharding table.
    """
    shape = dict(make_mesh(sizes, devices).shape)
    folded = shape.pop(STAGES) * shape.pop("context")

    def folded_into(axis: str) -> tuple[MeshLayout, Any]:
        mesh = make_mesh(shape | {axis: shape[axis] * folded}, devices)
        layout = MeshLayout(mesh, serving_table(replaced))
        return layout, layout.param_shardings(axes, abstract)

    try:
        return folded_into("fsdp")
    except UserError:
        return folded_into("data")


def serving_table(replaced: Lines) -> Table:
    """The sharding table of a recipe for generation, in which sequences are whole."""
    return table_with({**replaced, "sequence": (), "residual": ()})


def multiples(size: int, pieces: int) -> str:
    """The multiples of `pieces` next to a size."""
    below = size // pieces * pieces
    return " or ".join(str(n) for n in (below, below + pieces) if n)
