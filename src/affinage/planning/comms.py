"""Seconds that the collectives of a step take over the links of a slice.

The formulas are those of "How to Scale Your Model" (2025, ch. 2): on a ring of chips each direction carries half, a
line has one link at each end, and an axis over several dimensions of a torus uses the links of all of them at once.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from affinage.hardware.mesh import AXES
from affinage.hardware.slices import Slice
from affinage.model.graph import Node
from affinage.model.layer import parameters_in
from affinage.model.layers.embedding import Embedding, LearnedPositions
from affinage.model.layers.moe import MoeSettings
from affinage.parallel.sharding import REPLICAS, STAGES
from affinage.planning.per_device import PerDevice
from affinage.training.state import split_params
from affinage.training.step import replicas_of

HOP_SECONDS = 1e-6  # latency of one hop between chips ("How to Scale Your Model", ch. 2)
_TENSOR_SUMS = 4  # of a block's activations in a step: two forward, two backward (Shoeybi et al., 2019)
_FLOAT32 = 4  # bytes
_EXCHANGES = 4  # of experts' buffers: there and back, forward and backward


@dataclass(frozen=True)
class Links:
    """How the devices along one mesh axis are linked."""

    size: int  # devices along the axis
    bandwidth: float  # bytes/s that reach a device from the others, over all links of the axis
    hops: int  # of the longest way round
    single: float  # bytes/s of one link, in one direction

    def all_gather(self, whole: float) -> float:
        """Seconds until every device has the array of `whole` bytes of which each had its part.

        A reduce-scatter takes as long: it is an all-gather backwards.
        """
        if self.size == 1:
            return 0.0
        return whole * (self.size - 1) / self.size / self.bandwidth + self.hops * HOP_SECONDS

    def all_reduce(self, whole: float) -> float:
        """Seconds until every device has the sum of arrays of `whole` bytes: a reduce-scatter and an all-gather."""
        return 2 * self.all_gather(whole)

    def all_to_all(self, whole: float) -> float:
        """Seconds to exchange parts of an array that has `whole` bytes over all devices of the axis.

        On a ring a quarter of an all-gather: parts go half the way on average, each over half the links.
        """
        return self.all_gather(max(0.25, 1 / self.size) * whole)

    def permute(self, part: float) -> float:
        """Seconds to hand `part` bytes to the next device."""
        return part / self.single + HOP_SECONDS if self.size > 1 else 0.0


def links_of(where: Slice, sizes: Mapping[str, int]) -> dict[str, Links]:
    """The links of every mesh axis: the innermost axes of the mesh get the dimensions of the torus first."""
    chip, links = where.chip, {}
    if where.platform != "tpu":
        inside, link = where.shape[-1], chip.link_bandwidth * max(1, chip.links)
        for axis in reversed(AXES):
            near = math.gcd(sizes[axis], inside)
            inside //= near
            whole = near == sizes[axis]
            # What goes between boxes goes over the network cards of all GPUs of the axis in a box at once.
            bandwidth = link if whole else min(link, chip.network_bandwidth * near)
            links[axis] = Links(sizes[axis], bandwidth or 1.0, 1, link if whole else chip.network_bandwidth)
        return links
    free = [[size, size, wrap] for size, wrap in zip(where.shape, where.wrap, strict=True)]  # [left, of, closed]
    inside = chip.devices  # devices of a chip, which share its memory's wires
    for axis in reversed(AXES):
        dimensions, shared = [], math.gcd(sizes[axis], inside)
        inside //= shared
        left = sizes[axis] // shared
        for dimension in _filled(free, left):
            part = math.gcd(left, dimension[0])
            if part > 1:
                dimensions.append((part, dimension[2] and part == dimension[1]))
                dimension[0] //= part
                left //= part
        # The devices of a chip have its links together; between themselves all of them.
        bandwidth = chip.link_bandwidth * chip.links
        if dimensions:
            bandwidth = sum((2 if closed else 1) * chip.link_bandwidth for _, closed in dimensions)
            bandwidth *= shared / chip.devices
        hops = sum(part // 2 if closed else part - 1 for part, closed in dimensions)
        links[axis] = Links(sizes[axis], bandwidth, max(1, hops), chip.link_bandwidth)
    return links


def _filled(free: list[list[int]], size: int) -> list[list[int]]:
    """Whole dimensions that an axis of `size` fills, the fewest; all of them if it would cut one."""
    for count in range(1, len(free) + 1):
        for chosen in itertools.combinations(free, count):
            if math.prod(d[0] for d in chosen) == size and all(d[0] > 1 for d in chosen):
                return list(chosen)
    return free


def collectives(device: PerDevice, node: Node, links: Mapping[str, Links]) -> tuple[float, float]:
    """Seconds of one node's collectives in a step: those beside its products, and those that it waits for.

    XLA runs the gathering of weights and the sums of gradients beside the products. It waits for the sums of
    activations of tensor parallelism, the exchanges of experts, keys and values, and what stages hand on.
    """
    sizes, table, parts, remat = device.sizes, device.layout.table, device.micro_batches, device.parallel.remat
    rounds, width = device.parallel.pipeline_rounds, jnp.dtype(device.apply_config.compute_dtype).itemsize
    # How often a micro-batch needs the weights: in a pipeline in every tick.
    ticks = device.pipeline_parts * rounds + device.stages - 1
    often = ticks / rounds if node.repeat and device.stages > 1 else 1
    adapters = split_params(device.local_graph, device.settings).adapters
    declared = device.local_graph.parameters if adapters is None else adapters.parameters
    trained = [*parameters_in(declared.get(node.name, {}))]
    hidden = exposed = 0.0

    # Gradients are summed along the axes that split rows or positions, not the weight. Along each axis goes what the
    # inner ones have scattered, but of what replicas have added up, in float32, goes all, once.
    summed = {*table["batch"], *table["sequence"]} - {"fsdp"}
    counts: Counter[tuple[str, ...]] = Counter()
    for parameter in trained:
        over = {name for axis in parameter.axes if axis for name in table[axis]}
        counts[tuple(a for a in reversed(AXES) if a in summed - over and sizes[a] > 1)] += parameter.size
    once = parts > 1 and replicas_of(device.graph, device.apply_config) > 1
    # The TPU's compiler takes a sum out of the loop over micro-batches if nothing but the addition reads it, and then
    # sums what is added up. Those of layers stay in the loop over layers, or over a pipeline's ticks; those of
    # looked-up vectors are float32, and what logits tied to them add is summed by itself.
    times, bytes_each = parts * often, width
    if isinstance(node.layer, Embedding | LearnedPositions):
        tied = any(other.layer.shares == node.name for other in device.graph.nodes)
        bytes_each = _FLOAT32 + (width if tied else 0)
    elif node.repeat is None:
        times, bytes_each = 1, width if parts == 1 else _FLOAT32
    for axes, count in counts.items():
        left = count / sizes["fsdp"]
        for axis in axes:
            if axis == REPLICAS and once:
                hidden += links[axis].all_reduce(count / sizes["fsdp"] * _FLOAT32)
            else:
                hidden += times * links[axis].all_reduce(left * bytes_each)
                left /= sizes[axis]

    if sizes["fsdp"] > 1:  # weights are gathered forward and again backward; gradients are summed and scattered
        weights = sum(p.size for p in parameters_in(device.local_graph.parameters.get(node.name, {})))
        gathered = 2 * links["fsdp"].all_gather(weights * width)
        scattered = links["fsdp"].all_gather(sum(p.size for p in trained) * width)
        hidden += parts * often * (gathered + scattered)
    if node.repeat is None:
        return hidden, exposed

    tokens = device.local_rows * device.local_seq_len
    residual = tokens * device.graph.shapes[node.name].width * width
    layers = parts * node.layers / device.stages
    # To compute a layer again takes its first sum, unless `dots` keeps it, and both ways of an exchange.
    if sizes["tensor"] > 1:
        sums = _TENSOR_SUMS + (remat not in ("none", "dots"))
        exposed += layers * sums * links["tensor"].all_reduce(residual)
    experts, attention = (getattr(node.layer, half, None) for half in ("ffn", "attention"))
    if sizes["expert"] > 1 and isinstance(experts, MoeSettings):
        sent = float(sizes["expert"] * experts.top_k)  # rows of a token's buffers: room for all choices at every owner
        if experts.capacity_factor is not None:
            sent = experts.experts * experts.capacity(device.seq_len) / device.seq_len
        exchanges = _EXCHANGES + 2 * (remat != "none")
        exposed += layers * exchanges * links["expert"].all_to_all(residual * sent * sizes["expert"])
    if sizes["context"] > 1 and attention is not None:  # keys and values
        local = device.local_graph[node.name].layer.attention  # type: ignore[attr-defined]
        numbers = 2 * tokens * local.groups_of * local.head_width(device.graph.shapes[node.name].width)
        exposed += layers * 3 * links["context"].all_gather(numbers * width * sizes["context"])
    if sizes[STAGES] > 1:
        # Once round for every part and round, forward and backward; the bubble has the ticks without work. Beside the
        # stages rows are split over them: they are gathered for the first stage, and the last one's go to all.
        link, handed = links[STAGES], residual / device.pipeline_parts
        exposed += 2 * parts * device.pipeline_parts * rounds * link.permute(handed)
        exposed += 2 * parts * (link.all_gather(residual) + link.all_reduce(residual))
    return hidden, exposed
