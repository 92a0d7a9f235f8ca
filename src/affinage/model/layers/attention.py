"""Causal attention within documents: one function over four implementations, and the choice between them."""

import logging
import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from affinage.errors import UserError
from affinage.model.apply_config import HOPPER, ApplyConfig, Axes, Layout
from affinage.model.layers import kernels
from affinage.model.layers.dense import product32
from affinage.model.layers.kernels import LANES, Keys, Queries, Segments

MASKED = -1e30  # a score that no softmax gives weight; finite, so that a row without any visible key is not NaN
_KERNELS = {"tpu": "splash", "gpu": "cudnn"}
_SMALLEST_BLOCK, _MOST_BLOCKS = 64, 4  # queries at once on a CPU; each block is compiled by itself

Dropout = Callable[[Array], Array] | None  # of the probabilities
Softmax = tuple[Array, Array, Array]  # largest score so far, sum of exponentials, weighted values; float32
Held = tuple[Array, Array, Array]  # keys [B, K, S, D], values, and the segments [B, S] of their tokens

logger = logging.getLogger(__name__)


def choose(
    config: ApplyConfig, dtype: Any, head_dim: int, length: int, *, dropout: float = 0.0, only_xla: bool = False
) -> str:
    """The requested implementation or, for `auto`, the platform's kernel where it can do the work on long enough rows.

    `length`: tokens in a row; `only_xla`: keys come from a cache, or documents share a prefix. UserError: the requested
    one cannot honor the workload.
    """
    rings = config.ring_attention and config.layout.parts("sequence") > 1
    requested, platform, capability = "ring" if rings else config.attention, config.platform, config.capability
    kernel = _KERNELS.get(platform, "xla") if requested == "auto" else requested
    if only_xla or kernel == "xla" or (requested == "auto" and length < LANES):
        return "xla"
    obstacles = {f"dropout of {dropout:g} of the probabilities": dropout > 0}
    if kernel == "splash":
        obstacles[f"a {platform}: it is a kernel for TPUs"] = platform != "tpu"
    elif kernel == "cudnn":
        widest = 256 if (capability or (0, 0)) >= HOPPER else 128
        obstacles[f"a {platform} without cuDNN"] = platform != "gpu" or capability is None
        obstacles["float32"] = jnp.dtype(dtype) == jnp.float32
        obstacles[f"heads of {head_dim} (multiples of 8 up to {widest})"] = head_dim % 8 > 0 or head_dim > widest
        obstacles[f"rows of {length} tokens (an odd number)"] = length % 2 > 0
    missing = ", ".join(what for what, is_missing in obstacles.items() if is_missing)
    if requested == "auto":
        if not config.planned:
            _log_choice(kernel, missing)
        return "xla" if missing else kernel
    if missing:
        fix = "`attention: auto` takes one that can, or xla."
        if requested == "ring":
            fix = "Set the attention's `dropout: 0`, or `parallel: {context_attention: all_gather}`."
        raise UserError(f"attention by {requested} cannot honor {missing}", where="attention", fix=fix)
    return kernel


@lru_cache(maxsize=64)  # logs a choice once a process
def _log_choice(kernel: str, missing: str) -> None:
    if missing:
        slow = "attention: plain products over all pairs of tokens, which cost time and memory"
        logger.warning("%s, as %s cannot honor %s", slow, kernel, missing)
    else:
        logger.info("attention: %s", kernel)


def attention(
    query: Queries,
    key: Keys,
    value: Keys,
    segment_ids: Segments,
    impl: str,
    config: ApplyConfig,
    *,
    window: int | None = None,
    dropout: Dropout = None,
    mask: Bool[Array, "b S T"] | None = None,
    in_blocks: bool = False,
) -> Queries:
    """Values weighted by the softmax of scaled scores, causal and within segments; float32 inside.

    `impl` is as `choose` returns it. With a `window` a token sees itself and this many less one before it. `dropout` of
    the probabilities, the `mask` of what a query sees (causality included) and blocks of queries are for `xla` only.
    """
    layout = config.layout
    if impl == "ring":
        return ring_attention(query, key, value, segment_ids, layout, window=window)
    length = layout.whole(query.shape[1], "sequence")
    if impl == "splash" and kernels.queries_are_split(length, layout.parts("sequence")):
        return kernels.splash_on_parts(query, key, value, segment_ids, layout, window=window)
    key, value = of_whole_rows(key, value, layout)
    if impl == "xla":
        assert mask is not None
        # Slices of a split sequence, and sums of heads whose queries are split again elsewhere, would have to be sent.
        in_blocks = in_blocks and layout.parts("sequence", "heads") == 1
        return xla_attention(query, key, value, mask, dropout=dropout, in_blocks=in_blocks)

    def kernel(query: Queries, key: Keys, value: Keys, segment_ids: Segments = None) -> Queries:
        """As each device runs it on its rows and heads, over whole rows."""
        if impl == "cudnn":
            by_offsets = (config.capability or (0, 0)) >= HOPPER
            return kernels.cudnn_attention(query, key, value, segment_ids, (window, by_offsets))
        return kernels.splash_attention(query, key, value, segment_ids, window=window)

    of_part, of_query = (("batch", length, "heads", "head_dim") for length in ("sequence", None))
    of_key = ("batch", None, "kv_heads", "head_dim")
    arrays = [layout.resplit(query, of_part, of_query), key, value]
    axes: list[Axes] = [of_query, of_key, of_key]
    if segment_ids is not None:
        arrays.append(layout.resplit(segment_ids, ("batch", "sequence"), ("batch", "keys")))
        axes.append(("batch", None))
    out = layout.mapped(kernel, axes, of_query)(*arrays)
    return layout.resplit(out, of_query, of_part)


def of_whole_rows(key: Keys, value: Keys, layout: Layout) -> tuple[Keys, Keys]:
    """Keys and values, where sequences are split gathered to those of whole rows."""
    of_parts, of_rows = ("batch", "sequence", "kv_heads", "head_dim"), ("batch", "keys", "kv_heads", "head_dim")
    return layout.resplit(key, of_parts, of_rows), layout.resplit(value, of_parts, of_rows)


def xla_attention(
    query: Queries, key: Keys, value: Keys, mask: Bool[Array, "b S T"], dropout: Dropout = None, in_blocks: bool = False
) -> Queries:
    """Plain products over the pairs where `mask` is True; `in_blocks` of queries spares CPUs up to half of the work."""
    batch, length, heads, width = query.shape
    query = query.reshape(batch, length, key.shape[2], -1, width).transpose(0, 2, 3, 1, 4)
    key, value = jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2)
    size = max(_SMALLEST_BLOCK, -(-length // _MOST_BLOCKS)) if in_blocks and dropout is None else length
    parts = []
    for start in range(0, length, size):
        queries, keys = slice(start, start + size), slice(0, start + size if size < length else None)
        scores = product32("bkgsd,bktd->bkgst", query[:, :, :, queries], key[:, :, keys]) * width**-0.5
        scores = jnp.where(mask[:, None, None, queries, keys], scores, MASKED)
        weights = _softmax(scores, value.dtype)
        weights = weights if dropout is None else dropout(weights)
        parts.append(jnp.einsum("bkgst,bktd->bkgsd", weights, value[:, :, keys]))
    out = jnp.concatenate(parts, axis=3) if len(parts) > 1 else parts[0]
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, width)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _softmax(scores: Float[Array, "*N T"], dtype: Any) -> Float[Array, "*N T"]:
    """The probabilities, computed in float32; the backward pass has no more of them than these."""
    return jax.nn.softmax(scores, axis=-1).astype(dtype)


def _softmax_forward(scores: Array, dtype: Any) -> tuple[Array, Array]:
    weights = checkpoint_name(_softmax(scores, dtype), "attention_weights")
    return weights, weights


def _softmax_backward(dtype: Any, weights: Array, gradient: Array) -> tuple[Array]:
    products = weights.astype(jnp.float32) * gradient.astype(jnp.float32)
    return (products - weights.astype(jnp.float32) * jnp.sum(products, axis=-1, keepdims=True),)


_softmax.defvjp(_softmax_forward, _softmax_backward)


# ---- the ring: keys and values of a sequence that is split over devices go round ----


def ring_attention(
    query: Queries, key: Keys, value: Keys, segment_ids: Segments, layout: Layout, *, window: int | None
) -> Queries:
    """Causal attention within documents of rows that are split over devices (Liu, Zaharia and Abbeel, 2023).

    Each device's queries meet every other device's keys in one step each, by an online softmax; steps that a window
    puts out of reach are left out. The backward pass sends the keys round again: a device keeps what is its own.
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
    return split(query, key, value, segment_ids)
