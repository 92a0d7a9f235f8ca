"""Memory and time of a training step on one device, from the operations of its trace.

Memory is the most that is live at once. Time is the sum over operations of the longer of multiplying and moving bytes:
matrix products reach `Chip.achievable` of the peak and the memory reaches MEMORY_ACHIEVABLE of its bandwidth. The
collectives that XLA runs beside a node's products take the time that these leave uncovered; the others are added.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from affinage.hardware.mesh import AXES
from affinage.hardware.slices import Slice
from affinage.planning.comms import collectives, links_of
from affinage.planning.per_device import PerDevice
from affinage.planning.trace import Op

MEMORY_ACHIEVABLE = 0.9  # measured on an H100 and an H200: copies at 3.0 of 3.35 and 4.3 of 4.8 TB/s
HOST_BANDWIDTH = 15e9  # bytes/s between a chip and its host's memory, by PCIe ("How to Scale Your Model", ch. 2)
_LAUNCH = 3e-6  # seconds that a GPU takes to start a kernel, and that pass even if it has little to do


@dataclass(frozen=True)
class Memory:
    """Bytes on one device while it trains. The first four are its state, the others exist during a step.

    Attributes:
        weights: the parameters that are trained.
        frozen: those that are not, under adapters.
        optimizer: what the optimizer stores for them, such as two moments.
        ema: the moving average of the parameters.
        batch: the arrays of the rows.
        weight_copies: in the dtype of the products.
        gradients: sums of gradients, and those of the micro-batch at hand.
        activations: kept by the forward pass for the backward pass.
        logits: of the tokens at hand, and what is computed of them.
        buffers: of collectives: weights that are gathered, gradients that are not summed over the devices yet.
        working: other values of the layer, or of the part of the loss, at hand.
        host: kept by the forward pass in the host's memory, for this device.
    """

    weights: int
    frozen: int
    optimizer: int
    ema: int
    batch: int
    weight_copies: int
    gradients: int
    activations: int
    logits: int
    buffers: int
    working: int
    host: int = 0

    @property
    def total(self) -> int:
        """At the peak of a step."""
        return sum(size for name, size in vars(self).items() if name != "host")


def step_memory(device: PerDevice) -> Memory:
    """Memory of the training step that would run; it is traced, not compiled."""
    peak, state = device.traced.peak, device.state
    kinds = ("gradients", "activations", "logits", "buffers", "working")
    return Memory(
        weights=device.bytes_of(state.params),
        frozen=device.bytes_of(state.frozen),
        optimizer=device.bytes_of(state.opt_state),
        ema=device.bytes_of(state.ema_params),
        batch=sum(leaf.size * leaf.dtype.itemsize for leaf in device.batch.values()),
        weight_copies=int(peak.get("weights", 0)),
        **{kind: int(peak.get(kind, 0)) for kind in kinds},
        host=int(device.traced.offloaded / device.micro_batches),
    )


@dataclass(frozen=True)
class NodeTime:
    """Seconds of a step that one node takes.

    Attributes:
        name: of the node.
        compute: of operations that multiply for longer than they move bytes.
        memory: of the others.
        hidden: of collectives, and copies to and from the host, beside the products.
        exposed: of collectives that are waited for.
        flops: of its matrix products on one device, those that are computed again included.
        axes: of collectives along each mesh axis, hidden and exposed.
    """

    name: str
    compute: float
    memory: float
    hidden: float
    exposed: float
    flops: float
    axes: Mapping[str, float]

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
        parts = {"compute": self.compute, "memory": self.memory, "links": self.uncovered}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, of all micro-batches together.

    Attributes:
        nodes: of the model, in its order.
        update: clipping, moments, weights.
        adding: gradients of micro-batches to their sums.
        bubble: that stages of a pipeline wait.
    """

    nodes: tuple[NodeTime, ...]
    update: float
    adding: float
    bubble: float

    @cached_property
    def seconds(self) -> float:
        """From one update to the next."""
        return sum(node.seconds for node in self.nodes) + self.update + self.adding + self.bubble

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by what bounds them: compute, memory, links, pipeline bubble."""
        return {
            "compute": sum(node.compute for node in self.nodes),
            "memory": sum(node.memory for node in self.nodes) + self.update + self.adding,
            "links": sum(node.uncovered for node in self.nodes),
            "pipeline bubble": self.bubble,
        }

    @property
    def bound(self) -> str:
        """What most of the step is bound by."""
        return max(self.parts, key=lambda name: self.parts[name])

    @property
    def collectives(self) -> dict[str, float]:
        """Seconds of collectives along each mesh axis that has any, be they beside the products or waited for."""
        totals = {axis: sum(node.axes.get(axis, 0.0) for node in self.nodes) for axis in AXES}
        return {axis: seconds for axis, seconds in totals.items() if seconds}


def step_time(device: PerDevice, where: Slice, *, whole: PerDevice | None = None) -> StepTime:
    """The time of one training step on a slice.

    Args:
        device: the step.
        where: the slice.
        whole: a step of one device whose operations are taken in place of the step's own, divided over its devices: a
            bound that needs no trace of the step itself.
    """
    own = whole or device
    shared = device.devices / own.devices
    links = links_of(where, device.sizes)
    ops: dict[str, list[Op]] = {node.name: [] for node in device.graph.nodes}
    others: list[Op] = []
    for op in own.traced.ops:
        words = set(re.findall(r"[^()/]+", op.scope))
        ops.get(next((name for name in ops if name in words), ""), others).append(op)
    # Of a pipeline's M + P - 1 ticks every stage waits in P - 1 (GPipe; Huang et al., 2019).
    idle = (device.stages - 1) / (device.pipeline_parts * device.parallel.pipeline_rounds)
    nodes, bubble = [], 0.0
    pending: dict[str, float] = {}  # collectives of nodes whose operations are those of the next, as logits' of a loss
    for node in device.graph.nodes:
        part = (1 / (1 + idle) if node.repeat and own.stages > 1 else 1.0) / shared
        compute, memory = (seconds * part for seconds in _seconds(ops[node.name], where))
        beside, waited = collectives(device, node, links)
        if not compute + memory and node.name != device.graph.loss:
            pending = {axis: pending.get(axis, 0.0) + seconds for axis, seconds in beside.items()}
            beside = {}
        else:
            beside = {axis: beside.get(axis, 0.0) + pending.get(axis, 0.0) for axis in {**beside, **pending}}
            pending = {}
        hidden, exposed = sum(beside.values()), sum(waited.values())
        if node.repeat is not None:
            hidden = max(hidden, 2 * own.traced.offloaded / shared * where.chip.devices / HOST_BANDWIDTH)
        time = NodeTime(
            name=node.name,
            compute=compute,
            memory=memory,
            hidden=hidden,
            exposed=exposed,
            flops=sum(op.flops * op.times for op in ops[node.name]) * part,
            axes={axis: beside.get(axis, 0.0) + waited.get(axis, 0.0) for axis in AXES if axis in {**beside, **waited}},
        )
        nodes.append(time)
        bubble += time.seconds * idle if node.repeat else 0.0
    stored = device.bytes_of(device.state) / own.bytes_of(own.state) if whole else 1.0
    update = stored * sum(_seconds([op for op in others if op.times == 1], where))
    return StepTime(tuple(nodes), update, stored * sum(_seconds([op for op in others if op.times > 1], where)), bubble)


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
