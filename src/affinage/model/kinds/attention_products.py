"""The two products of attention, by the implementation that the call asks for."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from affinage.errors import UserError
from affinage.model.kind import Context
from affinage.model.kinds.dropout import drop

MASKED = -1e30  # a score that no softmax gives weight; finite, so that a row without any visible key is not NaN


def attend(
    query: Float[Array, "B H S D"],
    key: Float[Array, "B K T D"],
    value: Float[Array, "B K T D"],
    mask: Bool[Array, "b S T"],
    context: Context,
    *,
    dropout: float,
) -> Float[Array, "B H S D"]:
    """Values weighted by the softmax of scaled scores; every implementation honours the mask or refuses."""
    if context.call.attention not in ("auto", "xla"):
        raise UserError(
            f"attention implementation {context.call.attention!r} is not known",
            fix="`auto` and `xla` are",
        )
    batch, heads, length, width = query.shape
    groups = key.shape[1]
    grouped = query.reshape(batch, groups, heads // groups, length, width)
    out = plain_attention(grouped, key, value, mask, context, dropout=dropout)
    return out.reshape(batch, heads, length, width)


def plain_attention(
    query: Float[Array, "B K G S D"],
    key: Float[Array, "B K T D"],
    value: Float[Array, "B K T D"],
    mask: Bool[Array, "b S T"],
    context: Context,
    *,
    dropout: float,
) -> Float[Array, "B K G S D"]:
    """Scores and softmax in float32, as [B, K, G, S, T] arrays; differentiated by JAX."""
    scores = jnp.einsum("bkgsd,bktd->bkgst", query, key, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores * query.shape[-1] ** -0.5, MASKED)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    probabilities = drop(probabilities, dropout, context, site=1)
    return jnp.einsum("bkgst,bktd->bkgsd", probabilities, value)
