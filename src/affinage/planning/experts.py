"""Experts as one of the devices that they lie on sees them: its own, and the tokens that all owners send it."""

from dataclasses import replace
from typing import Any

from typing_extensions import override

from affinage.model import Graph
from affinage.model.kinds.dense import dense_flops
from affinage.model.kinds.ffn import GATED
from affinage.model.kinds.moe import MoeSettings
from affinage.model.node import Node
from affinage.model.parameter import Tree, map_parameters


class OwnExperts(MoeSettings):
    """Experts of which one device has its part; its router knows all of them."""

    owners: int
    """Devices that the experts lie on."""

    @override
    def parameters(self, width: int, std: float) -> Tree:
        own = self.experts // self.owners

        def part(_: Any, parameter: Any) -> Any:
            return replace(parameter, shape=(own, *parameter.shape[1:])) if "experts" in parameter.axes else parameter

        return map_parameters(part, super().parameters(width, std))


def of_one_owner(graph: Graph, owners: int) -> Graph:
    """The graph as one of so many devices that its experts lie on holds it."""
    if owners == 1:
        return graph

    def own(kind: Any) -> Any:
        ffn = getattr(kind, "ffn", None)
        if not isinstance(ffn, MoeSettings):
            return kind
        return kind.model_copy(update={"ffn": OwnExperts(**dict(ffn), owners=owners)})

    return replace(graph, nodes=tuple(replace(node, kind=own(node.kind)) for node in graph.nodes))


def sent(experts: MoeSettings, length: int, owners: int) -> float:
    """Rows of the buffers that go to the owners of experts and back, for each token of rows of `length`."""
    if experts.capacity_factor is None:  # nothing is dropped, so there is room for all choices at every owner
        return owners * experts.top_k
    return experts.experts * experts.capacity(length) / length


def is_dropless(node: Node) -> bool:
    """Whether it has experts without a capacity."""
    experts = getattr(node.kind, "ffn", None)
    return isinstance(experts, MoeSettings) and experts.capacity_factor is None


def on_nothing(graph: Graph, node: Node, rows: int, length: int, platform: str) -> int:
    """Operations of a forward pass on empty slots: on CPUs an expert without a capacity has one for every token."""
    experts = getattr(node.kind, "ffn", None)
    if platform != "cpu" or not is_dropless(node):
        return 0
    assert isinstance(experts, MoeSettings)
    products = 3 if experts.activation in GATED else 2
    empty = rows * length * (experts.experts - experts.top_k)
    return node.layers * products * dense_flops(graph.shapes[node.name].width, experts.width, empty)
