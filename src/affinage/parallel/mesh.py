"""The mesh: all devices of a run, arranged along named axes."""

import math
from collections.abc import Mapping, Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from affinage.errors import UserError

# Outermost first: neighbours along `tensor` talk the most, so they get the devices that are nearest to each other.
AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")


def make_mesh(sizes: Mapping[str, int | str], devices: Sequence[jax.Device]) -> Mesh:
    """A mesh with every axis of `AXES`, of size 1 where `sizes` does not name it.

    Args:
        sizes: devices along each axis; at most one may be "auto", which takes what the others leave. Without "auto",
            one host may use only the first of its devices.
        devices: of all hosts, in JAX's order.

    Raises:
        UserError: where the sizes do not multiply to the number of devices.
    """
    full = axis_sizes(sizes, len(devices))
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


def axis_sizes(sizes: Mapping[str, int | str], count: int) -> dict[str, int]:
    """Sizes of all axes of `AXES`, with "auto" filled in, multiplying to `count` devices or, on one host, to fewer.

    Raises:
        UserError: where they do not.
    """
    unknown = set(sizes) - set(AXES)
    if unknown:
        raise UserError(
            f"unknown mesh axis {sorted(unknown)[0]!r}", where="mesh", fix=f"The axes are {', '.join(AXES)}."
        )
    free = [axis for axis, size in sizes.items() if size == "auto"]
    if len(free) > 1:
        raise UserError(f"both {free[0]} and {free[1]} are auto", where="mesh", fix="At most one axis may be auto.")
    full = dict.fromkeys(AXES, 1)
    full |= {axis: int(size) for axis, size in sizes.items() if size != "auto"}
    for axis, size in full.items():
        if size < 1:
            raise UserError(f"{axis} has size {size}", where="mesh", fix="An axis has at least 1 device.")
    fixed = math.prod(full.values())
    if free:
        if count % fixed:
            raise _wrong_count(full, fixed, count, f"which does not divide the {count} there are")
        full[free[0]] = count // fixed
    elif fixed > count or (fixed < count and jax.process_count() > 1):
        raise _wrong_count(full, fixed, count, f"but there are {count}")
    return full


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


def _wrong_count(full: Mapping[str, int], fixed: int, count: int, but: str) -> UserError:
    said = " x ".join(f"{axis} {size}" for axis, size in full.items() if size > 1) or "every axis 1"
    hint = f"Make one axis auto, e.g. `mesh: {{data: auto}}`; sizes must multiply to {count}."
    return UserError(f"{said} makes {fixed} devices, {but}", where="mesh", fix=hint)
