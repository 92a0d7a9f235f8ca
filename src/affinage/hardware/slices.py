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
    hosts: int  # machines, of all slices
    topology: str = ""  # its name for libtpu; "" where its compiler does not know it
    variant: str = ""  # libtpu's chip configuration: `megacore` shows the two cores of a chip as one device
    slices: int = 1  # linked by the network of the data center

    @property
    def chips(self) -> int:
        """Number of chips, of all slices."""
        return math.prod(self.shape) * self.slices

    @property
    def devices(self) -> int:
        """Number of JAX devices."""
        return self.chips * self.chip.devices

    @property
    def platform(self) -> str:
        """What JAX calls the kind of device: tpu, gpu or cpu."""
        if self.chip.name.startswith("TPU"):
            return "tpu"
        return "cpu" if self.chip.name == "CPU" else "gpu"

    @property
    def torus(self) -> bool:
        """Whether the shape is that of a torus of links, not of boxes of GPUs."""
        return self.platform == "tpu"


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
_SMALLEST = 0.1  # of a unit of memory, that is told in it
_JAX_TAKES = 0.75  # docs.jax.dev/en/latest/gpu_memory_allocation.html
_COMPARED = (
    "v2-8 v3-8 v3-32 v4-8 v4-16 v4-32 v4-64 v4-128 v5e-4 v5e-8 v5e-16 v5e-64 v5e-256 v5p-8 v5p-32 v5p-128 v6e-4 v6e-8 "
    "v6e-16 v6e-64 v6e-256 tpu7x-8 tpu7x-64 l4 a100 a100x8 a100x16 h100 h100x8 h100x16 h200 h200x8 b200x8"
).split()


def compared() -> list[Slice]:
    """Slices of every kind and of common sizes: what `--which` looks through."""
    return [find_slice(name) for name in _COMPARED]


def find_slice(name: str) -> Slice:
    """The slice that a cloud calls `name`, such as v4-32, v5litepod-16, h100x8, l4 or cpu; 2xv4-32 are two of them.

    Raises:
        UserError: for a name or a size that does not exist, with the nearest that does.
    """
    word = name.strip().lower()
    if word == "cpu":
        return Slice(name, cpu(), (1,), (False,), 1)
    gpu = re.fullmatch(r"([a-z0-9-]+?)(?:x(\d+))?", word)
    if gpu and gpu[1] in _GPUS:
        return _gpus(name, named(_GPUS[gpu[1]]), int(gpu[2] or 1))
    several = re.fullmatch(r"(\d+)x(.+)", word)
    if several and int(several[1]) > 0 and several[2].partition("-")[0] in _TPUS:
        one, count = find_slice(several[2]), int(several[1])
        return dataclasses.replace(one, name=name, slices=count, hosts=one.hosts * count)
    tpu = re.fullmatch(r"([a-z0-9]+)-(\d+)", word)
    if tpu and tpu[1] in _TPUS:
        return _tpus(name, _TPUS[tpu[1]], int(tpu[2]), tpu[1])
    known = [*_COMPARED, "v5litepod-16", "v4-8192", "cpu"]
    tpus, gpus = (f"{family}-N" for family in _TPUS), (f"{family}xN" for family in _GPUS)
    families = ", ".join([*tpus, "2xv4-N (two slices)", *gpus, "cpu"])
    raise UserError(
        f"no slice is called `{name}`",
        where="--on",
        fix=f"{did_you_mean(word, known)} The names are {families}.".lstrip(),
    )


def chip_called(kind: str) -> Chip:
    """The chip of the slices whose names begin with `kind`: v4, v5litepod, h100.

    Raises:
        UserError: for a kind that there is not.
    """
    word = kind.strip().lower()
    if word not in _TPUS and word not in _GPUS:
        fix = f"{did_you_mean(word, [*_TPUS, *_GPUS])} The kinds are {', '.join([*_TPUS, *_GPUS])}.".lstrip()
        raise UserError(f"no chip is called `{kind}`", fix=fix)
    return named(_TPUS[word].chip if word in _TPUS else _GPUS[word])


def slice_of(device_kind: str, devices: int) -> Slice | None:
    """The slice that consists of `devices` devices of a kind (as JAX calls it); None if there is none."""
    kind = chip(device_kind)
    names = {"CPU": "cpu"} | {name: f"{word}x{devices}" for word, name in _GPUS.items()}
    names |= {family.chip: f"{word}-{devices * family.counts // kind.devices}" for word, family in _TPUS.items()}
    try:
        return find_slice(names[kind.name]) if kind.name in names else None
    except UserError:
        return None


def cpu() -> Chip:
    """This machine's processor, with its memory; how fast it multiplies is measured, see `affinage.hardware.matmul`."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Whole steps of benchmarks/step_cpu.py are 47 to 61 % of the measured product at widths 128 and 256, 71 % at 512.
    return Chip("CPU", r"cpu", memory_bytes=pages, usable_bytes=pages, achievable=0.55)


def _gpus(name: str, chip: Chip, count: int) -> Slice:
    if count < 1 or (count > _GPUS_OF_BOX and count % _GPUS_OF_BOX):
        fitting = f"{name.lower().partition('x')[0]}x{max(1, round(count / _GPUS_OF_BOX)) * _GPUS_OF_BOX}"
        what = f"{count} GPUs do not make whole boxes of {_GPUS_OF_BOX}"
        raise UserError(what, where="--on", fix=f"Try {fitting}.")
    boxes, of_box = (1, count) if count <= _GPUS_OF_BOX else (count // _GPUS_OF_BOX, _GPUS_OF_BOX)
    usable = int(_share_of_gpus() * (chip.memory_bytes or 0))
    chip = dataclasses.replace(chip, usable_bytes=usable)
    return Slice(name, chip, (boxes, of_box), (False, False), boxes)


def _share_of_gpus() -> float:
    """Share of a GPU's memory that JAX takes for arrays: 75 %, unless its environment says otherwise."""
    for variable in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        share = os.environ.get(variable)
        try:
            if share:
                return float(share)
        except ValueError as error:
            raise UserError(f"`{share}` is no share of a memory", where=variable, fix="Such as 0.9.") from error
    return _JAX_TAKES


def _tpus(name: str, family: _Family, number: int, word: str) -> Slice:
    chips = number // family.counts
    shape: tuple[int, ...] | None = (
        torus_shape(chips, family.dimensions) if number % family.counts == 0 and chips <= family.largest else None
    )
    if shape is None:
        sizes = [n for n in range(1, family.largest + 1) if torus_shape(n, family.dimensions)]
        wanted = number / family.counts
        near = [*[n for n in sizes if n < wanted][-1:], *[n for n in sizes if n > wanted][:1]]
        names = " and ".join(f"{word}-{n * family.counts}" for n in near)
        raise UserError(f"there is no {name}", where="--on", fix=f"The nearest: {names}.")
    chip = named(family.chip)
    if family.dimensions == 3:
        # Optical switches close the rings of whole cubes of 4 x 4 x 4 chips.
        wrap: tuple[bool, ...] = tuple(all(side % 4 == 0 for side in shape) for _ in shape)
    else:
        wrap = tuple(side >= family.full for side in shape)
    topology = f"{family.topology}:{'x'.join(map(str, shape))}" if family.topology else ""
    # Of v5e and v6e there are machines with 8 chips, used for slices that fit into one.
    hosts = 1 if chips <= family.largest_host else -(-chips // 4)
    return Slice(name, chip, shape, wrap, hosts, topology, family.variant)


def torus_shape(chips: int, dimensions: int) -> tuple[int, ...] | None:
    """The most compact shape that is offered for a number of chips, smallest dimension first; None if there is none.

    Three dimensions: up to 32 chips powers of two from 2x2x1, from there on multiples of 4 along each. Two: powers of
    two up to 16 x 16, on older chips to 32 x 32.
    """
    power = chips > 0 and chips & (chips - 1) == 0
    if dimensions == 2:
        if not power or chips == 2:
            return None
        side = 1 << ((chips.bit_length() - 1) // 2)
        return (side, chips // side)
    if chips < 64:
        return {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}.get(chips)
    if chips % 64:
        return None
    cubes = chips // 64
    divisors = [n for n in range(1, cubes + 1) if cubes % n == 0]
    sides = [(a, b, cubes // a // b) for a in divisors for b in divisors if cubes // a % b == 0]
    a, b, c = min((s for s in sides if s == tuple(sorted(s))), key=lambda s: (sum(s), s))
    return (4 * a, 4 * b, 4 * c)


def memory_text(count: float) -> str:
    """Bytes in GiB with two digits, as the compiler writes them; less than a tenth of one in MiB, of these in KiB."""
    for unit, size in (("GiB", GiB), ("MiB", GiB >> 10)):
        if count >= _SMALLEST * size:
            return f"{count / size:.2f} {unit}"
    return f"{count / (GiB >> 20):.2f} KiB"
