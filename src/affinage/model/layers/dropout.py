"""Dropout whose mask depends on the step's key, the layer and the global row, and on nothing else."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray
from pydantic import Field
from typing_extensions import override

from affinage.model.layer import Layer, LayerContext, Shape, register_layer
from affinage.model.parameter import PyTree


def drop(x: Float[Array, "B ..."], rate: float, context: LayerContext, site: int | Array) -> Float[Array, "B ..."]:
    """Zeroes elements with probability `rate` and scales the rest by 1 / (1 - rate).

    `site` tells apart the several places of one layer. Each row draws from its own key, so a batch split over
    micro-batches or devices has the same masks.
    """
    if rate == 0.0 or context.key is None:
        return x
    key = jax.random.fold_in(context.key, site)
    rows = context.batch.get("rows", jnp.arange(x.shape[0]))

    def kept(row: Array) -> Array:
        row_key: PRNGKeyArray = jax.random.fold_in(key, row)
        return jax.random.bernoulli(row_key, 1.0 - rate, x.shape[1:])

    mask = checkpoint_name(jax.vmap(kept)(rows), "dropout_mask")
    return jnp.where(mask, x / (1.0 - rate), jnp.zeros((), x.dtype))


@register_layer("dropout")
class Dropout(Layer):
    """Dropout as a node of its own, e.g. after GPT-2's embeddings."""

    joins = True

    rate: float = Field(ge=0, lt=1)
    """Probability of zeroing an element."""

    @override
    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        return inputs[0]

    @override
    def apply(self, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Array:
        return drop(inputs[0], self.rate, context, site=0)
