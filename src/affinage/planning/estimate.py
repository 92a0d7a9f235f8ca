"""Memory and time of a training step on one device, from the operations of its trace; and `parallel.remat: auto`.

Memory is the most that is live at once. Time is the sum over operations of the longer of multiplying and moving bytes:
matrix products reach `Chip.achievable` of the peak and the memory reaches MEMORY_ACHIEVABLE of its bandwidth. The
collectives that XLA runs beside a node's products take the time that these leave uncovered; the others are added.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np
from jax.experimental import multihost_utils

from affinage.config.parallel import ParallelSettings, Remat, RematSettings
from affinage.config.training import TrainSettings
from affinage.hardware.chips import Chip, chip
from affinage.hardware.slices import Slice, cpu, memory_text
from affinage.model import Graph
from affinage.model.forward import batch_shapes
from affinage.parallel import MeshLayout
from affinage.planning.comms import collectives, links_of
from affinage.planning.per_device import PerDevice
from affinage.planning.trace import Op
from affinage.training.layerwise import LAYERWISE_REMAT

MEMORY_ACHIEVABLE = 0.9  # measured on an H100 and an H200: copies at 3.0 of 3.35 and 4.3 of 4.8 TB/s
HOST_BANDWIDTH = 15e9  # bytes/s between a chip and its host's memory, by PCIe ("How to Scale Your Model", ch. 2)
_LAUNCH = 3e-6  # seconds that a GPU takes to start a kernel, and that pass even if it has little to do


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
    host: int = 0  # kept by the forward pass in the host's memory, for this device

    @property
    def total(self) -> int:
        """At the peak of a step."""
        return sum(size for name, size in vars(self).items() if name != "host")


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
        host=int(device.traced.offloaded / device.micro_batches),
    )


# ---- time ----


@dataclass(frozen=True)
class NodeTime:
    """Seconds of a step that one node takes."""

    name: str
    compute: float  # of operations that multiply for longer than they move bytes
    memory: float  # of the others
    hidden: float  # of collectives, and copies to and from the host, beside the products
    exposed: float  # of collectives that are waited for
    flops: float  # of its matrix products on one device, those that are computed again included

    @property
    def seconds(self) -> float:
        """Of the step."""
        return max(self.compute + self.memory, self.hidden) + self.exposed

    @property
    def uncovered(self) -> float:
        """Seconds of links, waited for or longer than the products beside them."""
        return self.seconds - self.compute - self.memory

    @property
    def bound(self) -> str:
        """What takes longest."""
        return _largest({"compute": self.compute, "memory": self.memory, "links": self.uncovered})


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, of all micro-batches together."""

    nodes: tuple[NodeTime, ...]  # of the model, in its order
    update: float  # clipping, moments, weights
    adding: float  # gradients of micro-batches to their sums
    bubble: float  # that stages of a pipeline wait

    @cached_property
    def seconds(self) -> float:
        """From one update to the next."""
        return sum(node.seconds for node in self.nodes) + self.update + self.adding + self.bubble

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by what bounds them."""
        return {
            "compute": sum(node.compute for node in self.nodes),
            "memory": sum(node.memory for node in self.nodes) + self.update + self.adding,
            "links": sum(node.uncovered for node in self.nodes),
            "pipeline bubble": self.bubble,
        }

    @property
    def shares(self) -> str:
        """The same in words, as shares of the step."""
        return ", ".join(f"{name} {part / self.seconds:.0%}" for name, part in self.parts.items() if part)

    @property
    def bound(self) -> str:
        """What most of the step is bound by."""
        return _largest(self.parts)


def _largest(parts: Mapping[str, float]) -> str:
    return max(parts, key=lambda name: parts[name])


def step_time(device: PerDevice, where: Slice, *, whole: PerDevice | None = None) -> StepTime:
    """The time of one training step on a slice.

    `whole` is a step of one device whose operations are taken in place of the step's own, divided over its devices: a
    bound that needs no trace of the step itself.
    """
    own = whole or device
    shared = math.prod(device.sizes.values()) / math.prod(own.sizes.values())
    links = links_of(where, device.sizes)
    ops: dict[str, list[Op]] = {node.name: [] for node in device.graph.nodes}
    others: list[Op] = []
    for op in own.traced.ops:
        words = set(re.findall(r"[^()/]+", op.scope))
        ops.get(next((name for name in ops if name in words), ""), others).append(op)
    # Of a pipeline's M + P - 1 ticks every stage waits in P - 1 (GPipe; Huang et al., 2019).
    idle = (device.stages - 1) / (device.pipeline_parts * device.parallel.pipeline_rounds)
    nodes, bubble = [], 0.0
    pending = 0.0  # of collectives of nodes whose operations are those of the next, as logits' of a loss
    for node in device.graph.nodes:
        part = (1 / (1 + idle) if node.repeat and own.stages > 1 else 1.0) / shared
        compute, memory = (seconds * part for seconds in _seconds(ops[node.name], where))
        hidden, exposed = collectives(device, node, links)
        hidden, pending = hidden + pending, 0.0
        if not compute + memory and node.name != device.graph.loss:
            hidden, pending = 0.0, hidden
        if node.repeat is not None:
            hidden = max(hidden, 2 * own.traced.offloaded / shared * where.chip.devices / HOST_BANDWIDTH)
        flops = sum(op.flops * op.times for op in ops[node.name]) * part
        nodes.append(NodeTime(node.name, compute, memory, hidden, exposed, flops))
        bubble += nodes[-1].seconds * idle if node.repeat else 0.0
    stored = device.bytes_of(device.state) / own.bytes_of(own.state) if whole else 1.0
    update, adding = (
        stored * sum(_seconds([op for op in others if (op.times > 1) == repeated], where)) for repeated in (False, True)
    )
    return StepTime(tuple(nodes), update, adding, bubble)


def _seconds(ops: Iterable[Op], where: Slice) -> tuple[float, float]:
    """On one device: of the operations that multiplying bounds, and of those that memory bounds."""
    chip, gpu = where.chip, where.platform == "gpu"
    datasheet = chip.flops_per_device or chip.float32_flops  # a processor's is measured
    assert datasheet is not None and chip.memory_bandwidth is not None
    peak, bandwidth = datasheet * chip.achievable, chip.memory_bandwidth / chip.devices * MEMORY_ACHIEVABLE
    compute = memory = 0.0
    for op in ops:
        # In float32 XLA multiplies in TensorFloat-32 on GPUs, at half the rate.
        multiplying = op.flops / peak * (2 if gpu and op.dtype == "float32" else 1)
        moving = max((op.bytes_in + op.bytes_out) / bandwidth, op.kernels * _LAUNCH if gpu else 0.0)
        if multiplying > moving:
            compute += multiplying * op.times
        else:
            memory += moving * op.times
    return compute, memory


# ---- remat: auto ----

ROOM = 0.9  # of a device's memory that the estimate may take
# What is computed again, from nothing to most; inputs of blocks can wait in the host's memory if there is another.
LADDER: tuple[Remat, ...] = ("none", "dots", "block", RematSettings(offload=("block_input",)), "full")


@dataclass(frozen=True)
class Choice:
    """The setting that `auto` stands for, and the bytes of a device that it needs (estimated) and that there are."""

    remat: Remat
    needed: int
    capacity: int

    @property
    def fits(self) -> bool:
        """Whether the estimate leaves some room."""
        return self.needed <= ROOM * self.capacity

    def __str__(self) -> str:
        remat = self.remat
        setting = remat if isinstance(remat, str) else remat.model_dump(mode="json", exclude_defaults=True)
        why = "the least that fits" if self.fits else "nothing fits; this needs least"
        return f"remat: {setting} ({why}: {memory_text(self.needed)} of {memory_text(self.capacity)}, estimated)"


def choose_remat(device: PerDevice) -> Choice:
    """The first setting of the ladder whose estimate stays below 90 % of a device's memory.

    If the memory is not known nothing is computed again. Layers that are updated one by one leave no choice.
    """
    capacity, choices = device.chip.memory_per_device or 0, []
    for remat in (LAYERWISE_REMAT,) if device.settings.optimizer_in_backward else LADDER:
        if device.platform == "cpu" and not isinstance(remat, str):
            continue
        parallel = device.parallel.model_copy(update={"remat": remat})
        needed = step_memory(dataclasses.replace(device, parallel=parallel)).total
        choices.append(Choice(remat, needed, capacity))
        if not capacity or choices[-1].fits:
            return choices[-1]
    return min(choices, key=lambda choice: choice.needed)


def remat_for_devices(
    graph: Graph, settings: TrainSettings, parallel: ParallelSettings, layout: MeshLayout, rows: int, context: int
) -> Choice:
    """The same for the devices of a mesh that are here. All hosts take what the first of them chose."""
    devices = list(layout.mesh.devices.flat)
    sizes = dict(layout.mesh.shape)
    device = PerDevice(graph, settings, sizes, rows, context, parallel, present(devices), devices[0].platform)
    choice = choose_remat(device)
    if jax.process_count() > 1:
        index = int(multihost_utils.broadcast_one_to_all(np.int32(LADDER.index(choice.remat))))
        choice = dataclasses.replace(choice, remat=LADDER[index])
    return choice


def present(devices: Sequence[jax.Device]) -> Chip:
    """The chip of these devices, with the memory that they report if the table does not know it."""
    first = devices[0]
    if first.platform == "cpu":
        here = [device for device in devices if device.process_index == first.process_index]
        return dataclasses.replace(cpu(), usable_bytes=(cpu().usable_bytes or 0) // len(here))
    known = chip(first.device_kind)
    if known.memory_per_device is None or first.platform == "gpu":
        limit = (first.memory_stats() or {}).get("bytes_limit")
        return known if limit is None else dataclasses.replace(known, usable_bytes=limit)
    return known
