"""Attention over a sequence that is split over devices: keys and values go round (Liu, Zaharia and Abbeel, 2023)."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

from affinage.model.apply_config import Layout
from affinage.model.products import Keys, Queries, Segments, product32

MASKED = -1e30  # a score that no softmax gives weight; finite, so that a row without any visible key is not NaN
Softmax = tuple[Array, Array, Array]  # largest score so far, sum of exponentials, weighted values; float32
Held = tuple[Array, Array, Array]  # keys [B, K, S, D], values, and the segments [B, S] of their tokens


def ring_attention(
    query: Queries, key: Keys, value: Keys, segment_ids: Segments, layout: Layout, *, window: int | None
) -> Queries:
    """Causal attention within documents, the same numbers as over whole rows up to rounding.

    Each device's queries meet every other device's keys once, in one step each, by the online softmax of Milakov and
    Gimelshein (2018); steps that a window puts out of reach are left out. The backward pass sends the keys round again,
    and computes the scores of a step again: of a layer a device keeps what is its own.
    """
    parts, axes = layout.parts("sequence"), layout.mesh_axes("sequence")
    length = layout.whole(query.shape[1], "sequence") // parts
    steps = parts if window is None else min(parts, 1 + math.ceil((window - 1) / length))
    to_next = [(index, (index + 1) % parts) for index in range(parts)]
    position = jnp.arange(length)

    @partial(jax.checkpoint, prevent_cse=False)
    def meet(softmax: Softmax, held: Held, query: Array, segments: Array, distance: Array) -> Softmax:
        """The softmax with the keys that came `distance` steps."""
        largest, total, weighted = softmax
        key, value, key_segments = held
        scores = product32("bkgsd,bktd->bkgst", query, key) * query.shape[-1] ** -0.5
        # Parts that the queries lie behind the keys; negative: before them.
        apart = jnp.where(jax.lax.axis_index(axes) >= distance, distance, distance - parts)
        behind = position[:, None] - position[None, :] + apart * length
        visible = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
        visible = visible[None] & (segments[:, :, None] == key_segments[:, None, :])
        scores = jnp.where(visible[:, None, None], scores, MASKED)
        new = jnp.maximum(largest, jnp.max(scores, axis=-1, keepdims=True))
        exponentials, shrink = jnp.exp(scores - new), jnp.exp(largest - new)
        values = product32("bkgst,bktd->bkgsd", exponentials.astype(value.dtype), value)
        return new, total * shrink + jnp.sum(exponentials, axis=-1, keepdims=True), weighted * shrink + values

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False)
    def local(query: Array, key: Array, value: Array, segments: Array) -> Array:
        rows, _, heads, width = query.shape
        query = query.reshape(rows, length, key.shape[2], -1, width).transpose(0, 2, 3, 1, 4)
        held = (jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2), segments)

        def turn(carry: tuple[Softmax, Held], distance: Array) -> tuple[tuple[Softmax, Held], None]:
            softmax, held = carry
            following = jax.tree.map(lambda part: jax.lax.ppermute(part, axes, to_next), held)  # does not wait
            return (meet(softmax, held, query, segments, distance), following), None

        nothing = jnp.zeros_like(query, jnp.float32)
        # Its own keys first: from there on every query has seen one.
        begun = ((nothing[..., :1] + MASKED, nothing[..., :1], nothing), held)
        (softmax, held), _ = jax.lax.scan(turn, begun, jnp.arange(steps - 1))
        _, total, weighted = meet(softmax, held, query, segments, jnp.int32(steps - 1))
        out = (weighted / total).astype(value.dtype)
        return out.transpose(0, 3, 1, 2, 4).reshape(rows, length, heads, width)

    if segment_ids is None:
        segment_ids = jnp.zeros(query.shape[:2], jnp.int32)
    of_queries, of_keys = (("batch", "sequence", heads, "head_dim") for heads in ("heads", "kv_heads"))
    split = layout.mapped(local, (of_queries, of_keys, of_keys, ("batch", "sequence")), of_queries)
    attended: Array = split(query, key, value, segment_ids)
    return attended
