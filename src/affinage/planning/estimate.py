"""Memory and time of a training step on one device, from the operations of its trace.

Memory is the most that is live at once. Time is the sum over operations of the longer of multiplying and moving bytes:
matrix products reach `Chip.achievable` of the peak and the memory reaches MEMORY_ACHIEVABLE of its bandwidth. The
collectives that XLA runs beside a node's products take the time that these leave uncovered; the others are added.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from affinage.hardware.chips import Chip, Slice, chip, cpu
from affinage.model.forward import batch_shapes
from affinage.model.graph import Node
from affinage.model.layers.embedding import Embedding, LearnedPositions
from affinage.model.layers.moe import MoeSettings
from affinage.parallel.sharding import AXES, REPLICAS, STAGES
from affinage.planning.per_device import PerDevice
from affinage.planning.trace import Op
from affinage.training.state import split_params
from affinage.training.step import replicas_of

MEMORY_ACHIEVABLE = 0.9  # measured on an H100 and an H200: copies at 3.0 of 3.35 and 4.3 of 4.8 TB/s
HOP_SECONDS = 1e-6  # latency of one hop between chips ("How to Scale Your Model", ch. 2)
_LAUNCH = 3e-6  # seconds that a GPU takes to start a kernel, and that pass even if it has little to do
_TENSOR_SUMS = 4  # of a block's activations in a step: two forward, two backward (Shoeybi et al., 2019)
_EXCHANGES = 4  # of experts' buffers: there and back, forward and backward
_FLOAT32 = 4  # bytes


@dataclass(frozen=True)
class Memory:
    """Bytes on one device while it trains. The first five are there always, the others exist during a step."""

    weights: int  # the parameters that are trained
    frozen: int  # those that are not, under adapters
    optimizer: int  # what the optimizer stores for them, such as two moments
    ema: int  # the moving average of the parameters
    batch: int  # the arrays of the rows
    weight_copies: int  # in the dtype of the products
    gradients: int  # sums of gradients, and those of the micro-batch at hand
    activations: int  # kept by the forward pass for the backward pass
    logits: int  # of the tokens at hand, and what is computed of them
    buffers: int  # of collectives: weights that are gathered, gradients that are not summed over the devices yet
    working: int  # other values of the layer, or of the part of the loss, at hand

    @property
    def total(self) -> int:
        """At the peak of a step."""
        return sum(vars(self).values())


def step_memory(device: PerDevice) -> Memory:
    """Memory of the training step that would run; it is traced, not compiled."""
    state, peak = device.state, device.traced.peak
    batch = batch_shapes(device.local_graph, device.local_rows * device.micro_batches, device.local_seq_len)
    kinds = ("gradients", "activations", "logits", "buffers", "working")
    return Memory(
        weights=device.bytes_of(state.params),
        frozen=device.bytes_of(state.frozen),
        optimizer=device.bytes_of(state.opt_state),
        ema=device.bytes_of(state.ema_params),
        batch=sum(leaf.size * leaf.dtype.itemsize for leaf in batch.values()),
        weight_copies=int(peak.get("weights", 0)),
        **{kind: int(peak.get(kind, 0)) for kind in kinds},
    )


# ---- time ----


@dataclass(frozen=True)
class NodeTime:
    """Seconds of a step that one node takes."""

    name: str
    compute: float  # of operations that multiply for longer than they move bytes
    memory: float  # of the others
    launches: float  # of a GPU's kernels that take less than to start them
    hidden: float  # of collectives beside the products
    exposed: float  # of collectives that are waited for
    seconds: float  # of the step: of collectives those that are waited for, or longer than the products beside them
    bound: str  # what takes longest: compute, memory, launches or links
    flops: float  # of its matrix products on one device, those that are computed again included


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, of all micro-batches together."""

    nodes: tuple[NodeTime, ...]  # of the model, in its order
    update: float  # clipping, moments, weights
    adding: float  # gradients of micro-batches to their sums
    bubble: float  # that stages of a pipeline wait
    parts: Mapping[str, float]  # the step's seconds by what bounds them
    seconds: float  # from one update to the next
    bound: str  # what most of the step is bound by


def step_time(device: PerDevice, *, whole: PerDevice | None = None) -> StepTime:
    """The time of one training step; with the operations of a `whole` step of one device, divided over the devices, in
    place of the step's own it is a bound that needs no trace of the step itself."""
    own, where = whole or device, device.where
    shared = math.prod(device.sizes.values()) / math.prod(own.sizes.values())
    links = links_of(where, device.sizes)
    ops: dict[str, list[Op]] = {node.name: [] for node in device.graph.nodes}
    others: list[Op] = []
    for op in own.traced.ops:
        words = set(re.findall(r"[^()/]+", op.scope))
        ops.get(next((name for name in ops if name in words), ""), others).append(op)
    # Of a pipeline's M + P - 1 ticks every stage waits in P - 1 (GPipe; Huang et al., 2019).
    idle = (device.stages - 1) / (device.pipeline_parts * device.parallel.pipeline_rounds)
    nodes: list[NodeTime] = []
    parts: dict[str, float] = {}  # seconds of all nodes by what bounds them
    pending = 0.0  # of collectives of nodes whose operations are those of the next, as logits' of a loss
    for node in device.graph.nodes:
        share = (1 / (1 + idle) if node.repeat and own.stages > 1 else 1.0) / shared
        compute, memory, launches = (seconds * share for seconds in _seconds(ops[node.name], where))
        computing = compute + memory + launches
        hidden, exposed = collectives(device, node, links)
        hidden, pending = hidden + pending, 0.0
        if not computing and node.name != device.graph.loss:
            hidden, pending = 0.0, hidden
        flops = sum(op.flops * op.times for op in ops[node.name]) * share
        seconds = max(computing, hidden) + exposed
        bounds = {"compute": compute, "memory": memory, "launches": launches, "links": seconds - computing}
        bound = max(bounds, key=bounds.__getitem__)
        nodes.append(NodeTime(node.name, compute, memory, launches, hidden, exposed, seconds, bound, flops))
        bounds["pipeline bubble"] = seconds * idle if node.repeat else 0.0
        parts = {name: parts.get(name, 0.0) + spent for name, spent in bounds.items()}
    stored = device.bytes_of(device.state) / own.bytes_of(own.state) if whole else 1.0
    update, adding = (
        stored * sum(_seconds([op for op in others if (op.times > 1) == repeated], where)) for repeated in (False, True)
    )
    parts["memory"] += update + adding
    total, bound = sum(parts.values()), max(parts, key=parts.__getitem__)
    return StepTime(tuple(nodes), update, adding, parts["pipeline bubble"], parts, total, bound)


def _seconds(ops: Iterable[Op], where: Slice) -> tuple[float, float, float]:
    """On one device: of operations that multiplying bounds, of those that memory bounds, and of those that a GPU
    computes faster than it starts them."""
    chip, gpu = where.chip, where.platform == "gpu"
    datasheet = chip.flops_per_device or chip.float32_flops  # a processor's is measured
    assert datasheet is not None and chip.memory_bandwidth is not None
    peak, bandwidth = datasheet * chip.achievable, chip.memory_bandwidth / chip.devices * MEMORY_ACHIEVABLE
    spent = [0.0, 0.0, 0.0]
    for op in ops:
        # In float32 XLA multiplies in TensorFloat-32 on GPUs, at half the rate.
        multiplying = op.flops / peak * (2 if gpu and op.dtype == "float32" else 1)
        bounds = (multiplying, (op.bytes_in + op.bytes_out) / bandwidth, op.kernels * _LAUNCH if gpu else 0.0)
        spent[bounds.index(max(bounds))] += max(bounds) * op.times
    return spent[0], spent[1], spent[2]


# ---- collectives: the formulas are those of "How to Scale Your Model" (2025, ch. 2) ----
#
# On a ring of chips each direction carries half, a line has one link at each end, and an axis over several dimensions
# of a torus uses the links of all of them at once.


@dataclass(frozen=True)
class Links:
    """How the devices along one mesh axis are linked."""

    size: int  # devices along the axis
    bandwidth: float  # bytes/s that reach a device from the others, over all links of the axis
    hops: int  # of the longest way round
    single: float  # bytes/s of one link, in one direction

    def all_gather(self, whole: float) -> float:
        """Seconds until every device has the array of `whole` bytes of which each had its part, or for the reverse."""
        if self.size == 1:
            return 0.0
        return whole * (self.size - 1) / self.size / self.bandwidth + self.hops * HOP_SECONDS

    def all_reduce(self, whole: float) -> float:
        """Seconds until every device has the sum of arrays of `whole` bytes: a reduce-scatter and an all-gather."""
        return 2 * self.all_gather(whole)

    def all_to_all(self, whole: float) -> float:
        """Seconds to exchange an array of `whole` bytes: on a ring a quarter of an all-gather, as parts go half the way
        on average, each over half the links."""
        return self.all_gather(max(0.25, 1 / self.size) * whole)


def links_of(where: Slice, sizes: Mapping[str, int]) -> dict[str, Links]:
    """The links of every mesh axis: the innermost axes of the mesh get the dimensions of the torus first."""
    chip, links, on_tpu = where.chip, {}, where.platform == "tpu"
    free = [[size, size, wrap] for size, wrap in zip(where.shape, where.wrap, strict=True)]  # [left, of, closed]
    inside = chip.devices if on_tpu else where.shape[-1]  # devices of a chip, or of a box, that an axis gets first
    together = chip.link_bandwidth * max(1, chip.links)  # of all links of a chip
    for axis in reversed(AXES):
        size, near = sizes[axis], math.gcd(sizes[axis], inside)
        inside //= near
        if not on_tpu:
            # What goes between boxes goes over the network cards of all GPUs of the axis in a box at once.
            single = together if near == size else chip.network_bandwidth
            links[axis] = Links(size, min(together, single * near) or 1.0, 1, single)
            continue
        left, dimensions = size // near, []
        for dimension in _filled(free, left):
            part = math.gcd(left, dimension[0])
            if part > 1:
                dimensions.append((part, dimension[2] and part == dimension[1]))
                dimension[0] //= part
                left //= part
        # The devices of a chip have its links together; between themselves all of them.
        over = sum((2 if closed else 1) * chip.link_bandwidth for _, closed in dimensions) * near / chip.devices
        hops = sum(part // 2 if closed else part - 1 for part, closed in dimensions)
        links[axis] = Links(size, over if dimensions else together, max(1, hops), chip.link_bandwidth)
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
    trainable = split_params(device.local_graph, device.settings).trainable.parameters
    trained = [*jax.tree.leaves(trainable.get(node.name, {}))]
    hidden = exposed = 0.0

    # The TPU's compiler takes a sum out of the loop over micro-batches if nothing but the addition reads it, and then
    # sums what is added up. Those of layers stay in the loop over layers, or over a pipeline's ticks; those of
    # looked-up vectors are float32, and what logits tied to them add is summed by itself.
    times, bytes_each = parts * often, width
    if isinstance(node.layer, Embedding | LearnedPositions):
        tied = any(other.layer.shares == node.name for other in device.graph.nodes)
        bytes_each = _FLOAT32 + (width if tied else 0)
    elif node.repeat is None:
        times, bytes_each = 1, width if parts == 1 else _FLOAT32
    # Gradients are summed along the axes that split rows or positions, not the weight. Along each axis goes what the
    # inner ones have scattered, but of what replicas have added up, in float32, goes all, once.
    once = parts > 1 and replicas_of(device.graph, device.apply_config) > 1
    summed = {*table["batch"], *table["sequence"]} - {"fsdp"}
    counts: Counter[tuple[str, ...]] = Counter()
    for parameter in trained:
        over = {name for axis in parameter.axes if axis for name in table[axis]}
        counts[tuple(axis for axis in reversed(AXES) if axis in summed - over and sizes[axis] > 1)] += parameter.size
    for axes, count in counts.items():
        left = count / sizes["fsdp"]
        for axis in axes:
            if axis == REPLICAS and once:
                hidden += links[axis].all_reduce(count / sizes["fsdp"] * _FLOAT32)
            else:
                hidden += times * links[axis].all_reduce(left * bytes_each)
                left /= sizes[axis]

    if sizes["fsdp"] > 1:  # weights are gathered forward and again backward; gradients are summed and scattered
        weights = sum(p.size for p in jax.tree.leaves(device.local_graph.parameters.get(node.name, {})))
        gathered = 2 * links["fsdp"].all_gather(weights * width)
        scattered = links["fsdp"].all_gather(sum(p.size for p in trained) * width)
        hidden += parts * often * (gathered + scattered)
    if not node.hidden:
        return hidden, exposed

    tokens = device.local_rows * device.local_seq_len
    residual = tokens * device.graph.shapes[node.name].width * width
    layers = parts * node.layers / (device.stages if node.repeat else 1)
    # To compute a layer again takes its first sum, unless `dots` keeps it, and both ways of an exchange.
    if sizes["tensor"] > 1:
        sums = _TENSOR_SUMS + (remat not in ("none", "dots"))
        exposed += layers * sums * links["tensor"].all_reduce(residual)
    experts, attention = (
        getattr(node.layer, "ffn", None),
        getattr(device.local_graph[node.name].layer, "attention", None),
    )
    if sizes["expert"] > 1 and isinstance(experts, MoeSettings):
        sent = float(sizes["expert"] * experts.top_k)  # rows of a token's buffers: room for all choices at every owner
        if experts.capacity_factor is not None:
            sent = experts.experts * experts.capacity(device.seq_len) / device.seq_len
        exchanges = _EXCHANGES + 2 * (remat != "none")
        exposed += layers * exchanges * links["expert"].all_to_all(residual * sent * sizes["expert"])
    if sizes["context"] > 1 and attention is not None:  # keys and values
        numbers = 2 * tokens * attention.groups_of * attention.head_width(device.graph.shapes[node.name].width)
        exposed += layers * 3 * links["context"].all_gather(numbers * width * sizes["context"])
    if node.repeat and device.stages > 1:
        # Once round for every part and round, forward and backward; the bubble has the ticks without work. Beside the
        # stages rows are split over them: they are gathered for the first stage, and the last one's go to all.
        link, sends = links[STAGES], device.pipeline_parts * rounds
        exposed += 2 * parts * sends * (residual / device.pipeline_parts / link.single + HOP_SECONDS)
        exposed += 2 * parts * (link.all_gather(residual) + link.all_reduce(residual))
    return hidden, exposed


def present(devices: Sequence[jax.Device]) -> Chip:
    """The chip of these devices, with the memory that they report."""
    first = devices[0]
    if first.platform == "cpu":
        here = [device for device in devices if device.process_index == first.process_index]
        return replace(cpu(), usable_bytes=(cpu().usable_bytes or 0) // len(here))
    known, limit = chip(first.device_kind), (first.memory_stats() or {}).get("bytes_limit")
    return known if limit is None else replace(known, usable_bytes=limit)
