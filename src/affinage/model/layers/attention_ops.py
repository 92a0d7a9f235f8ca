"""Causal attention within documents: one function over four implementations, and the choice between them."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from affinage.config.training import AttentionImplementation
from affinage.errors import UserError
from affinage.model.apply_config import HOPPER, Layout
from affinage.model.layers.cudnn import cudnn_attention
from affinage.model.layers.ring import MASKED, ring_attention
from affinage.model.layers.splash import LANES, queries_are_split, splash_attention, splash_on_parts
from affinage.model.products import product32

IMPLEMENTATIONS: tuple[str, ...] = get_args(AttentionImplementation)
_KERNELS = {"tpu": "splash", "gpu": "cudnn"}
_LEAST, _LONG = (64, 128), 512  # queries at once on a CPU, in rows below and from this many tokens on
_MOST_BLOCKS, _MOST_TRAINED = 16, 4  # each is compiled by itself, those of a step with their backward pass

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Workload:
    """What attention must do. Every implementation honors causality, documents, windows and grouped queries."""

    platform: str  # "cpu", "gpu" or "tpu"
    dtype: Any  # of queries, keys and values
    head_dim: int
    length: int  # tokens in a row
    capability: tuple[int, int] | None = None  # compute capability of an NVIDIA GPU
    cached: bool = False  # keys come from a KV cache
    prefixes: bool = False  # documents that share a prefix, see `prefix_segment_ids`
    dropout: float = 0.0  # of the probabilities; 0 outside of training
    softcap: float | None = None


def choose(requested: str, workload: Workload) -> str:
    """The implementation to use: the requested one or, for `auto`, the platform's kernel where it can do the work.

    Raises:
        UserError: the requested one does not exist or cannot honor the workload; nothing is ever left out silently.
    """
    if requested not in IMPLEMENTATIONS:
        raise UserError(
            f"attention implementation {requested!r} is not known", fix=f"There are {_listed(IMPLEMENTATIONS)}."
        )
    if requested == "auto":
        kernel = _KERNELS.get(workload.platform)
        if kernel is None or workload.cached or workload.prefixes or workload.length < LANES:
            return "xla"  # of shorter rows a kernel would compute padding more than anything
        missing = tuple(obstacles(kernel, workload))
        _report_choice("xla" if missing else kernel, kernel, missing)
        return "xla" if missing else kernel
    missing = tuple(obstacles(requested, workload))
    if missing and (workload.cached or workload.prefixes):
        return "xla"  # decoding and scoring always take it, whatever training takes
    if missing:
        others = [name for name in IMPLEMENTATIONS if name != "auto" and not obstacles(name, workload)]
        raise UserError(
            f"attention by {requested} cannot honor {_listed(missing)}",
            where="attention",
            fix=f"{_listed(others)} can; `attention: auto` takes one that can.",
        )
    return requested


@lru_cache(maxsize=64)
def _report_choice(chosen: str, kernel: str, missing: tuple[str, ...]) -> None:
    """Log a choice once a process."""
    if missing:
        why = f"{kernel} cannot honor {_listed(missing)}"
        logger.warning("attention: plain products over all pairs of tokens, which cost time and memory, as %s", why)
    else:
        logger.info("attention: %s", chosen)


def obstacles(name: str, workload: Workload) -> list[str]:
    """What an implementation cannot honor, in words; nothing for `xla`, which honors everything."""
    if name == "xla":
        return []
    dtype, dim = jnp.dtype(workload.dtype), workload.head_dim
    wrong = [
        (workload.cached, "a KV cache"),
        (workload.prefixes, "shared prefixes"),
        (workload.dropout > 0, f"dropout of {workload.dropout:g} of the probabilities"),
    ]
    if name == "splash":
        wrong += [
            (workload.platform != "tpu", f"a {workload.platform}: it is a kernel for TPUs"),
            (dtype not in (jnp.float32, jnp.bfloat16), f"{dtype} (float32 and bfloat16 it can)"),
        ]
    if name == "cudnn":
        widest = 256 if (workload.capability or (0, 0)) >= HOPPER else 128
        wrong += [
            (workload.platform != "gpu" or workload.capability is None, f"a {workload.platform} without cuDNN"),
            (workload.softcap is not None, f"a soft-cap of {workload.softcap} on the scores"),
            (dtype not in (jnp.float16, jnp.bfloat16), f"{dtype} (float16 and bfloat16 it can)"),
            (dim % 8 > 0 or dim > widest, f"heads of {dim} (multiples of 8 up to {widest})"),
            (workload.length % 2 > 0, f"rows of {workload.length} tokens (an odd number)"),
        ]
    return [what for is_wrong, what in wrong if is_wrong]


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else str(last)


def attention(
    query: Float[Array, "B S H D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K D"],
    segment_ids: Int[Array, "B S"] | None,
    *,
    impl: str,
    layout: Layout,
    window: int | None = None,
    softcap: float | None = None,
    dropout: Callable[[Array], Array] | None = None,
    mask: Bool[Array, "b S T"] | None = None,
    on_cpu: bool = False,
    capability: tuple[int, int] | None = None,
) -> Float[Array, "B S H D"]:
    """Values weighted by the softmax of scaled scores, causal and within segments; float32 inside.

    Args:
        query: of the tokens that lie here, as `key` and `value` are.
        key: K heads, each for H / K heads of queries.
        value: like `key`.
        segment_ids: the documents of a row, one after the other; None: a row is one document.
        impl: as `choose` returns it, or "ring".
        layout: how the arrays lie on the devices.
        window: a token sees itself and this many less one before it.
        softcap: scores are bounded to ± this by a tanh.
        dropout: applied to the probabilities; for `xla` only.
        mask: of `xla`, what a query sees, causality included.
        on_cpu: whether blocks of queries, which spare a processor half of the work, may be used.
        capability: of the GPU; what cuDNN can do depends on it.
    """
    if impl == "ring":
        return ring_attention(query, key, value, segment_ids, layout, window=window, softcap=softcap)
    if impl == "xla":
        assert mask is not None
        key, value = of_whole_rows(key, value, layout)
        # Slices of a split sequence, and sums of heads whose queries are split again elsewhere, would have to be sent.
        blocks = on_cpu and layout.parts("sequence", "heads") == 1
        return xla_attention(query, key, value, mask, softcap=softcap, dropout=dropout, in_blocks=blocks)
    if impl == "splash":
        if queries_are_split(layout.whole(query.shape[1], "sequence"), layout.parts("sequence")):
            return splash_on_parts(query, key, value, segment_ids, layout, window=window, softcap=softcap)
        kernel: Callable[..., Array] = partial(splash_attention, window=window, softcap=softcap)
    else:
        kernel = partial(cudnn_attention, window=window, by_offsets=(capability or (0, 0)) >= HOPPER)
    # Each device runs the kernel on its rows and heads, over whole rows.
    of_part, of_query = (("batch", length, "heads", "head_dim") for length in ("sequence", None))
    of_key = ("batch", None, "kv_heads", "head_dim")
    query = layout.resplit(query, of_part, of_query)
    key, value = of_whole_rows(key, value, layout)
    arrays = [query, key, value]
    axes: list[tuple[str | None, ...]] = [of_query, of_key, of_key]
    if segment_ids is not None:
        arrays.append(layout.resplit(segment_ids, ("batch", "sequence"), ("batch", "keys")))
        axes.append(("batch", None))
    out = layout.mapped(lambda q, k, v, s=None: kernel(q, k, v, s), axes, of_query)(*arrays)
    return layout.resplit(out, of_query, of_part)


def of_whole_rows(key: Array, value: Array, layout: Layout) -> tuple[Array, Array]:
    """Keys and values [B, S, K, D], where sequences are split gathered to those of whole rows."""
    of_parts, of_rows = ("batch", "sequence", "kv_heads", "head_dim"), ("batch", "keys", "kv_heads", "head_dim")
    key, value = (layout.resplit(array, of_parts, of_rows) for array in (key, value))
    return key, value


def xla_attention(
    query: Float[Array, "B S H D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    mask: Bool[Array, "b S T"],
    *,
    softcap: float | None = None,
    dropout: Callable[[Array], Array] | None = None,
    in_blocks: bool = False,
) -> Float[Array, "B S H D"]:
    """Attention by plain products over all pairs that `mask` leaves, which is True where a query sees a key."""
    batch, length, heads, width = query.shape
    query = query.reshape(batch, length, key.shape[2], -1, width).transpose(0, 2, 3, 1, 4)
    key, value = jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2)
    if softcap is not None or dropout is not None:
        out = _plain(query, key, value, mask, softcap, dropout)
    else:
        out = _by_hand(query, key, value, mask, in_blocks)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, width)


def _plain(
    query: Float[Array, "B K G S D"],
    key: Float[Array, "B K T D"],
    value: Float[Array, "B K T D"],
    mask: Bool[Array, "b S T"],
    softcap: float | None,
    dropout: Callable[[Array], Array] | None,
) -> Float[Array, "B K G S D"]:
    scores = product32("bkgsd,bktd->bkgst", query, key) * query.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(mask[:, None, None], scores, MASKED)
    probabilities = checkpoint_name(jax.nn.softmax(scores, axis=-1).astype(value.dtype), "attention_weights")
    if dropout is not None:
        probabilities = dropout(probabilities)
    return jnp.einsum("bkgst,bktd->bkgsd", probabilities, value)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _by_hand(
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
    """For each block of queries its values, its weights for the keys, and what these sum up to [B, K, G, S, 1].

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
    """Queries with the keys they may see: all at once, or a block at a time with the keys up to its last."""
    if block is None:
        return [(slice(0, queries), slice(0, keys))]
    ends = [min(start + block, queries) for start in range(0, queries, block)]
    return [(slice(start, end), slice(0, end)) for start, end in zip([0, *ends], ends)]


def _trained(length: int, in_blocks: bool) -> int | None:
    return max(_LEAST[0], -(-length // _MOST_TRAINED)) if in_blocks else None


def _forward(query: Array, key: Array, value: Array, mask: Array, in_blocks: bool) -> tuple[Array, tuple[Any, ...]]:
    parts = _forward_parts(query, key, value, mask, _trained(query.shape[3], in_blocks))
    out = jnp.concatenate([out for out, _, _ in parts], axis=3)
    return out, (query, key, value, out, [checkpoint_name(kept, "attention_weights") for _, *kept in parts])


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


_by_hand.defvjp(_forward, _backward)


def _products(equation: str, left: Array, right: Array) -> Array:
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)
