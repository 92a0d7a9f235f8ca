"""Whether an accelerator is in this machine, told without asking JAX for it."""

from pathlib import Path

# TPUs (of both drivers), NVIDIA's GPUs, AMD's, and GPUs as Linux under Windows has them.
_DEVICES = ("accel[0-9]*", "vfio/[0-9]*", "nvidia[0-9]*", "kfd", "dxg")


def accelerator_is_here() -> bool:
    """Whether the kernel shows a device that JAX could compute on; macOS and others that have no /dev show none."""
    return any(next(Path("/dev").glob(pattern), None) is not None for pattern in _DEVICES)
