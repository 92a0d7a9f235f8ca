"""From vectors to logits."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field
from typing_extensions import override

from affinage.model.layer import Cost, Layer, LayerContext, Shape, expect_sequence, register_layer, sequence_of
from affinage.model.layers.dense import dense_flops
from affinage.model.layers.embedding import Embedding
from affinage.model.parameter import ParamSpec, PyTree
from affinage.model.products import Logits


@register_layer("unembed")
class Unembed(Layer):
    """A logit for every token id, by its own kernel or, tied, by the embedding's (Press and Wolf, 2017)."""

    joins = by_token = narrows = True

    tied: bool | str = False
    """The name of the embedding node; true: the only one there is."""
    vocab: int | None = Field(default=None, ge=2)
    """Number of token ids; default: the embedding's."""
    softcap: float | None = Field(default=None, gt=0)
    """Logits are bounded to ± this by a tanh."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the first kernel."""

    @override
    def bind(self, nodes: Mapping[str, Any]) -> Self:
        embeddings = {name: node.layer for name, node in nodes.items() if isinstance(node.layer, Embedding)}
        tied = self.tied
        if tied is True or (tied is False and self.vocab is None):
            if len(embeddings) != 1:
                key = "tied" if tied else "vocab"
                raise ValueError(f"{key} must be given where the graph has {len(embeddings)} embedding nodes")
            (only,) = embeddings
            tied, source = (only, only) if tied else (False, only)
        elif isinstance(tied, str) and tied not in embeddings:
            raise ValueError(f"tied: `{tied}` is not an embedding node")
        else:
            source = tied or ""
        vocab = embeddings[source].vocab if source else self.vocab
        if tied and self.vocab not in (None, vocab):
            raise ValueError(f"vocab {self.vocab} differs from the {vocab} of `{tied}` it is tied to")
        return self.model_copy(update={"tied": tied, "vocab": vocab})

    @property
    @override
    def shares(self) -> str | None:
        return self.tied if isinstance(self.tied, str) else None

    @override
    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        expect_sequence(inputs[0])
        return sequence_of(self.vocab or 0)

    @override
    def parameters(self, inputs: tuple[Shape, ...]) -> PyTree:
        if self.shares:
            return {}
        shape = (self.vocab or 0, inputs[0].width)
        return {"kernel": ParamSpec(shape, ("vocab", "embed"), std=self.init_std)}

    @override
    def apply(self, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Logits:
        kernel = context.shared["embedding"] if context.shared is not None else params["kernel"]
        hidden = context.config.constrain(context.narrowed(inputs[0]), ("batch", "sequence", "width"))
        return Logits(hidden, kernel.astype(context.config.compute_dtype), self.softcap)

    @override
    def cost(self, inputs: tuple[Shape, ...], sizes: Mapping[str, int]) -> Cost:
        batch, length = inputs[0].bind(sizes)[:2]
        return Cost(matmul=dense_flops(inputs[0].width, self.vocab or 0, batch * length))
