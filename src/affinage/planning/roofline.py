"""How long a step takes: for every node the slowest of multiplying, of the memory and of the links.

What is assumed, beside the chip table: matrix products reach `Chip.achievable` of the peak; the memory reaches
MEMORY_ACHIEVABLE of its bandwidth; gathering of weights and summing of gradients run beside the products of the same
node, as XLA's scheduler has it; the sums of activations that tensor parallelism needs, and the all-to-alls of experts,
wait for the products and are waited for.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp

from affinage.hardware.slices import Slice
from affinage.model import Call
from affinage.model.activations import batch_shapes
from affinage.model.kind import Context
from affinage.model.node import Node
from affinage.model.parameter import map_parameters, parameters_in
from affinage.model.repeat import apply_node
from affinage.planning.liveness import measure, trace
from affinage.planning.local import Split
from affinage.planning.memory import Memory, call_of
from affinage.planning.part import Part, part_of
from affinage.planning.wires import Wires, wires
from affinage.recipe.training import TrainSettings
from affinage.training.frozen import Frozen, frozen_of

MEMORY_ACHIEVABLE = 0.8
HOST_BANDWIDTH = 15e9  # bytes/s between a chip and its host's memory, by PCIe ("How to Scale Your Model", ch. 2)
_PASSES = 3  # forward, and two products for each of its products backward
_TENSOR_SUMS = 4  # of a block's activations in a step: two forward, two backward (Shoeybi et al., 2019)


@dataclass(frozen=True)
class NodeTime:
    """Seconds of a step that one node could not do with less of: `seconds` is what they come to."""

    name: str
    compute: float
    memory: float
    hidden: float  # collectives, and copies to and from the host, beside the products
    exposed: float  # collectives that are waited for
    forward: float = 0.0  # of `seconds`, the forward pass

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
    bubble: float  # stages of a pipeline that wait

    @property
    def seconds(self) -> float:
        """From one update to the next."""
        return sum(node.seconds for node in self.nodes) + self.update + self.bubble

    @property
    def bound(self) -> str:
        """What most of the step is bound by."""
        parts: dict[str, float] = {"memory": self.update, "pipeline bubble": self.bubble}
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
    call = call_of(settings, split.parallel, chip, where.platform)
    datasheet = chip.flops_per_device or chip.float32_flops  # a processor's is measured
    assert datasheet is not None
    peak = datasheet * chip.achievable
    if call.compute_dtype == jnp.float32 and where.platform == "gpu":
        peak /= 2  # TensorFloat-32, what XLA multiplies float32 in there
    links = wires(where, split.sizes)
    held = frozen_of(split.graph, settings)
    local = frozen_of(split.local_graph, settings)
    nodes = []
    for node, cost in zip(split.graph.nodes, split.costs.nodes, strict=True):
        done = work[node.name]
        # Stages have layers of their own; what is not repeated they all compute.
        devices = split.devices // (1 if node.repeat else split.sizes["pipeline"])
        once = cost.flops if done.kernel else cost.flops_all_pairs
        flops = (done.passes * once + held.adapted_flops(node, split.rows, split.context)) / devices
        moved, ahead = done.moved, done.forward
        if node.repeat is not None and split.stages > 1:
            # The weights of a stage, or of one of its rounds, are read in every tick.
            again = _weights_of(split, node) * jnp.dtype(call.compute_dtype).itemsize
            again *= split.ticks / split.parallel.pipeline_rounds - 1
            moved, ahead = moved / split.stages + _PASSES * again, ahead / split.stages + again
        moved *= split.micro_batches
        hidden, exposed = _collectives(split, node, links, call, settings, local)
        hidden = max(hidden, 2 * done.offloaded * split.micro_batches * chip.devices / HOST_BANDWIDTH)
        time = NodeTime(node.name, flops / peak, moved / _bandwidth(where), hidden, exposed)
        read = ahead * split.micro_batches / _bandwidth(where)
        # Of what fsdp gathers and scatters a third is forward, of tensor parallelism's sums half.
        alone = NodeTime(node.name, once / devices / peak, read, hidden / 3, exposed / 2)
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
        nodes.append(replace(time, forward=forward))
    parts = split.pipeline_parts * split.parallel.pipeline_rounds
    # GPipe (Huang et al., 2019): of M + P - 1 ticks every stage waits in P - 1.
    layered = sum(time.seconds for time, node in zip(nodes, split.graph.nodes, strict=True) if node.repeat)
    bubble = layered * (split.stages - 1) / parts
    return StepTime(tuple(nodes), update, bubble)


@dataclass(frozen=True)
class _Work:
    moved: float  # bytes read and written in one micro-batch, forward and backward, on one device
    kernel: bool  # whether attention is a kernel, which skips the pairs that causality hides; plain products do not
    forward: float = 0.0  # of `moved`, the forward pass alone
    passes: float = _PASSES  # products of the step for each of the forward pass, those computed again included
    offloaded: float = 0.0  # bytes that go to the host in one micro-batch of one device, and come back


def _work(split: Split, settings: TrainSettings, where: Slice) -> Mapping[str, _Work]:
    """What every node does to memory; of what is done to a micro-batch their number and the moments are no part."""
    optimizer = settings.optimizer.model_copy(update={"moments": "float32"})
    alike = settings.model_copy(update={"micro_batches": 1, "optimizer": optimizer})
    return _work_of(part_of(split, alike, where.chip, where.platform))


@lru_cache(maxsize=256)
def _work_of(part: Part) -> Mapping[str, _Work]:
    graph = part.graph
    held = frozen_of(graph, part.settings)
    call = held.call(call_of(part.settings, part.parallel, part.chip, part.platform))
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
        values[node.name] = jax.eval_shape(forward, *given, arrays, key)[0]
        both, once = trace(partial(_both_ways, forward), *given, arrays, key), trace(forward, *given, arrays, key)
        peak, ahead = measure(both, {}, part.platform), measure(once, {}, part.platform).moved
        every = both
        if held.adapters is not None:  # `Frozen.adapted_flops` knows what is less than for all weights
            every = trace(partial(_both_ways, forward), (whole, lent, inputs), None, arrays, key)
        found[node.name] = _Work(
            moved=peak.moved,
            kernel=node.repeat is not None and _has_kernel(once.jaxpr),
            forward=ahead,
            passes=_passes(node, call, once.jaxpr, every.jaxpr),
            offloaded=peak.offloaded,
        )
    return found


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
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2.0 * equation.outvars[0].aval.size * math.prod(left[axis] for axis in contracted)
        elif equation.primitive.name != "pallas_call":
            turns = equation.params["length"] if equation.primitive.name == "scan" else 1
            inner = jax.extend.core.jaxprs_in_params(equation.params)
            total += turns * sum(_products(getattr(one, "jaxpr", one)) for one in inner)
    return total


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


def _weights_of(split: Split, node: Node, declared: Mapping[str, Any] | None = None) -> int:
    """A node's parameters as far as tensor, expert and pipeline leave them to one device; or those of `declared`."""
    given = split.local_graph.parameters if declared is None else declared
    count = sum(p.size for p in parameters_in(given.get(node.name, {})))
    return count // (split.stages if node.repeat else 1)


def _collectives(
    split: Split, node: Node, links: Mapping[str, Wires], call: Call, settings: TrainSettings, held: Frozen
) -> tuple[float, float]:
    """Seconds of one node's collectives in a step: beside its products, and waited for."""
    sizes, parts = split.sizes, split.micro_batches
    width = jnp.dtype(call.compute_dtype).itemsize
    # Weights as the fsdp axis sees them: what tensor, expert and pipeline leave of them.
    weights = _weights_of(split, node)
    trained = weights if held.adapters is None else _weights_of(split, node, held.adapters.parameters)
    hidden = exposed = 0.0
    if sizes["fsdp"] > 1:
        # Gathered forward and again backward; the gradients are summed and scattered. In a pipeline in every tick.
        times = parts * (split.ticks / split.parallel.pipeline_rounds if node.repeat else 1)
        hidden += times * (
            2 * links["fsdp"].all_gather(weights * width) + links["fsdp"].reduce_scatter(trained * width)
        )
    if sizes["data"] > 1:
        stored = jnp.dtype("float32" if parts > 1 else settings.precision.params).itemsize
        hidden += links["data"].all_reduce(trained * stored / sizes["fsdp"])
    if node.repeat is not None:
        residual = split.local_rows * split.local_context * split.graph.shapes[node.name].width * width
        layers = split.local_graph[node.name].layers / split.stages
        exposed += parts * layers * _TENSOR_SUMS * links["tensor"].all_reduce(residual) if sizes["tensor"] > 1 else 0.0
        if sizes["expert"] > 1 and "experts" in str(split.graph.parameters.get(node.name)):
            whole = residual * sizes["expert"]
            exposed += parts * layers * 4 * links["expert"].all_to_all(whole)
        if sizes["context"] > 1:
            whole = 2 * residual * sizes["context"]  # keys and values
            exposed += parts * layers * 3 * links["context"].all_gather(whole)
        if sizes["pipeline"] > 1:
            exposed += 2 * parts * links["pipeline"].permute(residual)
    return hidden, exposed
