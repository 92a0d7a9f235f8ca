"""Attention over a sequence that is split over devices: keys and values go round, nobody ever holds all of them.

Ring attention (Liu, Zaharia and Abbeel, 2023) with the online softmax of Milakov and Gimelshein (2018).
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from affinage.model.apply_config import Layout
from affinage.model.products import Keys, Queries, Segments

MASKED = -1e30  # a score that no softmax gives weight; finite, so that a row without any visible key is not NaN

Held = tuple[Array, Array, Array]  # keys [B, K, S, D], values, and the segments [B, S] of their tokens


def ring_attention(
    query: Queries,
    key: Keys,
    value: Keys,
    segment_ids: Segments,
    layout: Layout,
    *,
    window: int | None,
    softcap: float | None,
) -> Queries:
    """Causal attention within documents, the same numbers as over whole rows up to rounding.

    Each device's queries meet every other device's keys once, in one step each; steps that a window puts out of reach
    are left out. The backward pass sends the keys round again, and computes the scores of a step again: what a device
    keeps of a layer is its own.
    """
    parts = layout.parts("sequence")
    length = layout.whole(query.shape[1], "sequence") // parts
    steps = parts if window is None else min(parts, 1 + math.ceil((window - 1) / length))
    ring = _Ring(layout.mesh_axes("sequence"), parts, steps, window, softcap)

    def local(query: Array, key: Array, value: Array, segment_ids: Array) -> Array:
        rows, _, heads, width = query.shape
        grouped = query.reshape(rows, length, key.shape[2], -1, width).transpose(0, 2, 3, 1, 4)
        out = _attended(grouped, jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2), segment_ids, ring)
        return out.transpose(0, 3, 1, 2, 4).reshape(rows, length, heads, width)

    if segment_ids is None:
        segment_ids = jnp.zeros(query.shape[:2], jnp.int32)
    of_queries, of_keys = (("batch", "sequence", heads, "head_dim") for heads in ("heads", "kv_heads"))
    split = layout.mapped(local, (of_queries, of_keys, of_keys, ("batch", "sequence")), of_queries)
    attended: Array = split(query, key, value, segment_ids)
    return attended


@dataclass(frozen=True)
class _Ring:
    axes: tuple[str, ...]  # of the mesh, along which the parts of a row lie
    parts: int
    steps: int  # parts of keys that a query meets
    window: int | None
    softcap: float | None

    def passed_on(self, held: Any, places: int = 1) -> Any:
        """What the device `places` before this one holds."""
        pairs = [(index, (index + places) % self.parts) for index in range(self.parts)]
        return jax.tree.map(lambda part: jax.lax.ppermute(part, self.axes, pairs), held)

    def scores(
        self, query: Array, held: Held, segments: Array, distance: Int[Array, ""] | int
    ) -> tuple[Float[Array, "B K G S T"], Bool[Array, "B 1 1 S T"]]:
        """Of keys that came `distance` steps, and which of them a query sees."""
        key, _, key_segments = held
        scores = _products("bkgsd,bktd->bkgst", query, key) * query.shape[-1] ** -0.5
        if self.softcap is not None:
            scores = self.softcap * jnp.tanh(scores / self.softcap)
        here, position = jax.lax.axis_index(self.axes), jnp.arange(key.shape[2])
        # Parts that the queries lie behind the keys; negative: before them.
        apart = jnp.where(here >= distance, distance, distance - self.parts)
        behind = position[:, None] - position[None, :] + apart * key.shape[2]
        visible = (behind >= 0) if self.window is None else (behind >= 0) & (behind < self.window)
        return scores, (visible[None] & (segments[:, :, None] == key_segments[:, None, :]))[:, None, None]


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attended(
    query: Float[Array, "B K G S D"],
    key: Float[Array, "B K S D"],
    value: Float[Array, "B K S D"],
    segments: Int[Array, "B S"],
    ring: _Ring,
) -> Float[Array, "B K G S D"]:
    return _forward(query, key, value, segments, ring)[0]


def _forward(query: Array, key: Array, value: Array, segments: Array, ring: _Ring) -> tuple[Array, tuple[Array, ...]]:
    def meet(softmax: tuple[Array, ...], held: Held, distance: Array | int) -> tuple[Array, ...]:
        largest, total, weighted = softmax  # largest score so far, sum of exponentials, weighted values; float32
        scores, visible = ring.scores(query, held, segments, distance)
        scores = jnp.where(visible, scores, MASKED)
        new = jnp.maximum(largest, jnp.max(scores, axis=-1, keepdims=True))
        exponentials, shrink = jnp.exp(scores - new), jnp.exp(largest - new)
        values = _products("bkgst,bktd->bkgsd", exponentials.astype(value.dtype), held[1])
        return new, total * shrink + jnp.sum(exponentials, axis=-1, keepdims=True), weighted * shrink + values

    def turn(carry: tuple[Any, Held], distance: Array) -> tuple[tuple[Any, Held], None]:
        softmax, held = carry
        following = ring.passed_on(held)  # does not wait for these to be met
        return (meet(softmax, held, distance), following), None

    nothing = jnp.zeros_like(query, jnp.float32)
    # Its own keys first: from there on every query has seen one.
    begun = ((nothing[..., :1] + MASKED, nothing[..., :1], nothing), (key, value, segments))
    (softmax, held), _ = jax.lax.scan(turn, begun, jnp.arange(ring.steps - 1))
    largest, total, weighted = meet(softmax, held, ring.steps - 1)
    out = (weighted / total).astype(value.dtype)
    return out, (query, key, value, segments, out, (largest + jnp.log(total))[..., 0])


def _backward(ring: _Ring, saved: tuple[Array, ...], gradient: Array) -> tuple[Array, Array, Array, None]:
    query, key, value, segments, out, log_sums = saved
    # The softmax's gradient needs each row's mean of the probabilities' gradients, which is out . gradient.
    means = jnp.sum(gradient.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)

    def meet(d_query: Array, d_held: tuple[Array, ...], held: Held, distance: Array | int) -> tuple[Any, ...]:
        scores, visible = ring.scores(query, held, segments, distance)
        probabilities = jnp.where(visible, jnp.exp(scores - log_sums[..., None]), 0.0)
        d_scores = probabilities * (_products("bkgsd,bktd->bkgst", gradient, held[1]) - means)
        if ring.softcap is not None:
            d_scores = d_scores * (1 - jnp.square(scores / ring.softcap))
        d_scores = (d_scores * query.shape[-1] ** -0.5).astype(query.dtype)
        d_key = d_held[0] + _products("bkgst,bkgsd->bktd", d_scores, query).astype(key.dtype)
        d_value = d_held[1] + _products("bkgst,bkgsd->bktd", probabilities.astype(gradient.dtype), gradient).astype(
            value.dtype
        )
        return d_query + _products("bkgst,bktd->bkgsd", d_scores, held[0]), (d_key, d_value)

    def turn(carry: tuple[Any, ...], distance: Array) -> tuple[tuple[Any, ...], None]:
        d_query, d_held, held = carry
        # The gradients come from those that have met these keys; the keys of the next turn do not wait for this one.
        d_query, d_held = meet(d_query, ring.passed_on(d_held), held, distance)
        return (d_query, d_held, ring.passed_on(held)), None

    held = (key, value, segments)
    d_query, d_held = meet(jnp.zeros_like(query, jnp.float32), (jnp.zeros_like(key), jnp.zeros_like(value)), held, 0)
    if ring.steps > 1:
        carry, _ = jax.lax.scan(turn, (d_query, d_held, ring.passed_on(held)), jnp.arange(1, ring.steps - 1))
        d_query, d_held, held = carry
        d_query, d_held = meet(d_query, ring.passed_on(d_held), held, ring.steps - 1)
        d_held = ring.passed_on(d_held, 1 - ring.steps)  # home again
    return d_query.astype(query.dtype), *d_held, None


_attended.defvjp(_forward, _backward)


def _products(equation: str, left: Array, right: Array) -> Array:
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)
