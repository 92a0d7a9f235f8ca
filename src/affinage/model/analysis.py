"""What a graph costs, known from its shapes alone: parameters, floating point operations and bytes.

The convention: a matrix product of [m, k] and [k, n] is 2 m n k operations and nothing else counts. Attention counts
the pairs of tokens that causality leaves, S (S + 1) / 2 of a row, as if its documents were one; `flops_all_pairs`
counts S * S, which is what an implementation without block skipping computes and what 6 N + 12 L D S stands for.
Experts count for the tokens sent to them or, where they have a capacity, for their slots, filled or not.

The backward pass has two products for each of the forward pass, one for either factor; recomputation is not counted. So
a training step is three forward passes, of a node that no gradient goes through (`constant`) one.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from affinage.model.graph import Graph
from affinage.model.kind import Cost
from affinage.model.kinds.embedding import Embedding, LearnedPositions
from affinage.model.node import Node
from affinage.model.parameter import Parameter, parameters_in
from affinage.model.shape import BATCH, SEQUENCE

BACKWARD = 2  # products of the backward pass for each of the forward pass
_SUMMED = ("parameters", "active_parameters", "flops", "training_flops", "training_flops_all_pairs")


@dataclass(frozen=True)
class ParameterCount:
    """How many numbers a graph learns."""

    total: int
    active: int  # that one token uses: all but the experts it is not sent to
    embedding: int  # tables that are looked up, of tokens or positions; a tied unembedding is one of them

    @property
    def non_embedding(self) -> int:
        """All that is multiplied by, an unembedding of its own included."""
        return self.total - self.embedding


@dataclass(frozen=True)
class NodeCost:
    """One node with its parameters and its operations in one forward pass, all its repeats together."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    repeat: int
    shape: str  # of the value, symbolic in B and S
    parameters: int
    active_parameters: int
    flops: int
    flops_all_pairs: int
    attention_flops: int  # of `flops`, attention's two products
    backward_flops: int
    backward_flops_all_pairs: int

    @property
    def training_flops(self) -> int:
        """Of a forward and a backward pass."""
        return self.flops + self.backward_flops

    @property
    def training_flops_all_pairs(self) -> int:
        """The same with attention over all S * S pairs of tokens."""
        return self.flops_all_pairs + self.backward_flops_all_pairs


@dataclass(frozen=True)
class Analysis:
    """The cost of every node for a batch of `batch` rows of `context` tokens."""

    nodes: tuple[NodeCost, ...]
    batch: int
    context: int

    @property
    def flops(self) -> int:
        """Of one forward pass."""
        return sum(node.flops for node in self.nodes)

    @property
    def training_flops(self) -> int:
        """Of one training step on this batch."""
        return sum(node.training_flops for node in self.nodes)

    @property
    def training_flops_all_pairs(self) -> int:
        """The same with attention over all S * S pairs of tokens."""
        return sum(node.training_flops_all_pairs for node in self.nodes)


def parameters(graph: Graph) -> ParameterCount:
    """Counts of the declared parameters; nothing is allocated."""
    tables = (Embedding, LearnedPositions)
    embedding = sum(_count(graph, node) for node in graph.nodes if isinstance(node.kind, tables))
    declared = parameters_in(graph.parameters)
    return ParameterCount(sum(p.size for p in declared), sum(p.active for p in declared), embedding)


def analyse(graph: Graph, batch: int, context: int) -> Analysis:
    """The cost of every node at this batch (rows) and context (tokens of a row)."""
    sizes = {BATCH: batch, SEQUENCE: context}
    rows = []
    for node in graph.nodes:
        cost: Cost = node.kind.cost(graph.input_shapes(node), sizes) * node.layers
        flops, all_pairs = cost.matmul + cost.attention_causal, cost.matmul + cost.attention
        products = 0 if node.kind.constant else BACKWARD
        rows.append(
            NodeCost(
                name=node.name,
                kind=node.kind.kind_name,
                inputs=node.inputs,
                repeat=node.layers,
                shape=str(graph.shapes[node.name]),
                parameters=_count(graph, node),
                active_parameters=sum(p.active for p in _declared(graph, node)),
                flops=flops,
                flops_all_pairs=all_pairs,
                attention_flops=cost.attention_causal,
                backward_flops=products * flops,
                backward_flops_all_pairs=products * all_pairs,
            )
        )
    return Analysis(tuple(rows), batch, context)


def summary_table(graph: Graph, batch: int, context: int) -> list[dict[str, Any]]:
    """One JSON-able row per node and a last one, named `total`: what `affinage graph` prints."""
    analysis = analyse(graph, batch, context)
    table: list[dict[str, Any]] = [
        {
            "name": node.name,
            "kind": node.kind,
            "inputs": list(node.inputs),
            "repeat": node.repeat,
            "shape": node.shape,
            "parameters": node.parameters,
            "active_parameters": node.active_parameters,
            "flops": node.flops,
            "training_flops": node.training_flops,
            "training_flops_all_pairs": node.training_flops_all_pairs,
        }
        for node in analysis.nodes
    ]
    total = {key: sum(row[key] for row in table) for key in _SUMMED}
    return [*table, {"name": "total", "kind": "", "inputs": [], "repeat": 1, "shape": "", **total}]


def cache_bytes(graph: Graph, batch: int, length: int, dtype: Any = jnp.float32) -> int:
    """Bytes of what decoding keeps for `length` tokens of `batch` rows."""
    elements = 0
    for node in graph.nodes:
        shapes = node.kind.cache(graph.input_shapes(node), batch, length)
        elements += node.layers * sum(int(np.prod(shape)) for shape in shapes.values())
    return elements * jnp.dtype(dtype).itemsize


def mermaid(graph: Graph) -> str:
    """The graph as a Mermaid flowchart; dotted arrows are parameters that a node reads from another."""
    lines = ["flowchart TD"]
    lines += [f'    {name}(["{name} {shape}"])' for name, shape in graph.inputs]
    for node in graph.nodes:
        times = f" × {node.repeat}" if node.repeat else ""
        lines.append(f'    {node.name}["{node.name}: {node.kind.kind_name}{times}<br/>{graph.shapes[node.name]}"]')
        lines += [f"    {source} --> {node.name}" for source in node.inputs]
        if node.kind.shares:
            lines.append(f"    {node.kind.shares} -. weights .-> {node.name}")
    return "\n".join(lines) + "\n"


def _count(graph: Graph, node: Node) -> int:
    return sum(p.size for p in _declared(graph, node))


def _declared(graph: Graph, node: Node) -> list[Parameter]:
    return parameters_in(graph.parameters.get(node.name, {}))
