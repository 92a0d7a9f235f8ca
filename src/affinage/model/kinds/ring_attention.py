"""Attention over a sequence that is split over devices: keys and values go round, nobody ever holds all of them.

Ring attention (Liu, Zaharia and Abbeel, 2023) with the online softmax of Milakov and Gimelshein (2018).
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from affinage.model.kind import Context
from affinage.model.kinds.attention_products import MASKED

Softmax = tuple[Array, Array, Array]  # largest score so far, sum of exponentials, weighted values; float32


def ring_attention(
    query: Float[Array, "B H S D"],
    key: Float[Array, "B K S D"],
    value: Float[Array, "B K S D"],
    context: Context,
    *,
    window: int | None,
    softcap: float | None,
) -> Float[Array, "B H S D"]:
    """Causal attention within documents, the same numbers as over whole rows up to rounding.

    Each device's queries meet every other device's keys once, in one step each; steps that a window puts out of reach
    are left out. The scores of a step are computed again in the backward pass.
    """
    layout = context.call.layout
    ring, parts = layout.mesh_axes("sequence"), layout.parts("sequence")
    length = query.shape[2] // parts
    steps = parts if window is None else min(parts, 1 + math.ceil((window - 1) / length))
    forward = [(index, (index + 1) % parts) for index in range(parts)]

    def local(query: Array, key: Array, value: Array, segments: Array) -> Array:
        here = jax.lax.axis_index(ring)
        rows, heads, _, width = query.shape
        grouped = query.reshape(rows, key.shape[1], -1, length, width)

        @jax.checkpoint
        def meet(softmax: Softmax, held: tuple[Array, Array, Array], distance: Int[Array, ""] | int) -> Softmax:
            key, value, key_segments = held
            position = jnp.arange(length)
            behind = position[:, None] - position[None, :] + _origin_distance(here, distance, parts) * length
            visible = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
            visible = visible[None] & (segments[:, :, None] == key_segments[:, None, :])
            return _meet(softmax, grouped, key, value, visible, softcap)

        def turn(carry: tuple[Softmax, tuple[Array, Array, Array]], distance: Array) -> tuple[tuple, None]:
            softmax, held = carry
            held = jax.tree.map(lambda part: jax.lax.ppermute(part, ring, forward), held)
            return (meet(softmax, held, distance), held), None

        nothing = jnp.zeros_like(grouped, jnp.float32)
        softmax = (nothing[..., :1] + MASKED, nothing[..., :1], nothing)
        held = (key, value, segments)
        softmax = meet(softmax, held, 0)  # its own keys first: from here on every query has seen one
        (softmax, _), _ = jax.lax.scan(turn, (softmax, held), jnp.arange(1, steps))
        _, total, weighted = softmax
        return (weighted / total).astype(value.dtype).reshape(rows, heads, length, width)

    segments = context.batch.get("segment_ids")
    if segments is None:
        segments = jnp.zeros((query.shape[0], query.shape[2]), jnp.int32)
    of_queries = ("batch", "heads", "sequence", "head_dim")
    of_keys = ("batch", "kv_heads", "sequence", "head_dim")
    split = layout.mapped(local, (of_queries, of_keys, of_keys, ("batch", "sequence")), of_queries, over=("sequence",))
    attended: Array = split(query, key, value, segments)
    return attended


def _origin_distance(here: Array, distance: Int[Array, ""] | int, parts: int) -> Array:
    """How many parts the queries lie behind the keys that came `distance` steps; negative: before them."""
    return jnp.where(here >= distance, distance, distance - parts)


def _meet(
    softmax: Softmax,
    query: Float[Array, "B K G S D"],
    key: Float[Array, "B K S D"],
    value: Float[Array, "B K S D"],
    visible: Array,
    softcap: float | None,
) -> Softmax:
    largest, total, weighted = softmax
    scores = jnp.einsum("bkgsd,bktd->bkgst", query, key, preferred_element_type=jnp.float32) * query.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(visible[:, None, None], scores, MASKED)
    new = jnp.maximum(largest, jnp.max(scores, axis=-1, keepdims=True))
    exponentials = jnp.exp(scores - new)
    shrink = jnp.exp(largest - new)
    values = jnp.einsum(
        "bkgst,bktd->bkgsd", exponentials.astype(value.dtype), value, preferred_element_type=jnp.float32
    )
    return new, total * shrink + jnp.sum(exponentials, axis=-1, keepdims=True), weighted * shrink + values
