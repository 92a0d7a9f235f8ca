"""The sizes of a recipe's `mesh`, and the XLA flags for meshes of several devices."""

import math
from collections.abc import Mapping

from affinage.errors import UserError

Flag = bool | int | str

# Outermost first: neighbors along `tensor` exchange the most, so they get the devices that are nearest to each other.
AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")

# All of them let collectives run beside the arithmetic. They are options of one compilation, not of the environment:
# the planner's compiled check and a run have the same, and a recipe's `parallel.xla_flags` replaces single ones.
FLAGS: Mapping[str, Mapping[str, Flag]] = {
    "tpu": {
        "xla_tpu_enable_latency_hiding_scheduler": True,  # order operations so that transfers are under way early
        "xla_enable_async_all_gather": True,  # FSDP's gathering of the next layer's weights
        # Not xla_tpu_enable_async_collective_fusion: the compiler refuses it for TPU v4, as it may give wrong results.
        "xla_tpu_overlap_compute_collective_tc": True,
        "xla_tpu_enable_data_parallel_all_reduce_opt": True,  # sums of gradients between slices, over the network
        "xla_tpu_data_parallel_opt_different_sized_ops": True,
    },
    "gpu": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_all_reduce_combine_threshold_bytes": 2**27,  # few large transfers: NCCL has a price for each
        "xla_gpu_all_gather_combine_threshold_bytes": 2**27,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**26,
        "xla_gpu_enable_pipelined_all_gather": True,  # of one layer during the one before it
        "xla_gpu_enable_pipelined_reduce_scatter": True,
        "xla_gpu_enable_pipelined_all_reduce": True,
        "xla_gpu_enable_while_loop_double_buffering": True,  # what pipelining needs in a scan over layers
    },
    "cpu": {},
}


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
    too_small = [axis for axis, size in full.items() if size < 1]
    if too_small:
        raise UserError(f"{too_small[0]} has size {full[too_small[0]]}", where="mesh", fix="At least 1 device.")
    fixed, problem = math.prod(full.values()), ""
    if free and count % fixed:
        problem = f"which does not divide the {count} there are"
    elif not free and (fixed > count or (fixed < count and processes > 1)):
        problem = f"but there are {count}"
    if problem:
        product = " x ".join(f"{axis} {size}" for axis, size in full.items() if size > 1)
        made = f"{product} makes {fixed} devices" if product else "the mesh is of 1 device"
        fix = f"Make one axis auto, e.g. `mesh: {{data: auto}}`; sizes must multiply to {count}."
        raise UserError(f"{made}, {problem}", where="mesh", fix=fix)
    return full | dict.fromkeys(free, count // fixed)


def flags_for(platform: str, devices: int, replaced: Mapping[str, Flag]) -> dict[str, Flag]:
    """Return the table's line for a platform, where there is more than one device, with a recipe's replacements."""
    return {**(FLAGS.get(platform, {}) if devices > 1 else {}), **replaced}
