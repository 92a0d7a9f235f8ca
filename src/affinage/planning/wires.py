"""Seconds that collectives take over the links of a slice, by the formulas of "How to Scale Your Model" (2025, ch. 2).

Of a ring of chips, both directions carry half each; a line has one link at each end, and so half of that. An axis over
several dimensions of a torus uses the links of all of them at once.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from affinage.hardware.slices import Slice
from affinage.parallel.mesh import AXES, across_slices

HOP_SECONDS = 1e-6  # latency of one hop between chips ("How to Scale Your Model", ch. 2)


@dataclass(frozen=True)
class Wires:
    """How the devices along one mesh axis are linked.

    Attributes:
        size: devices along the axis.
        bandwidth: bytes/s that reach a device from the others, over all links of the axis.
        hops: of the longest way round.
        single: bytes/s of one link, in one direction.
    """

    size: int
    bandwidth: float
    hops: int
    single: float

    def all_gather(self, whole: float) -> float:
        """Seconds until every device has the array of `whole` bytes of which each had its part."""
        return self._moved(whole) / self.bandwidth + self._latency if self.size > 1 else 0.0

    def reduce_scatter(self, whole: float) -> float:
        """Seconds until each device has its part of the sum of arrays of `whole` bytes: an all-gather backwards."""
        return self.all_gather(whole)

    def all_reduce(self, whole: float) -> float:
        """Seconds until every device has the sum of arrays of `whole` bytes: a reduce-scatter and an all-gather."""
        return 2 * self.all_gather(whole)

    def all_to_all(self, whole: float) -> float:
        """Seconds to exchange parts of an array that has `whole` bytes over all devices of the axis.

        On a ring a quarter of an all-gather: parts go half the way on average, each over half the links.
        """
        if self.size == 1:
            return 0.0
        return max(0.25, 1 / self.size) * self._moved(whole) / self.bandwidth + self._latency

    def permute(self, part: float) -> float:
        """Seconds to hand `part` bytes to the next device."""
        return part / self.single + HOP_SECONDS if self.size > 1 else 0.0

    def _moved(self, whole: float) -> float:
        return whole * (self.size - 1) / self.size

    @property
    def _latency(self) -> float:
        return self.hops * HOP_SECONDS


def wires(where: Slice, sizes: Mapping[str, int]) -> dict[str, Wires]:
    """The links of every mesh axis: the innermost axes of the mesh get the dimensions of the torus first.

    Raises:
        UserError: where no axis can be cut along several slices.
    """
    if where.slices > 1:
        return _of_slices(where, sizes)
    return _of_torus(where, sizes) if where.torus else _of_boxes(where, sizes)


def _of_slices(where: Slice, sizes: Mapping[str, int]) -> dict[str, Wires]:
    """One axis goes over the network: what its devices in a slice have summed or hold together, by all their cards."""
    across = dict(zip(AXES, across_slices(sizes, where.slices), strict=True))
    inside = {axis: sizes[axis] // across[axis] for axis in AXES}
    found = _of_torus(where, inside)
    network = where.chip.network_bandwidth / where.chip.devices
    for axis in (axis for axis in AXES if across[axis] > 1):
        near = found[axis]
        bandwidth = network * near.size if near.size == 1 else min(near.bandwidth, network * near.size)
        found[axis] = Wires(sizes[axis], bandwidth, near.hops, network)
    return found


def _of_torus(where: Slice, sizes: Mapping[str, int]) -> dict[str, Wires]:
    link = where.chip.link_bandwidth
    free = [[size, size, wrap] for size, wrap in zip(where.shape, where.wrap, strict=True)]  # [left, of, closed]
    inside = where.chip.devices  # devices of a chip, which share its memory's wires
    found = {}
    for axis in reversed(AXES):
        size, dimensions = sizes[axis], []
        shared = math.gcd(size, inside)
        inside //= shared
        left = size // shared
        whole = _exact(free, left)
        for dimension in whole if whole is not None else free:
            part = math.gcd(left, dimension[0])
            if part > 1:
                dimensions.append((part, dimension[2] and part == dimension[1]))
                dimension[0] //= part
                left //= part
        # The devices of a chip have its links together; between themselves all of them.
        if dimensions:
            bandwidth = sum((2 if closed else 1) * link for _, closed in dimensions) / where.chip.devices * shared
        else:
            bandwidth = link * where.chip.links
        hops = sum(part // 2 if closed else part - 1 for part, closed in dimensions)
        found[axis] = Wires(size, bandwidth, max(1, hops), link)
    return found


def _exact(free: list[list[int]], size: int) -> list[list[int]] | None:
    """Whole dimensions that an axis of `size` fills, the fewest; None where it would cut one."""
    for count in range(1, len(free) + 1):
        for chosen in itertools.combinations(free, count):
            if math.prod(d[0] for d in chosen) == size and all(d[0] > 1 for d in chosen):
                return list(chosen)
    return None


def _of_boxes(where: Slice, sizes: Mapping[str, int]) -> dict[str, Wires]:
    inside = where.shape[-1]
    link = where.chip.link_bandwidth * max(1, where.chip.links)
    found = {}
    for axis in reversed(AXES):
        size = sizes[axis]
        near = math.gcd(size, inside)
        inside //= near
        # What goes between boxes goes over the network cards of all GPUs of the axis in a box at once.
        bandwidth = link if near == size else min(link, where.chip.network_bandwidth * near)
        found[axis] = Wires(size, bandwidth or 1.0, 1, link if near == size else where.chip.network_bandwidth)
    return found
