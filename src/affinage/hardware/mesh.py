"""What a recipe's `mesh` asks of the devices: how many along each axis."""

import math
from collections.abc import Mapping

from affinage.errors import UserError

# Outermost first: neighbours along `tensor` talk the most, so they get the devices that are nearest to each other.
AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")


def axis_sizes(sizes: Mapping[str, int | str], count: int, hosts: int = 1) -> dict[str, int]:
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
    elif fixed > count or (fixed < count and hosts > 1):
        raise _wrong_count(full, fixed, count, f"but there are {count}")
    return full


def axis_to_free(sizes: Mapping[str, int | str]) -> str:
    """The axis of a mesh to make auto where its sizes do not fit the devices: one that it has, if there is one."""
    return next((axis for axis in ("fsdp", "data") if axis in sizes), "data")


def _wrong_count(full: Mapping[str, int], fixed: int, count: int, but: str) -> UserError:
    said = " x ".join(f"{axis} {size}" for axis, size in full.items() if size > 1)
    made = f"{said} makes {fixed} devices" if said else "the mesh is of 1 device"
    hint = f"Make one axis auto, e.g. `mesh: {{data: auto}}`; sizes must multiply to {count}."
    return UserError(f"{made}, {but}", where="mesh", fix=hint)
