"""The devices that a training computes on, what is set before JAX starts, and how fast this machine's processor is."""

import ctypes
import importlib.util
import os
import platform
import resource
import sys
import time
import timeit
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from affinage.cluster.processes import Processes
from affinage.errors import UserError, UserWarned

if TYPE_CHECKING:
    import jax

# TPUs (of both drivers), NVIDIA's GPUs, AMD's, and GPUs as Linux under Windows has them.
_DEVICE_FILES = ("accel[0-9]*", "vfio/[0-9]*", "nvidia[0-9]*", "kfd", "dxg")

# Parameters of glibc's mallopt: keep memory at the top of the heap; grow by 64 MiB; no mapping of its own below 1 GiB,
# nor above; one heap for all threads, which is the only one that can keep more than 64 MiB.
_MALLOPT = ((-1, -1), (-2, 2**26), (-3, 2**30), (-4, 0), (-8, 1))
_warn_once = cache(lambda what: warnings.warn(what, UserWarned, stacklevel=4))


class Hardware:
    """What a training computes on: the devices that JAX finds, or those of a subclass of your own."""

    def acquire(self) -> "Sequence[jax.Device]":
        """Return the devices, waiting where that takes time; called again, the same ones. UserError: there are none."""
        return acquire()

    def release(self) -> None:
        """Give them back. Harmless where nothing was acquired; a process keeps those that JAX finds until it ends."""


def accelerator_is_here() -> bool:
    """Whether the kernel shows a device that JAX could compute on; macOS has no such files."""
    return any(next(Path("/dev").glob(pattern), None) is not None for pattern in _DEVICE_FILES)


def prepare() -> None:
    """Set what only has an effect before JAX is imported. Calling it again, or too late, is harmless.

    Where XLA computes on the CPU, glibc is to keep freed memory: otherwise each step faults the pages of its
    temporaries in again, more than half of the time of a small step. The price is that the process stays at its peak.
    """
    if "jax" not in sys.modules:
        if importlib.util.find_spec("libtpu") is not None and not accelerator_is_here():
            # It is there for its compiler: looking for a TPU with it takes a second and prints five lines.
            os.environ.setdefault("JAX_PLATFORMS", "cpu")
        chosen = os.environ.get("JAX_PLATFORMS", "")
        on_cpu = chosen.split(",")[0] == "cpu" if chosen else not accelerator_is_here()
        if on_cpu and platform.libc_ver()[0] == "glibc":
            for option, value in _MALLOPT:
                ctypes.CDLL(None).mallopt(option, value)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def acquire() -> "list[jax.Device]":
    """All devices that JAX finds, ready to compute: of all processes where they work together, else of this one.

    UserError: there is none of the requested platform.
    """
    prepare()
    import jax

    # The variable itself is left alone: a process that this one starts has a folder by its own environment.
    if (folder := os.environ.get("JAX_COMPILATION_CACHE_DIR")) is None:
        try:
            caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            programs = caches / "affinage" / f"programs-jax-{jax.__version__}"
            programs.mkdir(mode=0o700, parents=True, exist_ok=True)
            programs.chmod(0o700)  # it holds native code: nobody else may write there
            folder = str(programs)
        except (OSError, RuntimeError) as error:  # the latter: there is no home
            _warn_once(f"compiled programs are not kept for the next time: {error}")
    jax.config.update("jax_compilation_cache_dir", folder)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)  # many small programs add up to seconds
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    try:
        devices = list(jax.devices() if Processes.current.together else jax.local_devices())
    except (RuntimeError, AssertionError) as error:  # an assertion, without words, where the platform has no plug-in
        wanted = os.environ.get("JAX_PLATFORMS", "")
        raise UserError(
            f"JAX finds no usable device: {str(error) or f'it has no support for {wanted}'}",
            where=f"JAX_PLATFORMS={wanted}" if wanted else "",
            fix="Unset JAX_PLATFORMS to use what is here, or install JAX for the accelerator, e.g. `jax[cuda12]`.",
        ) from error
    if devices[0].platform == "cpu" and Processes.current.count > 1:
        # XLA reads CPU programs back from the cache with the collectives of their loops unordered: processes would mix
        # up each other's messages (jaxlib 0.10).
        jax.config.update("jax_enable_compilation_cache", False)
    return devices


def peak_bytes(devices: "Sequence[jax.Device]") -> int:
    """Most bytes in use on the fullest of this process's devices since it began; of a CPU, of the whole process."""
    stats = [device.memory_stats() or {} for device in devices if device.platform != "cpu"]
    peaks = [int(each["peak_bytes_in_use"]) for each in stats if "peak_bytes_in_use" in each]
    if peaks:
        return max(peaks)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else 1024 * resident


@cache
def measured_speed() -> tuple[float, float]:
    """FLOP/s and bytes/s of this machine's processor, which no datasheet has for all its cores.

    The FLOP/s are those of all cores in a float32 product of two square matrices as XLA compiles it, the bytes/s what
    one core reads and writes when it adds two arrays, of more than most caches, into a third.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    def best_of_five(work: Callable[[], Any]) -> float:
        # The processor's own seconds, of all threads together: what else runs on the machine hardly counts. The first
        # of six compiles.
        return min(timeit.repeat(work, timer=time.process_time, repeat=6, number=1)[1:])

    side = 2048
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        matrix, product = jnp.ones((side, side), jnp.float32), jax.jit(jnp.matmul)
        flops = 2 * side**3 / best_of_five(lambda: product(matrix, matrix).block_until_ready()) * (os.cpu_count() or 1)
    left, right, total = (np.ones(8 * 2**20, np.float32) for _ in range(3))
    return flops, 3 * left.nbytes / best_of_five(lambda: np.add(left, right, out=total))
