"""What can be rented, by the names that clouds use: which chips, how they are wired, how many JAX devices."""

import dataclasses
import math
import os
import re
from dataclasses import dataclass
from typing import NamedTuple

from affinage.errors import UserError, did_you_mean
from affinage.hardware.chips import Chip, GiB, chip, named


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
    largest: int  # chips
    full: int  # chips along a dimension of 2D from which on its ends are linked
    topology: str = ""
    variant: str = ""
    largest_host: int = 4  # chips


# v2 to v5p count TensorCores, two on a chip; v5e and v6e count chips; tpu7x counts devices, two on a chip.
_TPUS = {
    "v2": _Family("TPU v2", 2, 2, 256, 16),
    "v3": _Family("TPU v3", 2, 2, 1024, 32),
    "v4": _Family("TPU v4", 2, 3, 4096, 0, "v4", "megacore"),
    "v5e": _Family("TPU v5e", 1, 2, 256, 16, "v5e", "", 8),
    "v5litepod": _Family("TPU v5e", 1, 2, 256, 16, "v5e", "", 8),
    "v5p": _Family("TPU v5p", 2, 3, 8960, 0, "v5", "megacore"),
    "v6e": _Family("TPU v6e", 1, 2, 256, 16, "v6e", "", 8),
    "tpu7x": _Family("TPU7x", 2, 3, 9216, 0, "tpu7x"),
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
    gpu = re.fullmatch(r"([a-z0-9-]+?)(?:x(\d+))?", word)
    if gpu and gpu[1] in _GPUS:
        return _gpus(name, gpu[1], int(gpu[2] or 1))
    family, _, number = word.partition("-")
    if family in _TPUS and number.isdecimal():
        return _tpus(name, family, int(number))
    names = [*(f"{family}-N" for family in _TPUS), *(f"{family}xN" for family in _GPUS), "cpu"]
    fix = f"{did_you_mean(word, [*COMPARED, 'v5litepod-16'])} The names are {', '.join(names)}.".lstrip()
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
    """Return this machine's processor with its memory; `devices.measured_flops` measures how fast it multiplies."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Whole steps of benchmarks/step_cpu.py are 47 to 61 % of the measured product at widths 128 and 256, 71 % at 512.
    return Chip("CPU", r"cpu", memory_bytes=pages, usable_bytes=pages, achievable=0.55)


def _gpus(name: str, word: str, count: int) -> Slice:
    boxes, rest = divmod(count, _GPUS_OF_BOX) if count > _GPUS_OF_BOX else (1, 0)
    if count < 1 or rest:
        fix = f"Try {word}x{max(1, round(count / _GPUS_OF_BOX)) * _GPUS_OF_BOX}."
        raise UserError(f"{count} GPUs do not make whole boxes of {_GPUS_OF_BOX}", where="--on", fix=fix)
    variables = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    variable = next((variable for variable in variables if os.environ.get(variable)), "")
    try:
        share = float(os.environ.get(variable, _JAX_TAKES))
    except ValueError as error:
        raise UserError(f"{os.environ[variable]!r} is not a number", where=variable, fix="Such as 0.9.") from error
    known = named(_GPUS[word])
    gpu = dataclasses.replace(known, usable_bytes=int(share * (known.memory_bytes or 0)))
    return Slice(name, gpu, (boxes, count // boxes), (False, False), boxes)


def _tpus(name: str, word: str, number: int) -> Slice:
    family, chips = _TPUS[word], number // _TPUS[word].counts
    sizes = [n for n in range(1, family.largest + 1) if _torus_shape(n, family.dimensions)]
    if number % family.counts or chips not in sizes:
        below = [n for n in sizes if n * family.counts < number][-1:]
        above = [n for n in sizes if n * family.counts > number][:1]
        nearest = " and ".join(f"{word}-{n * family.counts}" for n in below + above)
        raise UserError(f"there is no {name}", where="--on", fix=f"The nearest: {nearest}.")
    shape = _torus_shape(chips, family.dimensions) or ()
    # In 3D optical switches close the rings of whole cubes of 4 x 4 x 4 chips.
    cubes = all(side % 4 == 0 for side in shape)
    wrap = tuple(cubes if family.dimensions == 3 else side >= family.full for side in shape)
    topology = f"{family.topology}:{'x'.join(map(str, shape))}" if family.topology else ""
    # Of v5e and v6e there are machines with 8 chips, used for slices that fit into one.
    hosts = 1 if chips <= family.largest_host else -(-chips // 4)
    return Slice(name, named(family.chip), shape, wrap, hosts, topology, family.variant)


def _torus_shape(chips: int, dimensions: int) -> tuple[int, ...] | None:
    """The most compact shape that is offered for a number of chips, smallest dimension first, or None.

    Three dimensions: up to 32 chips powers of two from 2x2x1, from there on multiples of 4 along each. Two: powers of
    two up to 16 x 16, on older chips to 32 x 32.
    """
    if dimensions == 2:
        if chips == 2 or chips & (chips - 1):
            return None
        side = 1 << ((chips.bit_length() - 1) // 2)
        return (side, chips // side)
    if chips < 64 or chips % 64:
        return {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}.get(chips)
    cubes = chips // 64
    divisors = [n for n in range(1, cubes + 1) if cubes % n == 0]
    sides = [(a, b, cubes // a // b) for a in divisors for b in divisors if cubes // a % b == 0 and a <= b]
    a, b, c = min((s for s in sides if s[1] <= s[2]), key=lambda s: (sum(s), s))
    return (4 * a, 4 * b, 4 * c)


def memory_text(count: float) -> str:
    """Return bytes in GiB with two digits, as the compiler writes them; less than a tenth of one in MiB or KiB."""
    for unit, size in (("GiB", GiB), ("MiB", GiB >> 10)):
        if count >= 0.1 * size:
            return f"{count / size:.2f} {unit}"
    return f"{count / (GiB >> 20):.2f} KiB"
