"""What a graph costs, known from its shapes alone: parameters and floating point operations.

The convention: a matrix product of [m, k] and [k, n] is 2 m n k operations and nothing else counts. Attention counts
the pairs of tokens that causality leaves, S (S + 1) / 2 of a row, as if its documents were one. Experts count for the
tokens sent to them or, where they have a capacity, for their slots, filled or not. A training step is three forward
passes, as recomputation is not counted; of a node that no gradient goes through (`constant`) it is one.
"""

from dataclasses import asdict, dataclass
from typing import Any

from affinage.model.graph import Graph
from affinage.model.layer import BATCH, SEQUENCE, parameters_in
from affinage.model.layers.embedding import Embedding, LearnedPositions


@dataclass(frozen=True)
class ParameterCount:
    """How many numbers a graph learns."""

    total: int
    active: int  # that one token uses: all but the experts it is not sent to
    embedding: int  # tables that are looked up, of tokens or positions; a tied unembedding is one of them


@dataclass(frozen=True)
class NodeCost:
    """One node with its parameters and its operations, all its repeats together."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    repeat: int
    shape: str  # of the value, symbolic in B and S
    parameters: int
    flops: int  # of a forward pass
    training_flops: int  # of a forward and a backward pass


def parameters(graph: Graph) -> ParameterCount:
    """Counts of the declared parameters; nothing is allocated."""
    tables = [node.name for node in graph.nodes if isinstance(node.layer, Embedding | LearnedPositions)]
    embedding = sum(p.size for name in tables for p in parameters_in(graph.parameters[name]))
    declared = parameters_in(graph.parameters)
    return ParameterCount(sum(p.size for p in declared), sum(p.active for p in declared), embedding)


def analyze(graph: Graph, batch: int, context: int) -> list[NodeCost]:
    """The cost of every node at this batch (rows) and context (tokens of a row)."""
    costs = []
    for node in graph.nodes:
        cost = node.layer.cost(graph.input_shapes(node), {BATCH: batch, SEQUENCE: context}) * node.layers
        size = sum(parameter.size for parameter in parameters_in(graph.parameters.get(node.name, {})))
        flops = cost.matmul + cost.attention
        facts = (node.name, node.layer.kind_name, node.inputs, node.layers, str(graph.shapes[node.name]))
        costs.append(NodeCost(*facts, size, flops, flops if node.layer.constant else 3 * flops))
    return costs


def summary_table(graph: Graph, batch: int, context: int) -> list[dict[str, Any]]:
    """One JSON-able row per node and a last one, named `total`: what `affinage graph` prints."""
    table = [asdict(node) | {"inputs": list(node.inputs)} for node in analyze(graph, batch, context)]
    total = {key: sum(row[key] for row in table) for key in ("parameters", "flops", "training_flops")}
    return [*table, {"name": "total", "kind": "", "inputs": [], "repeat": 1, "shape": "", **total}]
