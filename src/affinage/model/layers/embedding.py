"""From token ids to vectors, and learned positions."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array
from pydantic import Field
from typing_extensions import override

from affinage.errors import UserError
from affinage.model.layer import (
    TOKENS,
    Layer,
    LayerContext,
    Shape,
    ShapeMismatch,
    expect_sequence,
    register_layer,
    sequence_of,
)
from affinage.model.parameter import ParamSpec, PyTree


@register_layer("embedding")
class Embedding(Layer):
    """A learned vector for every token id."""

    joins = True

    takes = ("tokens",)
    vocab: int = Field(ge=2)
    """Number of token ids."""
    width: int = Field(ge=1)
    """Of the vectors, and so of the residual stream."""
    scale: float = 1.0
    """The vectors are multiplied by this; Gemma's is sqrt(width)."""
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
        x = jnp.take(params["embedding"], inputs[0], axis=0, mode="clip").astype(context.config.compute_dtype)
        x = x if self.scale == 1.0 else x * jnp.asarray(self.scale, x.dtype)
        return context.config.constrain(x, ("batch", "residual", "width"))


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
        if (
            x.shape[1] > self.length and "prefix_segment_ids" not in context.batch
        ):  # a row of several sequences may be longer
            raise UserError(
                f"rows of {x.shape[1]} tokens are longer than the {self.length} positions that were learned",
                fix="Shorten the context, or give learned_positions a larger length.",
            )
        positions = positions_of(context, x.shape[0], x.shape[1])
        return x + jnp.take(params["embedding"], positions, axis=0, mode="clip").astype(x.dtype)


def positions_of(context: LayerContext, batch: int, length: int) -> Array:
    """Index of every token within its document [B, S] int32, counted from 0 along the row where the batch has none."""
    positions = context.batch.get("positions")
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    return positions
