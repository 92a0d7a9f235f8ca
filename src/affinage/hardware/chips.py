"""What accelerators can do: one table, in the vendors' own figures."""

import re
from dataclasses import dataclass

GiB = 2**30


@dataclass(frozen=True)
class Chip:
    """One kind of chip. JAX may show it as several devices (the two TensorCores of a TPU v3)."""

    name: str  # how people call it
    device_kinds: str  # regular expression that the whole of `jax.Device.device_kind` matches
    devices: int = 1  # JAX devices per chip
    bfloat16_flops: float | None = None  # peak dense matrix FLOP/s; None where unknown (then no MFU is shown)
    float32_flops: float | None = None  # peak dense FLOP/s, where hardware does it natively
    memory_bytes: int | None = None  # capacity of the chip's memory (HBM)
    memory_bandwidth: float | None = None  # bytes/s between the memory and the chip
    links: int = 0  # to other chips of the slice or box
    link_bandwidth: float = 0.0  # bytes/s of one link in one direction
    usable_bytes: int | None = None  # of one device's memory, by the compiler's own limit where it states one
    # Share of the peak that a large matrix product alone reaches. Measured on an H100 and an H200 (798 and 788 TFLOP/s,
    # bfloat16, side 8,192), and taken for all GPUs; assumed for TPUs, of which whole steps reach 71 % (MaxText on v5p).
    achievable: float = 0.9
    network_bandwidth: float = 0.0  # bytes/s per chip, in one direction, to chips that the links do not reach
    price: float | None = None  # US dollars per chip and hour, on demand; `hardware.price` in a recipe overrides it

    @property
    def memory_per_device(self) -> int | None:
        """Bytes of memory that a program may take on one JAX device."""
        if self.usable_bytes is not None or self.memory_bytes is None:
            return self.usable_bytes
        return self.memory_bytes // self.devices

    @property
    def flops_per_device(self) -> float | None:
        """Peak bfloat16 FLOP/s of one JAX device."""
        return None if self.bfloat16_flops is None else self.bfloat16_flops / self.devices


# Columns in the order of the fields of `Chip`. Sources of the figures, by line:
# TPU v2, v3: cloud.google.com/tpu/docs/v2 and /v3 (per chip); links as in "A Domain-Specific Supercomputer for Training
#   Deep Neural Networks" (Norrie et al., 2020, table 1): 4 of 496 and 656 Gbit/s.
# TPU v4: "TPU v4: An Optically Reconfigurable Supercomputer" (Jouppi et al., 2023, table 4): 6 links of 50 GB/s.
# TPU v5e, v5p: cloud.google.com/tpu/docs: 1,600 Gbit/s per chip over 4 links, 4,800 over 6.
# TPU v6e, TPU7x: cloud.google.com/tpu/docs/tpu7x: 800 and 1,200 GB/s per chip, both directions, over 4 and 6 links.
# A100: NVIDIA's datasheet (2021); 12 NVLinks of 25 GB/s each way. H100, H200, B200, L4: NVIDIA's datasheets, dense
#   (half of the figures "with sparsity"); 18 NVLinks of 25 GB/s (B200: 50); L4 has PCIe only.
# Prices are orders of magnitude to compare slices by; nobody looked them up.
# fmt: off
CHIPS: tuple[Chip, ...] = (
    Chip("TPU v2", r"TPU v2", 2, 45e12, None, 16 * GiB, 700e9, 4, 62e9, int(7.5 * GiB), 0.9, 3e9, 1.125),
    Chip("TPU v3", r"TPU v3", 2, 123e12, None, 32 * GiB, 900e9, 4, 82e9, int(15.5 * GiB), 0.9, 3e9, 2.0),
    Chip("TPU v4", r"TPU v4", 1, 275e12, None, 32 * GiB, 1200e9, 6, 50e9, int(30.75 * GiB), 0.9, 6.25e9, 3.22),
    Chip("TPU v5e", r"TPU v5 lite|TPU v5e", 1, 197e12, None, 16 * GiB, 819e9, 4, 50e9, int(15.75 * GiB), 0.9,
         3.125e9, 1.2),
    Chip("TPU v5p", r"TPU v5|TPU v5p", 1, 459e12, None, 95 * GiB, 2765e9, 6, 100e9, int(95.74 * GiB), 0.9, 6.25e9, 4.2),
    Chip("TPU v6e", r"TPU v6 lite|TPU v6e", 1, 918e12, None, 32 * GiB, 1640e9, 4, 100e9, int(31.25 * GiB), 0.9,
         12.5e9, 2.7),
    Chip("TPU7x", r"TPU7x?", 2, 2307e12, None, 192 * GiB, 7380e9, 6, 100e9, int(94.75 * GiB), 0.9, 12.5e9, 12.0),
    Chip("A100 80GB", r"NVIDIA A100.*80GB.*", 1, 312e12, 19.5e12, 80 * GiB, 2039e9, 12, 25e9, None, 0.8, 25e9, 1.5),
    Chip("A100 40GB", r"NVIDIA A100.*", 1, 312e12, 19.5e12, 40 * GiB, 1555e9, 12, 25e9, None, 0.8, 25e9, 1.3),
    Chip("H100 PCIe", r"NVIDIA H100 PCIe", 1, 756e12, 51e12, 80 * GiB, 2000e9, 12, 25e9, None, 0.8, 25e9, 2.5),
    Chip("H100", r"NVIDIA H100.*", 1, 989.4e12, 67e12, 80 * GiB, 3350e9, 18, 25e9, None, 0.8, 50e9, 3.0),
    Chip("H200", r"NVIDIA (H200|GH200).*", 1, 989.4e12, 67e12, 141 * 10**9, 4800e9, 18, 25e9, None, 0.8, 50e9, 4.0),
    Chip("B200", r"NVIDIA B200.*", 1, 2250e12, 75e12, 180 * 10**9, 8000e9, 18, 50e9, None, 0.8, 50e9, 5.6),
    Chip("L4", r"NVIDIA L4", 1, 121e12, 30.3e12, 24 * 10**9, 300e9, 1, 32e9, None, 0.8, 3e9, 0.71),
    Chip("CPU", r"cpu"),  # its peak depends on cores, clock and vector width, which JAX does not tell
)
# fmt: on


def chip(device_kind: str) -> Chip:
    """Return the chip that JAX calls `device_kind`; one without figures if the table does not have it."""
    known = (chip for chip in CHIPS if re.fullmatch(chip.device_kinds, device_kind))
    return next(known, Chip(device_kind, re.escape(device_kind)))


def named(name: str) -> Chip:
    """Return the chip that people call `name`, as in the table."""
    return next(known for known in CHIPS if known.name == name)
