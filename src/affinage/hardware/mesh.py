"""The sizes of a recipe's `mesh`: how many devices along each axis."""

import math
from collections.abc import Mapping

from affinage.errors import UserError

# Outermost first: neighbors along `tensor` exchange the most, so they get the devices that are nearest to each other.
AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")


def axis_sizes(sizes: Mapping[str, int | str], count: int, processes: int = 1) -> dict[str, int]:
    """Return the sizes of all `AXES`, with "auto" filled in; their product is `count` devices, or fewer of one process.

    Raises:
        UserError: for an unknown axis, two that are auto, or sizes that do not fit the devices.
    """
    unknown = sorted(set(sizes) - set(AXES))
    if unknown:
        raise UserError(f"unknown mesh axis {unknown[0]!r}", where="mesh", fix=f"The axes are {', '.join(AXES)}.")
    free = [axis for axis, size in sizes.items() if size == "auto"]
    if len(free) > 1:
        raise UserError(f"both {free[0]} and {free[1]} are auto", where="mesh", fix="At most one axis may be auto.")
    full = dict.fromkeys(AXES, 1) | {axis: int(size) for axis, size in sizes.items() if size != "auto"}
    for axis, size in full.items():
        if size < 1:
            raise UserError(f"{axis} has size {size}", where="mesh", fix="An axis has at least 1 device.")
    fixed = math.prod(full.values())
    if free and count % fixed:
        raise _wrong_count(full, fixed, count, f"which does not divide the {count} there are")
    if free:
        full[free[0]] = count // fixed
    elif fixed > count or (fixed < count and processes > 1):
        raise _wrong_count(full, fixed, count, f"but there are {count}")
    return full


def axis_to_free(sizes: Mapping[str, int | str]) -> str:
    """The axis to make auto where the sizes of a mesh do not fit the devices: one that it has, if possible."""
    return next((axis for axis in ("fsdp", "data") if axis in sizes), "data")


def _wrong_count(full: Mapping[str, int], fixed: int, count: int, but: str) -> UserError:
    product = " x ".join(f"{axis} {size}" for axis, size in full.items() if size > 1)
    made = f"{product} makes {fixed} devices" if product else "the mesh is of 1 device"
    hint = f"Make one axis auto, e.g. `mesh: {{data: auto}}`; sizes must multiply to {count}."
    return UserError(f"{made}, {but}", where="mesh", fix=hint)
