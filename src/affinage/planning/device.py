"""One device of a mesh as the program that is traced for it sees it."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array
from typing_extensions import override

from affinage.model.parameter import Axes
from affinage.parallel.layout import MeshLayout

_AXES = {"experts": "owner", "sequence": "neighbour"}  # names of collectives along what several devices have parts of


@dataclass(frozen=True, eq=False)
class DeviceLayout(MeshLayout):
    """What one device has, whole; between it and others goes what goes between them in a run.

    To be traced with `axes` as the named axes around it.

    Attributes:
        owners: devices that the experts lie on.
        neighbours: devices that the positions of a row lie on.
    """

    owners: int = 1
    neighbours: int = 1

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, DeviceLayout) and (self.owners, self.neighbours) == (other.owners, other.neighbours)
        return same and super().__eq__(other)

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.owners, self.neighbours))

    @property
    def axes(self) -> list[tuple[str, int]]:
        """Named axes and their sizes, for `jax.make_jaxpr`."""
        return [(name, self.parts(axis)) for axis, name in _AXES.items() if self.parts(axis) > 1]

    @override
    def parts(self, *axes: str) -> int:
        of_several: dict[tuple[str, ...], int] = {("experts",): self.owners, ("sequence",): self.neighbours}
        return of_several.get(axes) or super().parts(*axes)

    @override
    def mesh_axes(self, axis: str) -> tuple[str, ...]:
        return (_AXES[axis],) if axis in _AXES and self.parts(axis) > 1 else super().mesh_axes(axis)

    @override
    def whole(self, length: int, axis: str) -> int:
        return length * self.parts(axis)

    @override
    def resplit(self, x: Array, before: Axes, after: Axes) -> Array:
        if self.owners > 1 and "experts" in after:
            return jax.lax.all_to_all(x, _AXES["experts"], after.index("experts"), 0, tiled=True)
        if self.owners > 1 and "experts" in before:
            return jax.lax.all_to_all(x, _AXES["experts"], 0, before.index("experts"), tiled=True)
        if self.neighbours > 1 and "sequence" in before:
            return self._whole_rows(x, before.index("sequence"))
        if self.neighbours > 1 and "sequence" in after:
            return self._part_of_rows(x, after.index("sequence"))
        return super().resplit(x, before, after)

    def _whole_rows(self, x: Array, axis: int) -> Array:
        if self.mesh.size > 1:  # inside a pipeline's `shard_map` JAX knows no axis but its mesh's
            return jnp.concatenate([x] * self.neighbours, axis)
        return jax.lax.all_gather(x, _AXES["sequence"], axis=axis, tiled=True)

    def _part_of_rows(self, x: Array, axis: int) -> Array:
        own = x.shape[axis] // self.neighbours
        place = 0 if self.mesh.size > 1 else jax.lax.axis_index(_AXES["sequence"])
        return jax.lax.dynamic_slice_in_dim(x, place * own, own, axis)
