"""Causal attention within documents: one function over four implementations, and the choice between them."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from affinage.config.training import AttentionImplementation
from affinage.errors import UserError
from affinage.model.apply_config import HOPPER, Layout
from affinage.model.layers.cudnn import cudnn_attention
from affinage.model.layers.ring import MASKED, ring_attention
from affinage.model.layers.splash import LANES, queries_are_split, splash_attention, splash_on_parts
from affinage.model.products import Keys, Queries, Segments, product32

IMPLEMENTATIONS: tuple[str, ...] = get_args(AttentionImplementation)
_KERNELS = {"tpu": "splash", "gpu": "cudnn"}
_SMALLEST_BLOCK, _MOST_BLOCKS = 64, 4  # queries at once on a CPU; each block is compiled by itself

_planning = ContextVar("planning", default=False)

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


def choose(requested: str, workload: Workload) -> str:
    """The implementation to use: the requested one or, for `auto`, the platform's kernel where it can do the work.

    Decoding and scoring always take `xla`, whatever training takes, and so do rows shorter than a kernel's block.

    Raises:
        UserError: the requested one does not exist or cannot honor the workload; nothing is ever left out silently.
    """
    if requested not in (*IMPLEMENTATIONS, "ring"):
        raise UserError(
            f"attention implementation {requested!r} is not known", fix=f"There are {', '.join(IMPLEMENTATIONS)}."
        )
    kernel = _KERNELS.get(workload.platform, "xla") if requested == "auto" else requested
    if workload.cached or workload.prefixes or (requested == "auto" and workload.length < LANES):
        return "xla"
    missing = ", ".join(obstacles(kernel, workload))
    if requested == "auto":
        if not _planning.get():
            _log_choice(kernel, missing)
        return "xla" if missing else kernel
    if missing:
        fix = "`attention: auto` takes one that can, or xla."
        if requested == "ring":
            fix = "Set the attention's `dropout: 0`, or `parallel: {context_attention: all_gather}`."
        raise UserError(f"attention by {requested} cannot honor {missing}", where="attention", fix=fix)
    return kernel


@contextmanager
def only_planned() -> Iterator[None]:
    """Inside, choices are not logged: the program is traced, and does not run."""
    token = _planning.set(True)
    try:
        yield
    finally:
        _planning.reset(token)


@lru_cache(maxsize=64)
def _log_choice(kernel: str, missing: str) -> None:
    """Log a choice once a process; a CPU's plain products are no news."""
    if missing:
        slow = "attention: plain products over all pairs of tokens, which cost time and memory"
        logger.warning("%s, as %s cannot honor %s", slow, kernel, missing)
    elif kernel != "xla":
        logger.info("attention: %s", kernel)


def obstacles(name: str, workload: Workload) -> list[str]:
    """What an implementation cannot honor, in words; nothing for `xla`, which honors everything."""
    if name == "xla":
        return []
    dtype, dim = jnp.dtype(workload.dtype), workload.head_dim
    missing = {f"dropout of {workload.dropout:g} of the probabilities": workload.dropout > 0}
    if name == "splash":
        missing[f"a {workload.platform}: it is a kernel for TPUs"] = workload.platform != "tpu"
        missing[f"{dtype}"] = dtype not in (jnp.float32, jnp.bfloat16)
    if name == "cudnn":
        widest = 256 if (workload.capability or (0, 0)) >= HOPPER else 128
        missing |= {
            f"a {workload.platform} without cuDNN": workload.platform != "gpu" or workload.capability is None,
            f"{dtype}": dtype not in (jnp.float16, jnp.bfloat16),
            f"heads of {dim} (multiples of 8 up to {widest})": dim % 8 > 0 or dim > widest,
            f"rows of {workload.length} tokens (an odd number)": workload.length % 2 > 0,
        }
    return [what for what, is_missing in missing.items() if is_missing]


def attention(
    query: Queries,
    key: Keys,
    value: Keys,
    segment_ids: Segments,
    *,
    impl: str,
    layout: Layout,
    window: int | None = None,
    dropout: Callable[[Array], Array] | None = None,
    mask: Bool[Array, "b S T"] | None = None,
    on_cpu: bool = False,
    capability: tuple[int, int] | None = None,
) -> Queries:
    """Values weighted by the softmax of scaled scores, causal and within segments; float32 inside.

    `impl` is as `choose` returns it, or "ring". With a `window` a token sees itself and this many less one before it.
    `dropout` of the probabilities, the `mask` of what a query sees (causality included) and blocks of queries `on_cpu`
    are for `xla` only.
    """
    if impl == "ring":
        return ring_attention(query, key, value, segment_ids, layout, window=window)
    if impl == "splash" and queries_are_split(layout.whole(query.shape[1], "sequence"), layout.parts("sequence")):
        return splash_on_parts(query, key, value, segment_ids, layout, window=window)
    key, value = of_whole_rows(key, value, layout)
    if impl == "xla":
        assert mask is not None
        # Slices of a split sequence, and sums of heads whose queries are split again elsewhere, would have to be sent.
        blocks = on_cpu and layout.parts("sequence", "heads") == 1
        return xla_attention(query, key, value, mask, dropout=dropout, in_blocks=blocks)
    kernel: Callable[..., Array] = partial(splash_attention, window=window)
    if impl == "cudnn":
        kernel = partial(cudnn_attention, window=window, by_offsets=(capability or (0, 0)) >= HOPPER)
    # Each device runs the kernel on its rows and heads, over whole rows.
    of_part, of_query = (("batch", length, "heads", "head_dim") for length in ("sequence", None))
    of_key = ("batch", None, "kv_heads", "head_dim")
    arrays = [layout.resplit(query, of_part, of_query), key, value]
    axes: list[tuple[str | None, ...]] = [of_query, of_key, of_key]
    if segment_ids is not None:
        arrays.append(layout.resplit(segment_ids, ("batch", "sequence"), ("batch", "keys")))
        axes.append(("batch", None))
    out = layout.mapped(lambda q, k, v, s=None: kernel(q, k, v, s), axes, of_query)(*arrays)
    return layout.resplit(out, of_query, of_part)


def of_whole_rows(key: Array, value: Array, layout: Layout) -> tuple[Array, Array]:
    """Keys and values [B, S, K, D], where sequences are split gathered to those of whole rows."""
    of_parts, of_rows = ("batch", "sequence", "kv_heads", "head_dim"), ("batch", "keys", "kv_heads", "head_dim")
    return layout.resplit(key, of_parts, of_rows), layout.resplit(value, of_parts, of_rows)


def xla_attention(
    query: Queries,
    key: Keys,
    value: Keys,
    mask: Bool[Array, "b S T"],
    *,
    dropout: Callable[[Array], Array] | None = None,
    in_blocks: bool = False,
) -> Queries:
    """Attention by plain products over all pairs that `mask` leaves, which is True where a query sees a key.

    `in_blocks`, for which no query may see a later key, spares CPUs up to half of the work.
    """
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
