"""Seconds that the collectives of a step take over the links of a slice.

The formulas are those of "How to Scale Your Model" (2025, ch. 2): on a ring of chips each direction carries half, a
line has one link at each end, and an axis over several dimensions of a torus uses the links of all of them at once.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from affinage.hardware.mesh import AXES
from affinage.hardware.slices import Slice
from affinage.model.graph import Node
from affinage.model.layer import parameters_in
from affinage.model.layers.embedding import Embedding, LearnedPositions
from affinage.model.layers.moe import MoeSettings
from affinage.parallel.sharding import REPLICAS, STAGES, across_slices
from affinage.planning.per_device import PerDevice, sent_per_token
from affinage.training.state import split_params
from affinage.training.step import replicas_of

HOP_SECONDS = 1e-6  # latency of one hop between chips ("How to Scale Your Model", ch. 2)
_TENSOR_SUMS = 4  # of a block's activations in a step: two forward, two backward (Shoeybi et al., 2019)
_FLOAT32 = 4  # bytes
_EXCHANGES = 4  # of experts' buffers: there and back, forward and backward

Seconds = dict[str, float]  # by mesh axis


@dataclass(frozen=True)
class Links:
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
        """Seconds until every device has the array of `whole` bytes of which each had its part.

        A reduce-scatter takes as long: it is an all-gather backwards.
        """
        return self._seconds(whole)

    def all_reduce(self, whole: float) -> float:
        """Seconds until every device has the sum of arrays of `whole` bytes: a reduce-scatter and an all-gather."""
        return 2 * self.all_gather(whole)

    def all_to_all(self, whole: float) -> float:
        """Seconds to exchange parts of an array that has `whole` bytes over all devices of the axis.

        On a ring a quarter of an all-gather: parts go half the way on average, each over half the links.
        """
        return self._seconds(max(0.25, 1 / self.size) * whole)

    def permute(self, part: float) -> float:
        """Seconds to hand `part` bytes to the next device."""
        return part / self.single + HOP_SECONDS if self.size > 1 else 0.0

    def _seconds(self, whole: float) -> float:
        if self.size == 1:
            return 0.0
        return whole * (self.size - 1) / self.size / self.bandwidth + self.hops * HOP_SECONDS


def links_of(where: Slice, sizes: Mapping[str, int]) -> dict[str, Links]:
    """The links of every mesh axis: the innermost axes of the mesh get the dimensions of the torus first.

    Raises:
        UserError: if no axis can be cut along several slices.
    """
    if where.slices == 1:
        return _of_torus(where, sizes) if where.torus else _of_boxes(where, sizes)
    # One axis goes over the network: what its devices in a slice have summed or hold together, by all their cards.
    across = dict(zip(AXES, across_slices(sizes, where.slices), strict=True))
    links = _of_torus(where, {axis: sizes[axis] // across[axis] for axis in AXES})
    network = where.chip.network_bandwidth / where.chip.devices
    for axis in (axis for axis in AXES if across[axis] > 1):
        near = links[axis]
        bandwidth = network * near.size if near.size == 1 else min(near.bandwidth, network * near.size)
        links[axis] = Links(sizes[axis], bandwidth, near.hops, network)
    return links


def _of_torus(where: Slice, sizes: Mapping[str, int]) -> dict[str, Links]:
    link = where.chip.link_bandwidth
    free = [[size, size, wrap] for size, wrap in zip(where.shape, where.wrap, strict=True)]  # [left, of, closed]
    inside = where.chip.devices  # devices of a chip, which share its memory's wires
    links = {}
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
        links[axis] = Links(size, bandwidth, max(1, hops), link)
    return links


def _exact(free: list[list[int]], size: int) -> list[list[int]] | None:
    """Whole dimensions that an axis of `size` fills, the fewest; None if it would cut one."""
    for count in range(1, len(free) + 1):
        for chosen in itertools.combinations(free, count):
            if math.prod(d[0] for d in chosen) == size and all(d[0] > 1 for d in chosen):
                return list(chosen)
    return None


def _of_boxes(where: Slice, sizes: Mapping[str, int]) -> dict[str, Links]:
    inside = where.shape[-1]
    link = where.chip.link_bandwidth * max(1, where.chip.links)
    links = {}
    for axis in reversed(AXES):
        size = sizes[axis]
        near = math.gcd(size, inside)
        inside //= near
        # What goes between boxes goes over the network cards of all GPUs of the axis in a box at once.
        bandwidth = link if near == size else min(link, where.chip.network_bandwidth * near)
        links[axis] = Links(size, bandwidth or 1.0, 1, link if near == size else where.chip.network_bandwidth)
    return links


def collectives(device: PerDevice, node: Node, links: Mapping[str, Links]) -> tuple[Seconds, Seconds]:
    """Seconds of one node's collectives in a step: those beside its products, and those that it waits for.

    XLA runs the gathering of weights and the sums of gradients beside the products. It waits for the sums of
    activations of tensor parallelism, the exchanges of experts, keys and values, and what stages hand on.
    """
    sizes, parts, parallel = device.sizes, device.micro_batches, device.parallel
    width = jnp.dtype(device.apply_config.compute_dtype).itemsize
    # The node's numbers as the fsdp axis sees them: what tensor, expert and pipeline leave of them to a device.
    trees = device.local_graph.parameters, _trained(device)
    weights, trained = (sum(p.size for p in parameters_in(tree.get(node.name, {}))) for tree in trees)
    hidden = _sums_of_gradients(device, node, links)
    exposed: Seconds = {}
    if sizes["fsdp"] > 1:
        # Gathered forward and again backward; the gradients are summed and scattered. In a pipeline in every tick.
        times = parts * (device.ticks / parallel.pipeline_rounds if node.repeat else 1)
        gathered = 2 * links["fsdp"].all_gather(weights * width)
        hidden["fsdp"] = times * (gathered + links["fsdp"].all_gather(trained * width))
    if node.repeat is None:
        return hidden, exposed
    residual = device.local_rows * device.local_seq_len * device.graph.shapes[node.name].width * width
    layers = node.layers / device.stages
    # To compute a layer again takes its first sum, unless `dots` keeps it, and both ways of an exchange.
    if sizes["tensor"] > 1:
        times = _TENSOR_SUMS + (parallel.remat not in ("none", "dots"))
        exposed["tensor"] = parts * layers * times * links["tensor"].all_reduce(residual)
    experts = getattr(node.layer, "ffn", None)
    if sizes["expert"] > 1 and isinstance(experts, MoeSettings):
        whole = residual * sent_per_token(experts, device.seq_len, sizes["expert"]) * sizes["expert"]
        times = _EXCHANGES + 2 * (parallel.remat != "none")
        exposed["expert"] = parts * layers * times * links["expert"].all_to_all(whole)
    attention = getattr(device.local_graph[node.name].layer, "attention", None)
    if sizes["context"] > 1:
        whole = 0.0
        if attention is not None:  # keys and values
            numbers = attention.groups_of * attention.head_width(device.graph.shapes[node.name].width)
            whole = 2.0 * device.local_rows * device.local_seq_len * numbers * width * sizes["context"]
        exposed["context"] = parts * layers * 3 * links["context"].all_gather(whole)
    if sizes[STAGES] > 1:
        # Once round for every part and round, forward and backward; the bubble has the ticks without work. Beside the
        # stages rows are split over them: they are gathered for the first stage, and the last one's go to all.
        times = parts * device.pipeline_parts * parallel.pipeline_rounds
        exposed[STAGES] = 2 * times * links[STAGES].permute(residual / device.pipeline_parts)
        exposed[STAGES] += 2 * parts * (links[STAGES].all_gather(residual) + links[STAGES].all_reduce(residual))
        if parallel.pipeline_rounds > 1:
            # Weights lie in the order of the layers: they go to the stages of their rounds, and gradients back.
            sent = jnp.dtype(device.settings.precision.params).itemsize * device.stages / sizes["fsdp"]
            for numbers in (weights, trained):
                exposed[STAGES] += parts * links[STAGES].all_to_all(numbers * sent)
    return hidden, exposed


def _trained(device: PerDevice) -> Mapping[str, Any]:
    adapters = split_params(device.local_graph, device.settings).adapters
    return device.local_graph.parameters if adapters is None else adapters.parameters


def _sums_of_gradients(device: PerDevice, node: Node, links: Mapping[str, Links]) -> Seconds:
    """Of a step's gradients along the axes that split rows or positions, not the weight; `fsdp` is not among them.

    Along each axis goes what the inner ones have scattered, but of what replicas have added up goes all.
    """
    summed = {*device.table["batch"], *device.table["sequence"]} - {"fsdp"}
    counts: Counter[tuple[str, ...]] = Counter()
    for parameter in parameters_in(_trained(device).get(node.name, {})):
        over = {name for axis in parameter.axes if axis for name in device.table[axis]}
        axes = tuple(a for a in reversed(AXES) if a in summed - over and device.sizes[a] > 1)
        counts[axes] += parameter.size
    # Replicas that each add up their own micro-batches are summed once, in float32.
    once = device.micro_batches > 1 and replicas_of(device.graph, device.apply_config) > 1
    times, width = _times_summed(device, node)
    seconds: Seconds = {}
    for axes, count in counts.items():
        numbers = count / device.sizes["fsdp"]
        left = numbers
        for axis in axes:
            if axis == REPLICAS and once:
                taken = links[axis].all_reduce(numbers * _FLOAT32)
            else:
                taken = times * links[axis].all_reduce(left * width)
                left /= device.sizes[axis]
            seconds[axis] = seconds.get(axis, 0.0) + taken
    return seconds


def _times_summed(device: PerDevice, node: Node) -> tuple[float, int]:
    """How often in a step a node's gradients are summed over devices that go together, and bytes of each number.

    As the TPU's compiler does it, and as is assumed of others. It takes a sum out of the loop over micro-batches if
    nothing but the addition reads it: of a product that is in no other loop, and then sums what is added up. Those of
    layers stay in the loop over layers, or over a pipeline's ticks, in the dtype of the products; those of looked-up
    vectors are float32, and what logits tied to them add is summed by itself.
    """
    parts, width = device.micro_batches, jnp.dtype(device.apply_config.compute_dtype).itemsize
    if isinstance(node.layer, Embedding | LearnedPositions):
        tied = any(other.layer.shares == node.name for other in device.graph.nodes)
        return parts, _FLOAT32 + (width if tied else 0)
    if node.repeat is None:
        return 1, width if parts == 1 else _FLOAT32
    return parts * (device.ticks / device.parallel.pipeline_rounds if device.stages > 1 else 1), width
