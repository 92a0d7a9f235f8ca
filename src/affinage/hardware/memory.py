"""How much memory this process took of its devices."""

import resource
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax


def peak_bytes(devices: "Sequence[jax.Device]") -> int:
    """Most bytes in use on the fullest of this process's devices since it began; of a processor, the whole process."""
    stats = [device.memory_stats() or {} for device in devices if device.platform != "cpu"]
    peaks = [int(found["peak_bytes_in_use"]) for found in stats if "peak_bytes_in_use" in found]
    if peaks:
        return max(peaks)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else 1024 * resident
