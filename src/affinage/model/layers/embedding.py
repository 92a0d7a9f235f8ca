"""From token ids to vectors, learned positions, and from vectors to logits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from pydantic import Field

from affinage.errors import UserError
from affinage.model.apply_config import PyTree
from affinage.model.layer import TOKENS, Cost, Layer, LayerContext, ParamSpec, Shape, ShapeMismatch, register_layer
from affinage.model.layers.dense import product, product32

if TYPE_CHECKING:
    from affinage.model.graph import Node


@register_layer("embedding", joins=True)
class Embedding(Layer):
    """A learned vector for every token id."""

    takes = ("tokens",)
    vocab: int = Field(ge=2)
    """Number of token ids."""
    width: int = Field(ge=1)
    """Of the vectors, and so of the residual stream."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the first values."""

    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        if inputs[0] != TOKENS:
            raise ShapeMismatch(f"expected token ids [B, S] int, got {inputs[0]}")
        return Shape((*TOKENS.dims, self.width))

    def parameters(self, inputs: tuple[Shape, ...]) -> PyTree:
        return {"embedding": ParamSpec((self.vocab, self.width), ("vocab", "embed"), std=self.init_std)}

    def apply(self, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Float[Array, "B S D"]:
        table, layout = params["embedding"], context.config.layout
        if layout.parts("batch", "embed") == layout.parts("batch"):
            # Gathered as other weights are; XLA would rather gather the gradient of all rows. Where devices that split
            # the table have the same rows, those go to the parts of the table, which is large.
            table = layout.constrain(table, ("vocab", "width"))
        x = look_up(table, inputs[0]).astype(context.config.compute_dtype)
        return layout.constrain(x, ("batch", "residual", "width"))


@register_layer("learned_positions", joins=True)
class LearnedPositions(Layer):
    """Adds a learned vector for the index of the token within its document (GPT-2)."""

    length: int = Field(ge=1)
    """Positions that have a vector; the context must not be longer."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the first values."""

    def parameters(self, inputs: tuple[Shape, ...]) -> PyTree:
        width = inputs[0].require_sequence().width
        return {"embedding": ParamSpec((self.length, width), (None, "embed"), std=self.init_std)}

    def apply(self, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Float[Array, "B S D"]:
        (x,) = inputs
        # A row of several sequences may be longer.
        if x.shape[1] > self.length and "prefix_segment_ids" not in context.batch:
            what = f"rows of {x.shape[1]} tokens are longer than the {self.length} positions that were learned"
            raise UserError(what, fix="Shorten the context, or give learned_positions a larger length.")
        table = context.config.layout.constrain(params["embedding"], (None, "width"))
        positions = positions_of(context, x.shape[0], x.shape[1])
        return x + look_up(table, positions).astype(x.dtype)


@jax.custom_jvp
def look_up(table: Float[Array, "V D"], ids: Int[Array, "B S"]) -> Float[Array, "B S D"]:
    """Rows of a table, whose gradients are added up in float32: in bfloat16 a sum of hundreds grows no more."""
    return jnp.take(table, ids, axis=0, mode="clip")


@look_up.defjvp
def _look_up_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (table, ids), (moved, _) = primals, tangents
    return look_up(table, ids), jnp.take(moved.astype(jnp.float32), ids, axis=0, mode="clip").astype(table.dtype)


def positions_of(context: LayerContext, batch: int, length: int) -> Int[Array, "B S"]:
    """Index of every token within its document, int32, counted from 0 along the row where the batch has none."""
    positions = context.batch.get("positions")
    return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length)) if positions is None else positions


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logits:
    """Logits not yet multiplied out, so that a loss over a large vocabulary can do it in parts."""

    hidden: Float[Array, "*N D"]  # in the compute dtype
    kernel: Float[Array, "V D"]  # in the compute dtype

    def array(self) -> Float[Array, "*N V"]:
        """The logits in float32."""
        return multiply_out(self.hidden, self.kernel)


def multiply_out(
    hidden: Float[Array, "*N D"], kernel: Float[Array, "V D"], vocabulary: int | None = None, flat: bool = False
) -> Float[Array, "*N V"]:
    """Logits in float32; from the end of a padded `vocabulary` on they are -1e30. `flat`: by `product`."""
    if flat and vocabulary is None:
        return product(hidden.astype(jnp.float32), kernel.T.astype(jnp.float32))
    axes = "abc"[: hidden.ndim - 1]
    return without_padding(product32(f"{axes}d,vd->{axes}v", hidden, kernel), vocabulary)


def without_padding(logits: Float[Array, "*N V"], vocabulary: int | None) -> Float[Array, "*N V"]:
    """The logits with -1e30 in the columns from `vocabulary` on, which no softmax gives weight."""
    if vocabulary is None:
        return logits
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where(column < vocabulary, logits, -1e30)


@register_layer("unembed", joins=True)
class Unembed(Layer):
    """A logit for every token id, by its own kernel or, tied, by the embedding's (Press and Wolf, 2017)."""

    tied: bool | str = False
    """The name of the embedding node; true: the first one."""
    vocab: int | None = Field(default=None, ge=2)
    """Number of token ids; default: those of the embedding."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the first kernel."""

    def bind(self, nodes: Mapping[str, "Node"]) -> Self:
        sizes = {name: node.layer.vocab for name, node in nodes.items() if isinstance(node.layer, Embedding)}
        source = self.tied if isinstance(self.tied, str) else next(iter(sizes), "")
        if source not in sizes and (self.tied or self.vocab is None):
            raise ShapeMismatch(f"`{source}` is not an embedding node" if source else "there is no embedding node")
        if self.tied and self.vocab not in (None, sizes[source]):
            raise ShapeMismatch(f"vocab {self.vocab} differs from the {sizes[source]} of `{source}` it is tied to")
        return self.model_copy(update={"tied": self.tied and source, "vocab": self.vocab or sizes[source]})

    @property
    def shares(self) -> str | None:
        return self.tied if isinstance(self.tied, str) else None

    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        return Shape((*inputs[0].require_sequence().dims[:2], self.vocab or 0))

    def parameters(self, inputs: tuple[Shape, ...]) -> PyTree:
        if self.shares:
            return {}
        return {"kernel": ParamSpec((self.vocab or 0, inputs[0].width), ("vocab", "embed"), std=self.init_std)}

    def apply(self, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Logits:
        kernel = context.shared["embedding"] if context.shared is not None else params["kernel"]
        hidden, at = inputs[0], context.config.logit_positions
        if at is not None:
            hidden = jnp.take_along_axis(hidden.reshape(len(at), -1, hidden.shape[-1]), at[..., None], axis=1)
        hidden = context.config.layout.constrain(hidden, ("batch", "sequence", "width"))
        return Logits(hidden, kernel.astype(context.config.compute_dtype))

    def cost(self, inputs: tuple[Shape, ...], sizes: Mapping[str, int]) -> Cost:
        batch, length = inputs[0].bind(sizes)[:2]
        return Cost(matmul=2 * batch * length * inputs[0].width * (self.vocab or 0))
