"""The parts of a decoder-only language model in a graph, for the families of the Hugging Face Hub."""

from dataclasses import dataclass
from typing import Self

from affinage.errors import UserError
from affinage.model.graph import Graph
from affinage.model.kinds.block import TransformerBlock
from affinage.model.kinds.dropout import Dropout
from affinage.model.kinds.embedding import Embedding, LearnedPositions
from affinage.model.kinds.head import Unembed
from affinage.model.kinds.norm import LayerNorm, RmsNorm
from affinage.model.node import Node


@dataclass(frozen=True)
class Decoder:
    """Names and settings of the chain embedding, (positions), (dropout), blocks, norm, unembed."""

    embed_name: str
    embed: Embedding
    positions_name: str | None
    positions: LearnedPositions | None
    dropout: float  # after the embeddings
    blocks_name: str
    blocks: TransformerBlock
    repeated: bool  # whether the blocks' parameters have the layers as first axis
    layers: int
    norm_name: str
    norm: RmsNorm | LayerNorm
    unembed_name: str
    unembed: Unembed

    @classmethod
    def of(cls, graph: Graph) -> Self:
        """The parts of a graph that is such a chain; UserError otherwise."""
        chain = list(reversed(list(_chain(graph))))
        kinds = [node.kind for node in chain]
        embeds, positions = _only(chain, Embedding), _at_most_one(chain, LearnedPositions)
        blocks, norm, unembed = _only(chain, TransformerBlock), kinds[-2], _only(chain, Unembed)
        rates = [kind.rate for kind in kinds if isinstance(kind, Dropout)]
        if not isinstance(norm, RmsNorm | LayerNorm) or len(chain) != 4 + (positions is not None) + len(rates):
            names = ", ".join(f"{node.name} ({node.kind.kind_name})" for node in chain)
            raise _unsupported(f"its nodes are {names}")
        assert isinstance(embeds.kind, Embedding) and isinstance(blocks.kind, TransformerBlock)
        assert isinstance(unembed.kind, Unembed)
        return cls(
            embed_name=embeds.name,
            embed=embeds.kind,
            positions_name=positions.name if positions else None,
            positions=positions.kind if positions and isinstance(positions.kind, LearnedPositions) else None,
            dropout=max(rates, default=0.0),
            blocks_name=blocks.name,
            blocks=blocks.kind,
            repeated=blocks.repeat is not None,
            layers=blocks.layers,
            norm_name=chain[-2].name,
            norm=norm,
            unembed_name=unembed.name,
            unembed=unembed.kind,
        )

    @property
    def width(self) -> int:
        """Of the residual stream."""
        return self.embed.width

    @property
    def tied(self) -> bool:
        """Whether the logits use the embedding's vectors."""
        return self.unembed.shares is not None


def _chain(graph: Graph) -> list[Node]:
    """Nodes from the logits back to the tokens, each by its only input."""
    found, name = [], graph.logits
    while name in graph:
        found.append(graph[name])
        name = graph[name].inputs[0]
    return found


def _at_most_one(chain: list[Node], kind: type) -> Node | None:
    found = [node for node in chain if isinstance(node.kind, kind)]
    if len(found) > 1:
        raise _unsupported(f"it has {len(found)} nodes of kind {found[0].kind.kind_name}")
    return found[0] if found else None


def _only(chain: list[Node], kind: type) -> Node:
    found = _at_most_one(chain, kind)
    if found is None:
        raise _unsupported(f"it has no {kind.__name__}")
    return found


def _unsupported(why: str) -> UserError:
    return UserError(
        f"the model cannot be written for transformers: {why}",
        fix="a chain of embedding, one repeated transformer_block, norm and unembed can",
    )
