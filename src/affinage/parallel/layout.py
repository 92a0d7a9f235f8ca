"""A mesh with its sharding table, as the nodes of a graph see them."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from affinage.model.apply_config import Layout
from affinage.parallel.sharding import TABLE, LogicalAxes, Table, partition_spec

REPLICAS = "data"  # the mesh axis along which stand copies of the model, unless a table splits weights over it


@dataclass(frozen=True, eq=False)
class MeshLayout(Layout):
    """Arrays split over a mesh as the table says.

    Without pins XLA may gather the rows instead of the weights, and hold every device's activations on each.

    Attributes:
        mesh: as `make_mesh` makes it.
        table: logical axis -> mesh axes.
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

    def constrain(self, x: Array, axes: LogicalAxes) -> Array:
        """See `Layout.constrain`."""
        if self.mesh.size == 1:
            return x
        manual = self._taken_apart()
        spec = _without(partition_spec(axes, self.mesh, self.table), manual)
        mesh = jax.sharding.get_abstract_mesh() if manual else self.mesh
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def mesh_axes(self, axis: str) -> tuple[str, ...]:
        """See `Layout.mesh_axes`."""
        return tuple(name for name in self.table[axis] if self.mesh.shape[name] > 1)

    def parts(self, *axes: str) -> int:
        """See `Layout.parts`; a mesh axis splits an array once, however many of its axes claim it."""
        return math.prod(self.mesh.shape[name] for name in {name for axis in axes for name in self.table[axis]})

    @property
    def may_map(self) -> bool:
        """See `Layout.may_map`; JAX 0.10 mistakes the residuals of a `shard_map` inside another."""
        return not self._taken_apart()

    def mapped(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Any],
        outputs: Any,
        *,
        over: Collection[str] | None = None,
    ) -> Callable[..., Any]:
        """See `Layout.mapped`; may be used inside another one that takes other mesh axes apart."""
        if self.mesh.size == 1:
            return function
        outer = self._taken_apart()
        if over is None:
            apart = set(self.mesh.axis_names) - outer
        else:
            apart = {name for axis in over for name in self.mesh_axes(axis)} - outer
        if not apart:
            return function
        left = set(self.mesh.axis_names) - apart

        def spec(axes: LogicalAxes) -> PartitionSpec:
            return _without(partition_spec(axes, self.mesh, self.table), left)

        return jax.shard_map(
            function,
            mesh=None if outer else self.mesh,
            in_specs=jax.tree.map(spec, tuple(inputs), is_leaf=_is_axes),
            out_specs=jax.tree.map(spec, outputs, is_leaf=_is_axes),
            axis_names=apart,
            check_vma=over is not None,  # a kernel's result does not say over which axes it varies
        )

    def _taken_apart(self) -> set[str]:
        """Mesh axes that an enclosing `jax.shard_map`, such as a pipeline's, has taken apart already."""
        around = jax.sharding.get_abstract_mesh()
        return set() if around.empty else set(around.manual_axes)


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple) and all(axis is None or isinstance(axis, str) for axis in node)


def _without(spec: PartitionSpec, left: Collection[str]) -> PartitionSpec:
    """The spec with some mesh axes struck out."""

    def kept(part: Any) -> Any:
        names = tuple(n for n in ((part,) if isinstance(part, str) else part or ()) if n not in left)
        return names[0] if len(names) == 1 else names or None

    return PartitionSpec(*(kept(part) for part in spec))
