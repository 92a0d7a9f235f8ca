"""Seconds that the collectives of a step take, node by node and mesh axis by mesh axis."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from affinage.config.training import TrainSettings
from affinage.model import Call
from affinage.model.kinds.embedding import Embedding, LearnedPositions
from affinage.model.kinds.moe import MoeSettings
from affinage.model.node import Node
from affinage.model.parameter import parameters_in
from affinage.parallel.choice import call_on
from affinage.parallel.layout import REPLICAS
from affinage.parallel.mesh import AXES
from affinage.parallel.pipeline import AXIS as STAGES
from affinage.planning.experts import sent
from affinage.planning.local import Split
from affinage.planning.wires import Wires
from affinage.training.frozen import Frozen
from affinage.training.step import replicas_of

_TENSOR_SUMS = 4  # of a block's activations in a step: two forward, two backward (Shoeybi et al., 2019)
_ADDED_UP = 4  # bytes of a number in the sums over micro-batches, float32
_EXCHANGES = 4  # of experts' buffers: there and back, forward and backward

Seconds = dict[str, float]  # by mesh axis


def weights_of(split: Split, node: Node, declared: Mapping[str, Any] | None = None) -> int:
    """A node's parameters as far as tensor, expert and pipeline leave them to one device; or those of `declared`."""
    given = split.local_graph.parameters if declared is None else declared
    count = sum(p.size for p in parameters_in(given.get(node.name, {})))
    return count // (split.stages if node.repeat else 1)


def collectives(
    split: Split, node: Node, links: Mapping[str, Wires], call: Call, settings: TrainSettings, held: Frozen
) -> tuple[Seconds, Seconds]:
    """Seconds of one node's collectives in a step: beside its products, and waited for."""
    sizes, parts = split.sizes, split.micro_batches
    width = jnp.dtype(call.compute_dtype).itemsize
    # Weights as the fsdp axis sees them: what tensor, expert and pipeline leave of them.
    weights = weights_of(split, node)
    declared = split.local_graph.parameters if held.adapters is None else held.adapters.parameters
    trained = weights_of(split, node, declared)
    hidden = _sums_of_gradients(split, node, links, call, held)
    exposed: Seconds = {}
    if sizes["fsdp"] > 1:
        # Gathered forward and again backward; the gradients are summed and scattered. In a pipeline in every tick.
        times = parts * (split.ticks / split.parallel.pipeline_rounds if node.repeat else 1)
        hidden["fsdp"] = times * (
            2 * links["fsdp"].all_gather(weights * width) + links["fsdp"].reduce_scatter(trained * width)
        )
    if node.repeat is not None:
        residual = split.local_rows * split.local_context * split.graph.shapes[node.name].width * width
        layers = split.local_graph[node.name].layers / split.stages
        # To compute a layer again takes its first sum, unless `dots` keeps it, and both ways of an exchange.
        remat = split.parallel.remat
        if sizes["tensor"] > 1:
            times = _TENSOR_SUMS + (remat not in ("none", "dots"))
            exposed["tensor"] = parts * layers * times * links["tensor"].all_reduce(residual)
        experts = getattr(node.kind, "ffn", None)
        if sizes["expert"] > 1 and isinstance(experts, MoeSettings):
            whole = residual * sent(experts, split.context, sizes["expert"]) * sizes["expert"]
            times = _EXCHANGES + 2 * (remat != "none")
            exposed["expert"] = parts * layers * times * links["expert"].all_to_all(whole)
        if sizes["context"] > 1:
            whole = _keys_and_values(split, node, width) * sizes["context"]
            exposed["context"] = parts * layers * 3 * links["context"].all_gather(whole)
        if sizes[STAGES] > 1:
            # Once round for every part and round, forward and backward; the bubble has the ticks without work.
            times = parts * split.pipeline_parts * split.parallel.pipeline_rounds
            exposed[STAGES] = 2 * times * links[STAGES].permute(residual / split.pipeline_parts)
            if split.parallel.pipeline_rounds > 1:
                # Weights lie in the order of the layers: they go to the stages of their rounds, and gradients back.
                sent_each = jnp.dtype(settings.precision.params).itemsize * split.stages / sizes["fsdp"]
                for numbers in (weights, trained):
                    exposed[STAGES] += parts * links[STAGES].all_to_all(numbers * sent_each)
    return hidden, exposed


def _keys_and_values(split: Split, node: Node, width: int) -> float:
    """Bytes of those that a device makes in a layer, of numbers of `width` bytes; of grouped queries they are fewer."""
    attention = getattr(split.local_graph[node.name].kind, "attention", None)
    if attention is None:
        return 0.0
    head = attention.head_width(split.graph.shapes[node.name].width)
    return 2.0 * split.local_rows * split.local_context * attention.groups_of * head * width


def sums_again(split: Split, node: Node, links: Mapping[str, Wires], call: Call, held: Frozen) -> float:
    """Seconds of the sums of a node's gradients that are made in every micro-batch or tick, beyond the first ones."""
    every, first = (_sums_of_gradients(split, node, links, call, held, once=once) for once in (False, True))
    return sum(every.values()) - sum(first.values())


def _sums_of_gradients(
    split: Split, node: Node, links: Mapping[str, Wires], call: Call, held: Frozen, *, once: bool = False
) -> Seconds:
    """Of a step's gradients along the axes that split rows or positions, not the weight; that of `fsdp` is not there.

    Along each axis goes what the inner ones have scattered, but of what replicas have added up goes all.
    """
    declared = split.local_graph.parameters if held.adapters is None else held.adapters.parameters
    summed = {*split.table["batch"], *split.table["sequence"]} - {"fsdp"}
    counts: Counter[tuple[str, ...]] = Counter()
    for parameter in parameters_in(declared.get(node.name, {})):
        over = {name for axis in parameter.axes if axis for name in split.table[axis]}
        axes = tuple(a for a in reversed(AXES) if a in summed - over and split.sizes[a] > 1)
        counts[axes] += parameter.size
    apart = adds_up(split, call)
    times, width = sums_of_gradients(split, node, call)
    seconds: Seconds = {}
    for axes, count in counts.items():
        numbers = count // (split.stages if node.repeat else 1) / split.sizes["fsdp"]
        left = numbers
        for axis in axes:
            if axis == REPLICAS and apart:
                taken = links[axis].all_reduce(numbers * _ADDED_UP)
            else:
                taken = (1 if once else times) * links[axis].all_reduce(left * width)
                left /= split.sizes[axis]
            seconds[axis] = seconds.get(axis, 0.0) + taken
    return seconds


def adds_up(split: Split, call: Call) -> bool:
    """Whether every replica adds up the gradients of its own micro-batches, which are then summed once."""
    asked = call_on(split.layout, call.attention, split.parallel)
    return split.micro_batches > 1 and replicas_of(split.graph, asked) > 1


def sums_of_gradients(split: Split, node: Node, call: Call) -> tuple[float, int]:
    """How often in a step a node's gradients are summed over devices that go together, and bytes of each number.

    As the TPU's compiler has it, and as is assumed of others. It takes a sum out of the loop over micro-batches where
    nothing but the addition reads it: of a product that is in no other loop, and then sums what is added up. Those of
    layers stay in the loop over layers, or over a pipeline's ticks, in the dtype of the products; those of looked-up
    vectors are float32, and what logits tied to them add is summed by itself.
    """
    parts, width = split.micro_batches, jnp.dtype(call.compute_dtype).itemsize
    if isinstance(node.kind, Embedding | LearnedPositions):
        tied = any(other.kind.shares == node.name for other in split.graph.nodes)
        return parts, _ADDED_UP + (width if tied else 0)
    if node.repeat is None:
        return 1, width if parts == 1 else _ADDED_UP
    return parts * (split.ticks / split.parallel.pipeline_rounds if split.stages > 1 else 1), width
