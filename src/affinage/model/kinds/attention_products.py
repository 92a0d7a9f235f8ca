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
    softcap: float | None,
) -> Float[Array, "B H S D"]:
    """Values weighted by the softmax of scaled scores; every implementation honours the mask or refuses."""
    if context.call.attention not in ("auto", "xla"):
        raise UserError(
            f"attention implementation {context.call.attention!r} is not known",
            fix="`auto` and `xla` are",
        )
    batch, heads, length, width = query.shape
    grouped = query.reshape(batch, key.shape[1], -1, length, width)
    if softcap is not None or (dropout and context.key is not None):
        out = plain_attention(grouped, key, value, mask, context, dropout=dropout, softcap=softcap)
    else:
        out = attention(grouped, key, value, mask)
    return out.reshape(batch, heads, length, width)


def plain_attention(
    query: Float[Array, "B K G S D"],
    key: Float[Array, "B K T D"],
    value: Float[Array, "B K T D"],
    mask: Bool[Array, "b S T"],
    context: Context,
    *,
    dropout: float,
    softcap: float | None,
) -> Float[Array, "B K G S D"]:
    """Scores and softmax in float32, as [B, K, G, S, T] arrays; differentiated by JAX."""
    scores = jnp.einsum("bkgsd,bktd->bkgst", query, key, preferred_element_type=jnp.float32)
    scores = scores * query.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(mask[:, None, None], scores, MASKED)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    probabilities = drop(probabilities, dropout, context, site=1)
    return jnp.einsum("bkgst,bktd->bkgsd", probabilities, value)


@jax.custom_vjp
def attention(
    query: Float[Array, "B K G S D"],
    key: Float[Array, "B K T D"],
    value: Float[Array, "B K T D"],
    mask: Bool[Array, "b S T"],
) -> Float[Array, "B K G S D"]:
    """The same without dropout and cap, with a gradient by hand.

    It keeps one [S, T] array, the probabilities, where autodiff keeps more; on CPUs a step takes 4 % less.
    """
    return _forward(query, key, value, mask)[0]


def _forward(query: Array, key: Array, value: Array, mask: Array) -> tuple[Array, tuple[Array, ...]]:
    scores = _products("bkgsd,bktd->bkgst", query, key)
    scores = jnp.where(mask[:, None, None], scores * query.shape[-1] ** -0.5, MASKED)
    exponentials = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    probabilities = exponentials / jnp.sum(exponentials, axis=-1, keepdims=True)
    probabilities = probabilities.astype(value.dtype)
    out = _products("bkgst,bktd->bkgsd", probabilities, value).astype(value.dtype)
    return out, (query, key, value, probabilities, out)


def _backward(kept: tuple[Array, ...], gradient: Array) -> tuple[Array, Array, Array, None]:
    query, key, value, probabilities, out = kept
    d_value = _products("bkgst,bkgsd->bktd", probabilities, gradient)
    d_probabilities = _products("bkgsd,bktd->bkgst", gradient, value)
    # The softmax's gradient needs each row's mean of d_probabilities, which is that row's out . gradient.
    means = jnp.sum(gradient.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
    d_scores = (probabilities * (d_probabilities - means) * query.shape[-1] ** -0.5).astype(query.dtype)
    d_query = _products("bkgst,bktd->bkgsd", d_scores, key)
    d_key = _products("bkgst,bkgsd->bktd", d_scores, query)
    return d_query.astype(query.dtype), d_key.astype(key.dtype), d_value.astype(value.dtype), None


attention.defvjp(_forward, _backward)


def _products(equation: str, left: Array, right: Array) -> Array:
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)
