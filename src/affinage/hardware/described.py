"""Devices that a program is compiled for without being here: TPUs by libtpu, GPUs by JAX's CUDA plug-in."""

import importlib.util
from typing import TYPE_CHECKING, Any, NamedTuple

from affinage.errors import UserError
from affinage.hardware.slices import Slice

if TYPE_CHECKING:
    import jax

NO_AUTOTUNING = "--xla_gpu_autotune_level=0"  # XLA tunes kernels on a GPU that is here, and there is none


class _Gpu(NamedTuple):
    """What XLA's compiler needs to know of a GPU, from NVIDIA's datasheets."""

    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int
    memory_bandwidth: int  # bytes/s
    l2_bytes: int
    clock_ghz: float
    shared_memory: int  # bytes of a multiprocessor
    float32_units: int  # of a multiprocessor


# fmt: off
_GPUS = {
    "A100 80GB": _Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 85_100_068_864, 2_039_040_000_000, 41_943_040, 1.41,
                      167_936, 64),
    "A100 40GB": _Gpu("NVIDIA A100-SXM4-40GB", (8, 0), 108, 42_505_273_344, 1_555_200_000_000, 41_943_040, 1.41,
                      167_936, 64),
    "H100": _Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 84_929_347_584, 3_352_320_000_000, 52_428_800, 1.98,
                 233_472, 128),
    "H200": _Gpu("NVIDIA H200", (9, 0), 132, 151_397_597_184, 4_800_000_000_000, 52_428_800, 1.98, 233_472, 128),
    "B200": _Gpu("NVIDIA B200", (10, 0), 148, 191_514_411_008, 7_672_320_000_000, 132_644_864, 1.965, 233_472, 128),
    "L4": _Gpu("NVIDIA L4", (8, 9), 58, 23_623_434_240, 300_000_000_000, 50_331_648, 2.04, 102_400, 128),
}
# fmt: on


def _target_config(gpu: _Gpu) -> str:
    """Return the description as the text of `stream_executor.GpuTargetConfigProto`."""
    major, minor = gpu.compute_capability
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {gpu.shared_memory - 1024}
  shared_memory_per_core: {gpu.shared_memory}
  core_count: {gpu.multiprocessors} fpus_per_core: {gpu.float32_units}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {gpu.memory_bandwidth} l2_cache_size: {gpu.l2_bytes} clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory_bytes} cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{gpu.name}"
"""


def check_compiler(where: Slice) -> None:
    """Refuse a slice whose compiler is not installed; raises UserError with the command that installs it."""
    what, fix = "", "Leave out --compile: the estimate needs nothing."
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin") if where.platform == "gpu" else ("libtpu",)
    if where.platform == "tpu" and not where.topology:
        what = f"compiling for {where.name} needs its compiler, which libtpu no longer brings"
    elif where.platform != "cpu" and not any(map(importlib.util.find_spec, plugins)):
        package, extra = "the package `libtpu`", "'affinage[tpu]' (Linux on x86; it needs no TPU)"
        if where.platform == "gpu":
            package, extra = "JAX's CUDA plug-in", "'affinage[gpu-plan]' (Linux; 1.7 GB; it needs no GPU)"
        what = f"compiling for a {where.platform.upper()} needs {package}"
        fix = f"Install it: pip install {extra}. {fix}"
    if what:
        raise UserError(what, where="--compile", fix=fix)


class DescribedDevices:
    """A slice that is compiled for, see `affinage.hardware.devices.Hardware`; a CPU is this machine's."""

    def __init__(self, where: Slice) -> None:
        self._where = where

    def acquire(self) -> "list[jax.Device]":
        """Return as many devices as the slice has; of a CPU one."""
        import jax
        from jax.experimental import topologies

        where = self._where
        if where.platform == "cpu":
            return jax.devices("cpu")[:1]
        if where.platform == "gpu":
            gpu = _GPUS[where.chip.name]
            _answer_for(gpu)
            described = {"target_config": _target_config(gpu), "topology": "1x{}x{}".format(*where.shape)}
            return list(topologies.get_topology_desc(platform="cuda", **described).devices)
        options: dict[str, Any] = {"chip_config_name": where.variant} if where.variant else {}
        return list(topologies.get_topology_desc(where.topology, "tpu", **options).devices)

    def release(self) -> None:
        """Nothing is held."""


def _answer_for(gpu: _Gpu) -> None:
    """Have JAX's wrapper of cuDNN see this GPU in place of the local one, of which there may be none."""
    import jax._src.cudnn.fused_attention_stablehlo as fused

    major, minor = gpu.compute_capability
    fused.check_compute_capability = lambda needed: major * 10 + minor >= int(str(needed).replace(".", ""))
    fused.check_cudnn_version = lambda: 91000
