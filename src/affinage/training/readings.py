"""What the machine says of itself: memory, and how busy it is."""

import contextlib
import math
import os
import time
from collections.abc import Callable
from typing import Any

import jax

_STATM = "/proc/self/statm"


class Readings:
    """Memory and load of this host's devices, for the lines of metrics; each reading takes microseconds.

    `memory_gigabytes`, in 1e9 bytes: the most that a device has held so far; of a CPU the resident memory of this
    process now. `memory_share`: the same of what the device has; not of a CPU. `utilisation`, from 0 to 1: of NVIDIA's
    GPUs that this process computes on what their driver says of the last second, where the package nvidia-ml-py is
    installed; of a CPU the
    share of all its cores that this process had since the last reading. What a platform does not tell is left out.

    Args:
        devices: of this host.
        fresh: seconds in which nothing is asked again: a share of less time tells little, and lines come faster.
    """

    def __init__(self, devices: list[jax.Device], *, fresh: float = 1.0) -> None:
        self._devices, self._fresh = devices, fresh
        self._is_cpu = devices[0].platform == "cpu"
        self._cores = os.cpu_count() or 1
        self._load: Callable[[], float | None] | None = self._processor if self._is_cpu else _gpus(devices)
        self._clock, self._busy = time.perf_counter(), time.process_time()
        self._found: dict[str, float] = {}
        self._asked = -math.inf

    def read(self) -> dict[str, float]:
        """The readings by their names, at most `fresh` seconds old."""
        if time.perf_counter() - self._asked > self._fresh:
            self._asked = time.perf_counter()
            self._found = self._read()
        return self._found

    def _read(self) -> dict[str, float]:
        found = self._resident() if self._is_cpu else self._held()
        if self._load is not None:
            with contextlib.suppress(Exception):  # whatever a driver raises
                load = self._load()
                found |= {} if load is None else {"utilisation": round(load, 4)}
        return found

    def _resident(self) -> dict[str, float]:
        try:
            with open(_STATM, "rb", buffering=0) as file:
                pages = int(file.read().split()[1])
        except (OSError, ValueError, IndexError):
            return {}
        return {"memory_gigabytes": round(pages * os.sysconf("SC_PAGE_SIZE") / 1e9, 4)}

    def _held(self) -> dict[str, float]:
        stats = [stats for device in self._devices if (stats := device.memory_stats())]
        held = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
        found = {"memory_gigabytes": round(max(held) / 1e9, 4)} if held else {}
        shares = [each["peak_bytes_in_use"] / each["bytes_limit"] for each in stats if each.get("bytes_limit")]
        return found | ({"memory_share": round(max(shares), 4)} if held and shares else {})

    def _processor(self) -> float:
        clock, busy = time.perf_counter(), time.process_time()
        share = (busy - self._busy) / max(clock - self._clock, 1e-9) / self._cores
        self._clock, self._busy = clock, busy
        return min(share, 1.0)


def _gpus(devices: list[Any]) -> Callable[[], float] | None:
    """Reads the mean load of these GPUs; None where nobody tells it, or which of the machine's they are."""
    if devices[0].platform != "gpu":
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        seen = _seen_by_cuda(pynvml)
        handles = [seen[device.local_hardware_id] for device in devices]
    except Exception:  # not installed, or no driver of NVIDIA's
        return None
    return lambda: sum(pynvml.nvmlDeviceGetUtilizationRates(each).gpu for each in handles) / 100 / len(handles)


def _seen_by_cuda(pynvml: Any) -> list[Any]:
    """The driver's handles of the GPUs that this process sees, in CUDA's order.

    https://docs.nvidia.com/cuda/cuda-c-programming-guide, CUDA_VISIBLE_DEVICES: numbers, or beginnings of UUIDs.
    """
    every = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return every
    words = [word.strip() for word in named.split(",")]
    return [
        every[int(word)]
        if word.isdigit()
        else next(handle for handle in every if pynvml.nvmlDeviceGetUUID(handle).startswith(word))
        for word in words
    ]
