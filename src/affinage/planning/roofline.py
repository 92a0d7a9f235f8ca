"""How long a step takes: for every node the slowest of multiplying, of the memory and of the links.

What is assumed, beside the chip table: matrix products reach `Chip.achievable` of the peak; the memory reaches
MEMORY_ACHIEVABLE of its bandwidth; gathering of weights and summing of gradients, over every mesh axis that splits rows
or positions and not the weight, run beside the products of the same node, as XLA's scheduler has it; the sums of
activations that tensor parallelism needs, and the all-to-alls of experts, wait for the products and are waited for.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp

from affinage.config.training import TrainSettings
from affinage.hardware.slices import Slice
from affinage.model import Call
from affinage.model.activations import batch_shapes
from affinage.model.kind import Context
from affinage.model.kinds.attention_kernels import queries_are_split
from affinage.model.kinds.ring_attention import steps_of
from affinage.model.node import Node
from affinage.model.parameter import map_parameters
from affinage.model.repeat import apply_node
from affinage.parallel.mesh import AXES
from affinage.parallel.pipeline import AXIS as STAGES
from affinage.planning.collectives import collectives, sums_again, weights_of
from affinage.planning.experts import on_nothing
from affinage.planning.liveness import measure, trace
from affinage.planning.local import Split
from affinage.planning.memory import Memory, call_of
from affinage.planning.part import Part, part_of
from affinage.planning.wires import wires
from affinage.training.frozen import Frozen, frozen_of
from affinage.training.trainer import compute_dtype

MEMORY_ACHIEVABLE = 0.8
HOST_BANDWIDTH = 15e9  # bytes/s between a chip and its host's memory, by PCIe ("How to Scale Your Model", ch. 2)
_FORWARD_HIDDEN, _FORWARD_EXPOSED = 1 / 3, 1 / 2  # of what fsdp gathers and scatters, of tensor parallelism's sums
_PASSES = 3  # forward, and two products for each of its products backward


@dataclass(frozen=True)
class NodeTime:
    """Seconds of a step that one node could not do with less of: `seconds` is what they come to."""

    name: str
    compute: float
    memory: float
    hidden: float  # collectives, and copies to and from the host, beside the products
    exposed: float  # collectives that are waited for
    forward: float = 0.0  # of `seconds`, the forward pass
    axes: Mapping[str, float] = field(default_factory=dict)  # collectives along each mesh axis, hidden and exposed

    @property
    def seconds(self) -> float:
        """Of the step."""
        return max(self.compute, self.memory, self.hidden) + self.exposed

    @property
    def bound(self) -> str:
        """What takes longest."""
        parts = {"compute": self.compute, "memory": self.memory, "links": max(self.hidden, self.exposed)}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, of all micro-batches together."""

    nodes: tuple[NodeTime, ...]
    update: float  # clipping, moments, weights: bound by memory
    adding: float  # gradients of micro-batches to their sums: the same
    bubble: float  # stages of a pipeline that wait
    again: float = 0.0  # of `seconds`, sums of gradients over devices in every micro-batch or tick beyond the first

    @property
    def seconds(self) -> float:
        """From one update to the next."""
        return sum(node.seconds for node in self.nodes) + self.update + self.adding + self.bubble

    @property
    def collectives(self) -> dict[str, float]:
        """Seconds of collectives along each mesh axis that has any, be they beside the products or waited for."""
        found = {axis: sum(node.axes.get(axis, 0.0) for node in self.nodes) for axis in AXES}
        return {axis: seconds for axis, seconds in found.items() if seconds}

    @property
    def bound(self) -> str:
        """What most of the step is bound by."""
        parts: dict[str, float] = {"memory": self.update + self.adding, "pipeline bubble": self.bubble}
        for node in self.nodes:
            parts[node.bound] = parts.get(node.bound, 0.0) + node.seconds
        return max(parts, key=lambda name: parts[name])


def step_time(split: Split, settings: TrainSettings, where: Slice, memory: Memory) -> StepTime:
    """The time of one training step on a slice; `memory` is that of the same step."""
    bandwidth = _bandwidth(where)
    update = (2 * (memory.state - memory.frozen) + memory.gradients + memory.weights) / bandwidth
    return _timed(split, settings, where, _work(split, settings, where), update)


def least_time(split: Split, settings: TrainSettings, where: Slice, state: float) -> float:
    """Seconds that a step cannot stay below: its products, its collectives, and the update of `state` bytes.

    Nothing is traced, so that many splits can be put in order.
    """
    nothing = dict.fromkeys((node.name for node in split.graph.nodes), _Work(0.0, True))
    return _timed(split, settings, where, nothing, 2 * state / _bandwidth(where)).seconds


def time_of_nodes(split: Split, settings: TrainSettings, where: Slice, state: float) -> float:
    """The same, nearer to the truth: with what the nodes do to memory, which many splits have in common."""
    return _timed(split, settings, where, _work(split, settings, where), 2 * state / _bandwidth(where)).seconds


def _bandwidth(where: Slice) -> float:
    assert where.chip.memory_bandwidth is not None
    return where.chip.memory_bandwidth / where.chip.devices * MEMORY_ACHIEVABLE


def _timed(split: Split, settings: TrainSettings, where: Slice, work: Mapping[str, "_Work"], update: float) -> StepTime:
    chip = where.chip
    call = call_of(settings, split.parallel, str(compute_dtype(settings.precision, chip)), where.platform)
    datasheet = chip.flops_per_device or chip.float32_flops  # a processor's is measured
    assert datasheet is not None
    peak = datasheet * chip.achievable
    if call.compute_dtype == jnp.float32 and where.platform == "gpu":
        peak /= 2  # TensorFloat-32, what XLA multiplies float32 in there
    links = wires(where, split.sizes)
    held = frozen_of(split.graph, settings)
    local = frozen_of(split.local_graph, settings)
    nodes, repeated = [], 0.0
    for node, cost in zip(split.graph.nodes, split.costs.nodes, strict=True):
        done = work[node.name]
        # Stages have layers of their own, and parts of the vocabulary by some tables; the rest they all compute.
        shared = node.repeat or (getattr(node.kind, "vocab", None) and STAGES in split.table["vocab"])
        devices = split.devices // (1 if shared else split.stages)
        hidden_pairs = 0 if done.kernel else cost.flops_all_pairs - cost.flops
        attending = cost.attention_flops + hidden_pairs
        once = cost.flops + hidden_pairs + (done.slowest - 1) * attending
        once += on_nothing(split.graph, node, split.rows, split.context, where.platform)
        flops = (done.passes * once + held.adapted_flops(node, split.rows, split.context)) / devices
        moved, ahead = done.moved, done.forward
        if node.repeat is not None and split.stages > 1:
            # The weights of a stage, or of one of its rounds, are read in every tick.
            again = weights_of(split, node) * jnp.dtype(call.compute_dtype).itemsize
            again *= split.ticks / split.parallel.pipeline_rounds - 1
            moved, ahead = moved / split.stages + _PASSES * again, ahead / split.stages + again
        moved *= split.micro_batches
        beside, waited = collectives(split, node, links, call, settings, local)
        carried = 2 * done.offloaded * split.micro_batches * chip.devices / HOST_BANDWIDTH
        hidden, exposed = max(sum(beside.values()), carried), sum(waited.values())
        time = NodeTime(node.name, flops / peak, moved / _bandwidth(where), hidden, exposed)
        fewer = replace(time, hidden=max(hidden - sums_again(split, node, links, call, local), carried))
        repeated += time.seconds - fewer.seconds
        read = ahead * split.micro_batches / _bandwidth(where)
        gathered = beside.get("fsdp", 0.0) * _FORWARD_HIDDEN  # sums of gradients are no part of it
        beside_it = max(gathered, carried / 2)
        alone = NodeTime(node.name, once / devices / peak, read, beside_it, exposed * _FORWARD_EXPOSED)
        forward = min(alone.seconds, time.seconds)
        if held.reference and node.name != split.graph.loss:  # which has a forward pass of its own
            time = NodeTime(
                node.name,
                time.compute + alone.compute,
                time.memory + alone.memory,
                time.hidden + alone.hidden,
                time.exposed + alone.exposed,
            )
            forward += alone.seconds
            beside = {axis: seconds + (gathered if axis == "fsdp" else 0.0) for axis, seconds in beside.items()}
            waited = {axis: seconds * (1 + _FORWARD_EXPOSED) for axis, seconds in waited.items()}
        along = {axis: beside.get(axis, 0.0) + waited.get(axis, 0.0) for axis in AXES if axis in {**beside, **waited}}
        nodes.append(replace(time, forward=forward, axes=along))
    parts = split.pipeline_parts * split.parallel.pipeline_rounds
    # GPipe (Huang et al., 2019): of M + P - 1 ticks every stage waits in P - 1.
    layered = sum(time.seconds for time, node in zip(nodes, split.graph.nodes, strict=True) if node.repeat)
    bubble = layered * (split.stages - 1) / parts
    return StepTime(tuple(nodes), update, _added(split, local) / _bandwidth(where), bubble, repeated)


def _added(split: Split, local: Frozen) -> float:
    """Bytes that one device reads and writes to add up the gradients of micro-batches: both terms and the sum."""
    if split.micro_batches == 1:
        return 0.0
    declared = split.local_graph.parameters if local.adapters is None else local.adapters.parameters
    numbers = sum(weights_of(split, node, declared) for node in split.graph.nodes) / split.sizes["fsdp"]
    return 3.0 * split.micro_batches * numbers * jnp.dtype("float32").itemsize


@dataclass(frozen=True)
class _Work:
    moved: float  # bytes read and written in one micro-batch, forward and backward, on one device
    kernel: bool  # whether attention is a kernel, which skips the pairs that causality hides; plain products do not
    slowest: float = 1.0  # attention's products on the device that has most of them, by the mean over devices
    forward: float = 0.0  # of `moved`, the forward pass alone
    passes: float = _PASSES  # products of the step for each of the forward pass, those computed again included
    offloaded: float = 0.0  # bytes that go to the host in one micro-batch of one device, and come back


def _work(split: Split, settings: TrainSettings, where: Slice) -> Mapping[str, _Work]:
    """What every node does to memory; of what is done to a micro-batch their number and the moments are no part."""
    optimizer = settings.optimizer.model_copy(update={"state_dtype": "float32"})
    alike = settings.model_copy(update={"gradient_accumulation_steps": 1, "optimizer": optimizer})
    return _work_of(part_of(split, alike, where.chip, where.platform))


@lru_cache(maxsize=256)
def _work_of(part: Part) -> Mapping[str, _Work]:
    graph = part.graph
    held = frozen_of(graph, part.settings)
    call = held.call(call_of(part.settings, part.parallel, part.dtype, part.platform))
    layout = replace(part, stages=1).layout  # a node by itself is in no pipeline
    call, traced = replace(call, layout=layout), partial(trace, axes=layout.axes)
    arrays = batch_shapes(graph, part.rows, part.context)
    values: dict[str, Any] = {name: arrays[name] for name, _ in graph.inputs}
    key = jax.eval_shape(lambda: jax.random.key(0))
    found = {}
    for node in graph.nodes:
        lent = (
            _abstract(graph.parameters[node.kind.shares]) if node.kind.shares else None,
            _abstract(graph.averages[node.name]) if node.name in graph.averages else None,
        )
        whole = _abstract(graph.parameters.get(node.name, {}))
        inputs = tuple(values[name] for name in node.inputs)
        given: tuple[Any, Any] = (whole, lent, inputs), None  # what gradients are due to, and what they are not
        if held.adapters is not None:
            adapters = _abstract(held.adapters.parameters.get(node.name, {}))
            given = (adapters, (None, lent[1]), inputs), (whole, lent[0])
        forward = partial(_forward, node, call, held)
        both, once = traced(partial(_both_ways, forward), *given, arrays, key), traced(forward, *given, arrays, key)
        values[node.name] = once.made[0]
        peak, ahead = measure(both, {}, part.platform), measure(once, {}, part.platform).moved
        every = both
        if held.adapters is not None:  # `Frozen.adapted_flops` knows what is less than for all weights
            every = traced(partial(_both_ways, forward), (whole, lent, inputs), None, arrays, key)
        kernel = node.repeat is not None and _has_kernel(once.jaxpr)
        found[node.name] = _Work(
            moved=peak.moved,
            kernel=kernel,
            slowest=_slowest(node, call, part, kernel=kernel, rings=call.rings and "parents" not in arrays),
            forward=ahead,
            passes=_passes(node, call, once.jaxpr, every.jaxpr),
            offloaded=peak.offloaded,
        )
    return found


def _slowest(node: Node, call: Call, part: Part, *, kernel: bool, rings: bool) -> float:
    """What the device with most of attention's products has of them, in parts of their mean; see `_Work.slowest`."""
    attention, parts = getattr(node.kind, "attention", None), part.neighbours
    if attention is None or parts == 1:
        return 1.0
    length = part.context * parts
    if rings:
        return steps_of(parts, part.context, attention.window) / parts
    if not kernel:
        return 1.0
    if not queries_are_split("splash", part.platform, length, parts):
        return float(parts)
    of_the_last: float = attention.pairs(length, length - part.context) * parts / attention.pairs(length)
    return of_the_last


def _passes(node: Node, call: Call, once: Any, both: Any) -> float:
    """How often the products of the forward pass are done in a step, as each of them has two in the backward pass."""
    if call.remat is None or node.repeat is None:
        return _PASSES + call.remat_nodes
    forward = _products(once)
    return _products(both) / forward if forward else _PASSES


def _products(jaxpr: Any) -> float:
    """Multiplications and additions of a program's matrix products; kernels' are not known."""
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "ragged_dot_general"):
            total += _multiplied(equation)
        elif equation.primitive.name != "pallas_call":
            turns = equation.params["length"] if equation.primitive.name == "scan" else 1
            inner = jax.extend.core.jaxprs_in_params(equation.params)
            total += turns * sum(_products(getattr(one, "jaxpr", one)) for one in inner)
    return total


def _multiplied(product: Any) -> float:
    numbers, groups = product.params.get("dimension_numbers"), 1
    left = product.invars[0].aval.shape
    if numbers is None:
        ragged = product.params["ragged_dot_dimension_numbers"]
        numbers = ragged.dot_dimension_numbers
        (contracted, _), _ = numbers
        if set(ragged.lhs_ragged_dimensions) & set(contracted):  # each group has its part of them
            groups = product.invars[2].aval.shape[-1]
    (contracted, _), _ = numbers
    return 2.0 * product.outvars[0].aval.size * math.prod(left[axis] for axis in contracted) / groups


def _forward(node: Node, call: Call, held: Frozen, moving: Any, fixed: Any, arrays: Any, key: Any) -> Any:
    params, (shared, averages), inputs = moving
    if fixed is not None:
        weights, shared = fixed
        params = held.whole({node.name: params}, {node.name: weights})[node.name]
    context = Context(replace(call, key=key), arrays, key=key, averages=averages)

    def values(params: Any, shared: Any, inputs: Any) -> Any:
        result = apply_node(node, params, inputs, replace(context, shared=shared))
        return result.value, result.losses

    return (jax.checkpoint(values) if call.remat_nodes else values)(params, shared, inputs)


def _both_ways(forward: Any, moving: Any, fixed: Any, arrays: Any, key: Any) -> Any:
    floats, rest = _split(moving)
    out, pullback = jax.vjp(lambda floats: forward(_join(floats, rest), fixed, arrays, key), floats)
    ones = jax.tree.map(lambda x: jnp.ones_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else None, out)
    return out, pullback(ones)


def _has_kernel(traced: Any) -> bool:
    text = str(traced)
    return "pallas_call" in text or "cudnn" in text


def _abstract(declared: Any) -> Any:
    return map_parameters(lambda _, p: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16), declared)


def _split(tree: Any) -> tuple[list[Any], Any]:
    leaves, structure = jax.tree.flatten(tree)
    floating = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
    floats = [leaf for leaf, flag in zip(leaves, floating, strict=True) if flag]
    return floats, (leaves, structure, floating)


def _join(floats: list[Any], rest: Any) -> Any:
    leaves, structure, floating = rest
    given = iter(floats)
    filled = [next(given) if flag else leaf for leaf, flag in zip(leaves, floating, strict=True)]
    return jax.tree.unflatten(structure, filled)
