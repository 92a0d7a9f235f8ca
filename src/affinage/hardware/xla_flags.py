"""What XLA is told beyond its defaults, by platform, where a step runs on more than one device."""

from collections.abc import Mapping

Flag = bool | int | str

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


def flags_for(platform: str, devices: int, replaced: Mapping[str, Flag]) -> dict[str, Flag]:
    """The table's line for a platform, where there is more than one device, with a recipe's replacements."""
    return {**(FLAGS.get(platform, {}) if devices > 1 else {}), **replaced}
