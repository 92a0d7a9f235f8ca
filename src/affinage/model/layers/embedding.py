"""From token ids to vectors, learned positions, and from vectors to logits."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import jax.numpy as jnp
from jaxtyping import Array
from pydantic import Field
from typing_extensions import override

from affinage.errors import UserError
from affinage.model.layer import (
    TOKENS,
    Cost,
    Layer,
    LayerContext,
    Shape,
    ShapeMismatch,
    expect_sequence,
    register_layer,
    sequence_of,
)
from affinage.model.layers.dense import dense_flops
from affinage.model.parameter import ParamSpec, PyTree
from affinage.model.products import Logits

if TYPE_CHECKING:
    from affinage.model.graph import Node


@register_layer("embedding")
class Embedding(Layer):
    """A learned vector for every token id."""

    joins = True

    takes = ("tokens",)
    vocab: int = Field(ge=2)
    """Number of token ids."""
    width: int = Field(ge=1)
    """Of the vectors, and so of the residual stream."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the first values."""

    @override
    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        if inputs[0] != TOKENS:
            raise ShapeMismatch(f"expected token ids [B, S] int, got {inputs[0]}")
        return sequence_of(self.width)

    @override
    def parameters(self, inputs: tuple[Shape, ...]) -> PyTree:
        return {"embedding": ParamSpec((self.vocab, self.width), ("vocab", "embed"), std=self.init_std)}

    @override
    def apply(self, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Array:
        layout = context.config.layout
        x = jnp.take(params["embedding"], inputs[0], axis=0, mode="clip").astype(context.config.compute_dtype)
        # Beside a pipeline XLA would gather the gradient of all rows, to add it to a table that is split by width.
        x = layout.own_rows(layout.gather_rows(x))
        return layout.constrain(x, ("batch", "residual", "width"))


@register_layer("learned_positions")
class LearnedPositions(Layer):
    """Adds a learned vector for the index of the token within its document (GPT-2)."""

    joins = True

    length: int = Field(ge=1)
    """Positions that have a vector; the context must not be longer."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the first values."""

    @override
    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        return sequence_of(expect_sequence(inputs[0]))

    @override
    def parameters(self, inputs: tuple[Shape, ...]) -> PyTree:
        return {"embedding": ParamSpec((self.length, inputs[0].width), (None, "embed"), std=self.init_std)}

    @override
    def apply(self, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Array:
        (x,) = inputs
        # A row of several sequences may be longer.
        if x.shape[1] > self.length and "prefix_segment_ids" not in context.batch:
            raise UserError(
                f"rows of {x.shape[1]} tokens are longer than the {self.length} positions that were learned",
                fix="Shorten the context, or give learned_positions a larger length.",
            )
        positions = positions_of(context, x.shape[0], x.shape[1])
        return x + jnp.take(params["embedding"], positions, axis=0, mode="clip").astype(x.dtype)


def positions_of(context: LayerContext, batch: int, length: int) -> Array:
    """Index of every token within its document [B, S] int32, counted from 0 along the row where the batch has none."""
    positions = context.batch.get("positions")
    return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length)) if positions is None else positions


@register_layer("unembed")
class Unembed(Layer):
    """A logit for every token id, by its own kernel or, tied, by the embedding's (Press and Wolf, 2017)."""

    joins = True

    tied: bool | str = False
    """The name of the embedding node; true: the only one there is."""
    vocab: int | None = Field(default=None, ge=2)
    """Number of token ids; default: the embedding's."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the first kernel."""

    @override
    def bind(self, nodes: Mapping[str, "Node"]) -> Self:
        sizes = {name: node.layer.vocab for name, node in nodes.items() if isinstance(node.layer, Embedding)}
        source = self.tied if isinstance(self.tied, str) else next(iter(sizes), "")
        if source not in sizes and self.tied:
            raise ValueError(f"tied: `{source}` is not an embedding node")
        if len(sizes) != 1 and (self.tied is True or self.vocab is None):
            raise ValueError(f"tied and vocab must be given where the graph has {len(sizes)} embedding nodes")
        if self.tied and self.vocab not in (None, sizes[source]):
            raise ValueError(f"vocab {self.vocab} differs from the {sizes[source]} of `{source}` it is tied to")
        return self.model_copy(update={"tied": self.tied and source, "vocab": self.vocab or sizes[source]})

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
        return {"kernel": ParamSpec((self.vocab or 0, inputs[0].width), ("vocab", "embed"), std=self.init_std)}

    @override
    def apply(self, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Logits:
        kernel = context.shared["embedding"] if context.shared is not None else params["kernel"]
        hidden, at = inputs[0], context.config.logit_positions
        if at is not None:
            hidden = jnp.take_along_axis(hidden.reshape(len(at), -1, hidden.shape[-1]), at[..., None], axis=1)
        hidden = context.config.constrain(hidden, ("batch", "sequence", "width"))
        return Logits(hidden, kernel.astype(context.config.compute_dtype))

    @override
    def cost(self, inputs: tuple[Shape, ...], sizes: Mapping[str, int]) -> Cost:
        batch, length = inputs[0].bind(sizes)[:2]
        return Cost(matmul=dense_flops(inputs[0].width, self.vocab or 0, batch * length))
