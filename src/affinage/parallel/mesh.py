"""The mesh: all devices of a run, arranged along named axes."""

import math
from collections.abc import Mapping, Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from affinage.errors import UserError
from affinage.hardware.mesh import AXES as AXES
from affinage.hardware.mesh import axis_sizes as axis_sizes


def make_mesh(sizes: Mapping[str, int | str], devices: Sequence[jax.Device]) -> Mesh:
    """A mesh with every axis of `AXES`, of size 1 where `sizes` does not name it.

    Args:
        sizes: devices along each axis; at most one may be "auto", which takes what the others leave. Without "auto",
            one host may use only the first of its devices.
        devices: of all hosts, in JAX's order.

    Raises:
        UserError: where the sizes do not multiply to the number of devices.
    """
    full = axis_sizes(sizes, len(devices), jax.process_count())
    shape = tuple(full[axis] for axis in AXES)
    devices = devices[: math.prod(shape)]
    # On a TPU this follows the wires of the torus; elsewhere it is the order of the devices.
    slices = {getattr(device, "slice_index", 0) for device in devices}
    if len(slices) > 1:
        across = across_slices(full, len(slices))
        within = tuple(size // parts for size, parts in zip(shape, across, strict=True))
        grid = mesh_utils.create_hybrid_device_mesh(
            within, across, devices=list(devices), allow_split_physical_axes=True
        )
    else:
        grid = mesh_utils.create_device_mesh(shape, devices=list(devices), allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))


# What may go over the network between slices, the first that divides: a sum of gradients, or one activation per stage.
_ACROSS_SLICES = ("data", "pipeline", "fsdp")


def across_slices(full: Mapping[str, int], slices: int) -> tuple[int, ...]:
    """Into how many parts each axis of `AXES` is cut so that every slice of TPUs has one.

    Raises:
        UserError: where none can be.
    """
    for cut in _ACROSS_SLICES:
        if full[cut] % slices == 0:
            return tuple(slices if axis == cut else 1 for axis in AXES)
    raise UserError(
        f"no axis of the mesh can be cut along the {slices} slices of TPUs",
        where="mesh",
        fix=f"Make data (or pipeline, or fsdp) a multiple of {slices}; the network between slices is slow.",
    )
