"""The two products of attention, by the implementation that the call asks for."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from affinage.model.kind import Context
from affinage.model.kinds.attention_choice import Need, choose
from affinage.model.kinds.attention_kernels import (
    by_splash,
    cudnn_attention,
    queries_are_split,
    splash_attention,
    splash_axes,
    splash_kernel,
)
from affinage.model.kinds.dropout import drop
from affinage.model.layout import Layout

_LEAST, _LONG = (64, 128), 512  # queries at once on a CPU, in rows below and from so many tokens on
_MOST_BLOCKS, _MOST_TRAINED = 16, 4  # each is compiled by itself, those of a step with their backward pass
MASKED = -1e30  # a score that no softmax gives weight; finite, so that a row without any visible key is not NaN


def attend(
    query: Float[Array, "B H S D"],
    key: Float[Array, "B K T D"],
    value: Float[Array, "B K T D"],
    context: Context,
    *,
    dropout: float,
    softcap: float | None,
    window: int | None,
) -> Float[Array, "B H S D"]:
    """Values weighted by the softmax of scaled scores; every implementation honours the mask or refuses.

    Without a cache, and with as many queries as keys, no mask may show a later key to a query.

    `context.prepared` has the mask bool [b, S, T] of all that a query sees, and the segments int32 [B, S] or None.
    """
    batch, heads, length, width = query.shape
    dropped = dropout if context.key is not None else 0.0
    need = Need(
        context.call.platform,
        query.dtype,
        width,
        context.call.layout.whole(length, "sequence"),
        cached=context.cache is not None,
        dropout=dropped,
        softcap=softcap,
        described=context.call.described,
    )
    # The kernels know segments, but none that all the others see, and no rows of which few tokens ask.
    few = context.cache is None and length < key.shape[2]
    chosen = "xla" if few or "parents" in context.batch else choose(context.call.attention, need)
    if chosen == "cudnn" and need.described:
        chosen = "splash"  # which keeps the same values; cuDNN's cannot be traced where there is no GPU
    if chosen != "xla":
        return _by_kernel(chosen, query, key, value, context, softcap=softcap, window=window)
    if context.cache is None:
        key, value = of_whole_rows(key, value, context)
    mask = context.prepared["mask"]
    grouped = query.reshape(batch, key.shape[1], -1, length, width)
    if softcap is not None or dropped:
        out = plain_attention(grouped, key, value, mask, context, dropout=dropout, softcap=softcap)
    else:
        # Where rows are neither continued nor asked for few of their tokens, no query sees a later key. Slices of a
        # split sequence, and sums of heads whose queries are split again elsewhere, would have to be sent.
        causal = context.cache is None and not few
        whole = context.call.layout.parts("sequence", "heads") == 1
        out = attention(grouped, key, value, mask, context.call.platform == "cpu" and causal and whole)
    return out.reshape(batch, heads, length, width)


def of_whole_rows(key: Array, value: Array, context: Context) -> tuple[Array, Array]:
    """Where sequences are split this gathers the keys and values [B, K, S, D] of all of a row."""
    of_parts, of_rows = ("batch", "kv_heads", "sequence", "head_dim"), ("batch", "kv_heads", "keys", "head_dim")
    key, value = (context.call.layout.resplit(array, of_parts, of_rows) for array in (key, value))
    return key, value


def _by_kernel(
    name: str, query: Array, key: Array, value: Array, context: Context, *, softcap: float | None, window: int | None
) -> Array:
    """The rows and heads of each device by its own run of the kernel; Splash also its queries of a row."""
    segments, layout = context.prepared["segments"], context.call.layout
    length = layout.whole(query.shape[2], "sequence")
    if queries_are_split(name, context.call.platform, length, layout.parts("sequence")):
        return splash_on_parts(query, key, value, segments, layout, window=window, softcap=softcap)
    of_part, of_query = (("batch", "heads", length, "head_dim") for length in ("sequence", None))
    of_key = ("batch", "kv_heads", None, "head_dim")
    query = layout.resplit(query, of_part, of_query)
    key, value = of_whole_rows(key, value, context)
    if segments is not None:
        segments = layout.resplit(segments, ("batch", "sequence"), ("batch", "keys"))
    told = () if segments is None else (segments if name == "splash" else context.prepared["mask"],)
    of_told = tuple(("batch", *(None,) * (array.ndim - 1)) for array in told)

    def run(query: Array, key: Array, value: Array, told: Array | None = None) -> Array:
        if name == "splash":
            return splash_attention(query, key, value, told, window=window, softcap=softcap)
        return cudnn_attention(query, key, value, told, window=window)

    out = layout.mapped(run, (of_query, of_key, of_key, *of_told), of_query)(query, key, value, *told)
    return layout.resplit(out, of_query, of_part)


def splash_on_parts(
    query: Float[Array, "B H S D"],
    key: Float[Array, "B K S D"],
    value: Float[Array, "B K S D"],
    segments: Int[Array, "B S"] | None,
    layout: Layout,
    *,
    window: int | None,
    softcap: float | None,
    interpret: bool = False,
) -> Float[Array, "B H S D"]:
    """Splash where the tokens of a row lie on several devices: each has its queries, and gathers all keys.

    For the backward pass it keeps its own, and gathers the others again: those of whole rows, of every layer, would be
    as much more as there are devices.
    """
    kernel = splash_kernel(
        query.shape[1],
        layout.whole(query.shape[2], "sequence"),
        window=window,
        softcap=softcap,
        head_shards=layout.parts("heads"),
        sequence_shards=layout.parts("sequence"),
        kept="splash",
        interpret=interpret,
    )
    of_query, of_key = ("batch", "heads", "sequence", "head_dim"), ("batch", "kv_heads", "sequence", "head_dim")
    of_told = () if segments is None else (("batch", "sequence"), ("batch", "keys"))
    told = () if segments is None else (segments, layout.resplit(segments, *of_told))

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("splash"))
    def run(kernel: Any, query: Array, key: Array, value: Array, *told: Array) -> Array:
        over = layout.mesh_axes("sequence")
        keys, values = (jax.lax.all_gather(array, over, axis=2, tiled=True) for array in (key, value))
        return by_splash(kernel, query, keys, values, (told[0], told[1]) if told else None)

    of_kernel = splash_axes(kernel)
    kernel = jax.tree.map(lambda array, axes: layout.resplit(array, (None,) * array.ndim, axes), kernel, of_kernel)
    inputs = (of_kernel, of_query, of_key, of_key, *of_told)
    return layout.mapped(run, inputs, of_query)(kernel, query, key, value, *told)


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


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def attention(
    query: Float[Array, "B K G S D"],
    key: Float[Array, "B K T D"],
    value: Float[Array, "B K T D"],
    mask: Bool[Array, "b S T"],
    in_blocks: bool = False,
) -> Float[Array, "B K G S D"]:
    """The same without dropout and cap, with a gradient by hand.

    It keeps one [S, T] array, the probabilities, where autodiff keeps more; without a gradient nothing is kept.
    `in_blocks`, for which no query may see a later key, spares CPUs up to half of the work, and of what is kept; and a
    pass over the [S, T] arrays, as it divides the [S, D] ones by the sums of the exponentials.
    """
    block = max(_LEAST[query.shape[3] >= _LONG], query.shape[3] // _MOST_BLOCKS)
    parts = _forward_parts(query, key, value, mask, block if in_blocks else None)
    return jnp.concatenate([out for out, _, _ in parts], axis=3)


def _forward_parts(
    query: Array, key: Array, value: Array, mask: Array, block: int | None
) -> list[tuple[Array, Array, Array | None]]:
    """What each block of queries gets, their weights for the keys, and what these sum up to [B, K, G, S, 1].

    All at once, the weights are probabilities and there is no such sum.
    """
    parts = []
    for queries, keys in _blocks(query.shape[3], key.shape[2], block):
        scores = _products("bkgsd,bktd->bkgst", query[:, :, :, queries], key[:, :, keys])
        seen = mask[:, None, None, queries, keys]
        scores = jnp.where(seen, scores * query.shape[-1] ** -0.5, MASKED)
        weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
        sums = jnp.sum(weights, axis=-1, keepdims=True)
        weights = (weights / sums if block is None else weights).astype(value.dtype)
        out = _products("bkgst,bktd->bkgsd", weights, value[:, :, keys])
        out = (out if block is None else out / sums).astype(value.dtype)
        parts.append((out, weights, None if block is None else sums))
    return parts


def _blocks(queries: int, keys: int, block: int | None) -> list[tuple[slice, slice]]:
    """Queries with the keys they may see: all at once, or so many at a time with the keys up to their last."""
    if block is None:
        return [(slice(0, queries), slice(0, keys))]
    ends = [min(start + block, queries) for start in range(0, queries, block)]
    return [(slice(start, end), slice(0, end)) for start, end in zip([0, *ends], ends)]


def _trained(length: int, in_blocks: bool) -> int | None:
    return max(_LEAST[0], -(-length // _MOST_TRAINED)) if in_blocks else None


def _forward(query: Array, key: Array, value: Array, mask: Array, in_blocks: bool) -> tuple[Array, tuple[Any, ...]]:
    parts = _forward_parts(query, key, value, mask, _trained(query.shape[3], in_blocks))
    out = jnp.concatenate([out for out, _, _ in parts], axis=3)
    return out, (query, key, value, out, [kept for _, *kept in parts])


def _backward(in_blocks: bool, kept: tuple[Any, ...], gradient: Array) -> tuple[Array, Array, Array, None]:
    query, key, value, out, parts = kept
    d_query, d_key, d_value = [], [], []
    blocks = _blocks(query.shape[3], key.shape[2], _trained(query.shape[3], in_blocks))
    for (queries, keys), (weights, sums) in zip(blocks, parts, strict=True):
        d_out = gradient[:, :, :, queries]
        if sums is not None:
            d_out = (d_out.astype(jnp.float32) / sums).astype(gradient.dtype)
        # A softmax's gradient needs each row's mean of that of its probabilities, which is the row's out . gradient.
        products = d_out.astype(jnp.float32) * out[:, :, :, queries].astype(jnp.float32)
        means = jnp.sum(products, axis=-1, keepdims=True)
        d_weights = _products("bkgsd,bktd->bkgst", d_out, value[:, :, keys])
        d_scores = (weights * (d_weights - means) * query.shape[-1] ** -0.5).astype(query.dtype)
        d_query.append(_products("bkgst,bktd->bkgsd", d_scores, key[:, :, keys]))
        d_key.append(_products("bkgst,bkgsd->bktd", d_scores, query[:, :, :, queries]))
        d_value.append(_products("bkgst,bkgsd->bktd", weights, d_out))
    d_asked = jnp.concatenate(d_query, axis=3)
    return d_asked.astype(query.dtype), _sum(d_key).astype(key.dtype), _sum(d_value).astype(value.dtype), None


def _sum(parts: list[Array]) -> Array:
    """Of arrays [B, K, t, D] of the first t keys; the last has all."""
    *firsts, total = parts
    for part in firsts:
        total += jnp.pad(part, [(0, 0), (0, 0), (0, total.shape[2] - part.shape[2]), (0, 0)])
    return total


attention.defvjp(_forward, _backward)


def _products(equation: str, left: Array, right: Array) -> Array:
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)
