"""Which of transformers' families a graph can be written as."""

from collections.abc import Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

from affinage.hub import gpt2, llama
from affinage.hub.decoder import Decoder
from affinage.model.graph import Graph
from affinage.model.parameter import Tree


class Family(Protocol):
    """What a module of this package offers for one family."""

    def to_hf(self, params: Tree, graph: Graph) -> dict[str, NDArray[Any]]:
        """Tensors under the names transformers uses."""

    def from_hf(self, tensors: Mapping[str, NDArray[Any]], graph: Graph) -> Tree:
        """Parameters of the graph from such tensors."""

    def hf_config(self, graph: Graph, *, context: int | None = None) -> dict[str, Any]:
        """What config.json says of the architecture."""


def family_of(graph: Graph) -> Family:
    """GPT-2 for learned positions, the Llama family otherwise; what does not fit is refused when used."""
    return gpt2 if Decoder.of(graph).positions is not None else llama
