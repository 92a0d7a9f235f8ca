"""What a graph costs, known from its shapes alone: parameters, floating point operations and bytes.

The convention: a matrix product of [m, k] and [k, n] is 2 m n k operations and nothing else counts. Attention counts
the pairs of tokens that causality leaves, S (S + 1) / 2 of a row, as if its documents were one; `flops_all_pairs`
counts S * S, which is what an implementation without block skipping computes and what 6 N + 12 L D S stands for.
Experts count for the tokens sent to them or, where they have a capacity, for their slots, filled or not.

The backward pass has two products for each of the forward pass, one for either factor; recomputation is not counted. So
a training step is three forward passes, of a node that no gradient goes through (`constant`) one.
"""

from dataclasses import asdict, dataclass
from typing import Any

from affinage.model.graph import Graph
from affinage.model.layer import BATCH, SEQUENCE
from affinage.model.layers.embedding import Embedding, LearnedPositions
from affinage.model.parameter import parameters_in


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
    """One node with its parameters and its operations, all its repeats together."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    repeat: int
    shape: str  # of the value, symbolic in B and S
    parameters: int
    active_parameters: int
    flops: int  # of a forward pass
    flops_all_pairs: int
    training_flops: int  # of a forward and a backward pass
    training_flops_all_pairs: int


@dataclass(frozen=True)
class Analysis:
    """The cost of every node for a batch, and sums over the nodes."""

    nodes: tuple[NodeCost, ...]
    flops: int
    training_flops: int
    training_flops_all_pairs: int


def parameters(graph: Graph) -> ParameterCount:
    """Counts of the declared parameters; nothing is allocated."""
    tables = [node.name for node in graph.nodes if isinstance(node.layer, Embedding | LearnedPositions)]
    embedding = sum(p.size for name in tables for p in parameters_in(graph.parameters[name]))
    declared = parameters_in(graph.parameters)
    return ParameterCount(sum(p.size for p in declared), sum(p.active for p in declared), embedding)


def analyze(graph: Graph, batch: int, context: int) -> Analysis:
    """The cost of every node at this batch (rows) and context (tokens of a row)."""
    nodes = []
    for node in graph.nodes:
        cost = node.layer.cost(graph.input_shapes(node), {BATCH: batch, SEQUENCE: context}) * node.layers
        declared = parameters_in(graph.parameters.get(node.name, {}))
        flops, all_pairs = cost.matmul + cost.attention_causal, cost.matmul + cost.attention
        passes = 1 if node.layer.constant else 3
        size, active = sum(p.size for p in declared), sum(p.active for p in declared)
        of_node = (node.name, node.layer.kind_name, node.inputs, node.layers, str(graph.shapes[node.name]))
        nodes.append(NodeCost(*of_node, size, active, flops, all_pairs, passes * flops, passes * all_pairs))
    totals = (sum(getattr(node, name) for node in nodes) for name in list(Analysis.__annotations__)[1:])
    return Analysis(tuple(nodes), *totals)


def summary_table(graph: Graph, batch: int, context: int) -> list[dict[str, Any]]:
    """One JSON-able row per node and a last one, named `total`: what `affinage graph` prints."""
    table = [asdict(node) | {"inputs": list(node.inputs)} for node in analyze(graph, batch, context).nodes]
    summed = ("parameters", "active_parameters", "flops", "training_flops", "training_flops_all_pairs")
    total = {key: sum(row[key] for row in table) for key in summed}
    return [*table, {"name": "total", "kind": "", "inputs": [], "repeat": 1, "shape": "", **total}]
