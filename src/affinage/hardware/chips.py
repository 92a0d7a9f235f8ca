"""The hardware that can be rented: what each chip can do, and slices of chips by the names that clouds use."""

import dataclasses
import math
import os
import re
from dataclasses import dataclass
from typing import NamedTuple

from affinage.errors import UserError, did_you_mean

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
CHIPS = {known.name: known for known in (
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
)}
# fmt: on


def chip(device_kind: str) -> Chip:
    """Return the chip that JAX calls `device_kind`; one without figures if the table does not have it."""
    known = (chip for chip in CHIPS.values() if re.fullmatch(chip.device_kinds, device_kind))
    return next(known, Chip(device_kind, re.escape(device_kind)))


# ---- slices ----


@dataclass(frozen=True)
class Slice:
    """Chips that train together."""

    name: str  # as the user gave it
    chip: Chip
    shape: tuple[int, ...]  # chips along each dimension of the torus, or (boxes, GPUs of a box)
    wrap: tuple[bool, ...]  # for each dimension, whether its ends are linked
    hosts: int  # machines
    topology: str = ""  # its name for libtpu; "" where its compiler does not know it
    variant: str = ""  # libtpu's chip configuration: `megacore` shows the two cores of a chip as one device

    @property
    def chips(self) -> int:
        """Number of chips."""
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        """Number of JAX devices."""
        return self.chips * self.chip.devices

    @property
    def platform(self) -> str:
        """What JAX calls the kind of device: tpu (linked as a torus), gpu (in boxes) or cpu."""
        return "tpu" if self.chip.name.startswith("TPU") else "cpu" if self.chip.name == "CPU" else "gpu"


class _Family(NamedTuple):
    """A generation of TPUs."""

    chip: str
    counts: int  # what the number in a slice's name counts: this many for each chip
    dimensions: int
    largest: int  # chips; in 2D a square, whose sides are the shortest dimensions with linked ends
    topology: str = ""
    variant: str = ""
    largest_host: int = 4  # chips


# v2 to v5p count TensorCores, two on a chip; v5e and v6e count chips; tpu7x counts devices, two on a chip.
_TPUS = {
    "v2": _Family("TPU v2", 2, 2, 256),
    "v3": _Family("TPU v3", 2, 2, 1024),
    "v4": _Family("TPU v4", 2, 3, 4096, "v4", "megacore"),
    "v5e": _Family("TPU v5e", 1, 2, 256, "v5e", "", 8),
    "v5litepod": _Family("TPU v5e", 1, 2, 256, "v5e", "", 8),
    "v5p": _Family("TPU v5p", 2, 3, 8960, "v5", "megacore"),
    "v6e": _Family("TPU v6e", 1, 2, 256, "v6e", "", 8),
    "tpu7x": _Family("TPU7x", 2, 3, 9216, "tpu7x"),
}
_GPUS = {"a100": "A100 80GB", "a100-40gb": "A100 40GB", "h100": "H100", "h200": "H200", "b200": "B200", "l4": "L4"}
_GPUS_OF_BOX = 8
_JAX_TAKES = 0.75  # of a GPU's memory, for arrays: docs.jax.dev/en/latest/gpu_memory_allocation.html
COMPARED = (  # slices of every kind and of common sizes, for `--which`
    "v2-8 v3-8 v3-32 v4-8 v4-16 v4-32 v4-64 v4-128 v5e-4 v5e-8 v5e-16 v5e-64 v5e-256 v5p-8 v5p-32 v5p-128 v6e-4 v6e-8 "
    "v6e-16 v6e-64 v6e-256 tpu7x-8 tpu7x-64 l4 a100 a100x8 a100x16 h100 h100x8 h100x16 h200 h200x8 b200x8"
).split()


def find_slice(name: str) -> Slice:
    """Return the slice that a cloud calls `name`: v4-32, v5litepod-16, h100x8, l4 or cpu.

    UserError names the nearest one for a name or a size that does not exist.
    """
    word = name.strip().lower()
    if word == "cpu":
        return Slice(name, cpu(), (1,), (False,), 1)
    gpu = re.fullmatch(rf"(?:([1-9]\d*)\W*x?\W*)?({'|'.join(_GPUS)})(?:(\W*x?\W*)([1-9]\d*))?", word)
    if gpu and (found := _gpus(name, gpu[2], int(gpu[1] or gpu[4] or 1))) and not gpu[1] and gpu[3] in (None, "x"):
        return found
    family, _, number = word.partition("-")
    if family in _TPUS and number.isdecimal():
        return _tpus(name, family, int(number))
    names = [*(f"{family}-N" for family in _TPUS), *(f"{family}xN" for family in _GPUS), "cpu"]
    near = [f"{gpu[2]}x{gpu[1] or gpu[4]}"] if gpu else [*COMPARED, "v5litepod-16"]  # 8xh100 is h100x8
    fix = f"{did_you_mean(near[0] if gpu else word, near)} The names are {', '.join(names)}.".lstrip()
    raise UserError(f"no slice is called `{name}`", where="--on", fix=fix)


def slice_of(device_kind: str, devices: int) -> Slice | None:
    """Return the slice that consists of `devices` devices of a kind (as JAX calls it); None if there is none."""
    kind = chip(device_kind)
    names = {"CPU": "cpu"} | {name: f"{word}x{devices}" for word, name in _GPUS.items()}
    names |= {family.chip: f"{word}-{devices * family.counts // kind.devices}" for word, family in _TPUS.items()}
    try:
        return find_slice(names[kind.name]) if kind.name in names else None
    except UserError:
        return None


def cpu() -> Chip:
    """Return this machine's processor with its memory; `devices.measured_speed` measures how fast it is."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Whole steps of benchmarks/step_cpu.py are 47 to 61 % of the measured product at widths 128 and 256, 71 % at 512.
    return Chip("CPU", r"cpu", memory_bytes=pages, usable_bytes=pages, achievable=0.55)


def _gpus(name: str, word: str, count: int) -> Slice:
    boxes, rest = divmod(count, _GPUS_OF_BOX) if count > _GPUS_OF_BOX else (1, 0)
    if rest:
        fix = f"Try {word}x{round(count / _GPUS_OF_BOX) * _GPUS_OF_BOX}."
        raise UserError(f"{count} GPUs do not make whole boxes of {_GPUS_OF_BOX}", where="--on", fix=fix)
    variable = "XLA_CLIENT_MEM_FRACTION"
    try:
        share = float(os.environ.get(variable) or _JAX_TAKES)
    except ValueError as error:
        raise UserError(f"{os.environ[variable]!r} is not a number", where=variable, fix="Such as 0.9.") from error
    known = CHIPS[_GPUS[word]]
    gpu = dataclasses.replace(known, usable_bytes=int(share * (known.memory_bytes or 0)))
    return Slice(name, gpu, (boxes, count // boxes), (False, False), boxes)


def _tpus(name: str, word: str, number: int) -> Slice:
    family, chips = _TPUS[word], number // _TPUS[word].counts
    sizes = [n * family.counts for n in range(1, family.largest + 1) if _torus_shape(n, family.dimensions)]
    if number not in sizes:
        nearest = [n for n in sizes if n < number][-1:] + [n for n in sizes if n > number][:1]
        fix = f"The nearest: {' and '.join(f'{word}-{n}' for n in nearest)}."
        raise UserError(f"there is no {name}", where="--on", fix=fix)
    shape = _torus_shape(chips, family.dimensions)
    # In 3D optical switches close the rings of whole cubes of 4 x 4 x 4 chips.
    cubes = all(side % 4 == 0 for side in shape)
    wrap = tuple(cubes if family.dimensions == 3 else side**2 >= family.largest for side in shape)
    topology = f"{family.topology}:{'x'.join(map(str, shape))}" if family.topology else ""
    # Of v5e and v6e there are machines with 8 chips, used for slices that fit into one.
    hosts = 1 if chips <= family.largest_host else -(-chips // 4)
    return Slice(name, CHIPS[family.chip], shape, wrap, hosts, topology, family.variant)


def _torus_shape(chips: int, dimensions: int) -> tuple[int, ...]:
    """The most compact shape that is offered for a number of chips, smallest dimension first, or ().

    Three dimensions: up to 32 chips powers of two from 2x2x1, then multiples of 4 along each. Two: powers of two.
    """
    if dimensions == 2:
        side = 1 << ((chips.bit_length() - 1) // 2)
        return (side, chips // side) if chips.bit_count() == 1 and chips != 2 else ()
    if chips % 64:
        return {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}.get(chips, ())
    cubes = chips // 64
    divisors = [n for n in range(1, cubes + 1) if cubes % n == 0]
    pairs = [(a, b) for a in divisors for b in divisors if a <= b and cubes % (a * b) == 0 and a * b * b <= cubes]
    sides = min(((a, b, cubes // (a * b)) for a, b in pairs), key=lambda sides: (sum(sides), sides))
    return tuple(4 * side for side in sides)


def memory_text(count: float) -> str:
    """Return bytes in GiB with two digits, as the compiler writes them; less than a tenth of one in MiB or KiB."""
    for unit, size in (("GiB", GiB), ("MiB", GiB >> 10)):
        if count >= 0.1 * size:
            return f"{count / size:.2f} {unit}"
    return f"{count / (GiB >> 20):.2f} KiB"
