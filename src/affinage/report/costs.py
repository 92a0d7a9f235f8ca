"""What every node of a trained model costs, by the model's own analysis."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from affinage.errors import UserError
from affinage.results import TrainedModel, read_json


@dataclass(frozen=True)
class Node:
    """A node of the model graph; `flops` of the forward pass of one row. None where they are not known."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    repeat: int
    shape: str
    parameters: int | None
    flops: int | None


def node_costs(folder: Path) -> tuple[tuple[Node, ...], int | None]:
    """The nodes of the model that was trained in `folder`, and the tokens of a row, None for a model without tokens.

    Nothing if the folder does not say.
    """
    from affinage.model import parse
    from affinage.model.analysis import analyse

    model = TrainedModel.model_validate(read_json(folder / "model.json"))
    context = model.context
    if not model.graph:
        return (), None
    try:
        graph = parse(model.graph)
        if not context and any(name == "tokens" for name, _ in graph.inputs):
            return (), None
        analysis = analyse(graph, 1, context or 1)
    except UserError:  # written by another version, whose kinds of nodes this one does not have
        return (), None
    nodes = [Node(n.name, n.kind, n.inputs, n.repeat, n.shape, n.parameters, n.flops) for n in analysis.nodes]
    return tuple(nodes), context


def written_nodes(nodes: Mapping[str, Mapping[str, Any]]) -> tuple[Node, ...]:
    """The nodes as a recipe writes them, for a run that trained nothing."""
    return tuple(_written(name, entry) for name, entry in nodes.items())


def _written(name: str, entry: Mapping[str, Any]) -> Node:
    inputs = entry.get("in", ())
    names = tuple(map(str, inputs)) if isinstance(inputs, list | tuple) else (str(inputs),)
    kind, repeat = entry.get("kind"), entry.get("repeat")
    return Node(name, str(kind or ""), names, repeat if isinstance(repeat, int) else 1, "", None, None)
