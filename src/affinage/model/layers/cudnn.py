"""cuDNN's flash attention on NVIDIA GPUs: causal, with the documents of a row by their offsets.

JAX's own interface knows documents as a dense bias [B, 1, S, S] only, of which no block is skipped and whose gradient
is computed, too. cuDNN itself takes, on Hopper and newer, where each document begins and ends: a row of packed
documents is then as many short sequences. Older GPUs get the bias.

The primitives are JAX's private ones, bound directly: their public wrapper looks for a local GPU, which a plan has not.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Int

from affinage.model.apply_config import STATISTICS
from affinage.model.products import Keys, Queries, Segments

# A call makes room for `_FEWEST` documents a row, or for one for every `_TOKENS_EACH` tokens if that is more: cuDNN
# launches blocks and stores statistics for each of them, whether it exists or not. A batch with more documents in a row
# is computed row by row, which is slower, with room for documents of `_SHORTEST` tokens on average, or of one token.
_FEWEST, _TOKENS_EACH, _SHORTEST = 16, 128, 8


class _How(NamedTuple):
    window: int | None
    documents: Literal["one", "offsets", "bias"]


def cudnn_attention(
    query: Queries, key: Keys, value: Keys, segment_ids: Segments, *, window: int | None, by_offsets: bool
) -> Queries:
    """Causal attention within segments, which lie one after the other in a row; float16 or bfloat16.

    `by_offsets`: whether the GPU is a Hopper or newer.
    """
    documents: Any = "one" if segment_ids is None else "offsets" if by_offsets else "bias"
    return _attended(query, key, value, segment_ids, _How(window, documents))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attended(query: Array, key: Array, value: Array, segment_ids: Segments, how: _How) -> Array:
    return _kernel(how)(query, key, value, segment_ids)[0]


def _forward(query: Array, key: Array, value: Array, segment_ids: Segments, how: _How) -> tuple[Array, Any]:
    out, statistics = _kernel(how)(query, key, value, segment_ids)
    # Named, so that no policy of `jax.checkpoint` that keeps what is attended runs the kernel again.
    out, statistics = checkpoint_name(out, "attended"), checkpoint_name(statistics, STATISTICS)
    return out, (query, key, value, segment_ids, statistics, out)


def _backward(how: _How, saved: tuple[Any, ...], gradient: Array) -> tuple[Array, Array, Array, None]:
    return (*_kernel(how)(*saved, gradient.astype(saved[-1].dtype)), None)


_attended.defvjp(_forward, _backward)


@lru_cache(maxsize=16)
def _kernel(how: _How) -> Callable[..., Any]:
    """The forward or, of more arguments, the backward pass; rows that `jax.vmap` adds in front are rows like others."""
    function = jax.custom_batching.custom_vmap(partial(_run, how))

    @function.def_vmap
    def fold(size: int, is_batched: Any, *arguments: Any) -> tuple[Any, Any]:
        def one(array: Array, batched: bool) -> Array:
            array = array if batched else jnp.broadcast_to(array, (size, *array.shape))
            return array.reshape(-1, *array.shape[2:])

        results = function(*jax.tree.map(one, arguments, tuple(is_batched)))
        results = jax.tree.map(lambda array: array.reshape(size, -1, *array.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return function


def _run(how: _How, query: Array, key: Array, value: Array, segment_ids: Segments, *rest: Array) -> tuple[Array, ...]:
    """What is attended and the statistics; of `rest`, which is these and a gradient, the gradients."""
    if how.documents != "offsets" or segment_ids is None:
        return _bind(how, query, key, value, _bias(segment_ids, query.dtype), rest)
    rows, length, heads = query.shape[:3]
    fewest = min(length, max(_FEWEST, length // _TOKENS_EACH))
    more = max(fewest, length // _SHORTEST)

    def few() -> tuple[Array, ...]:
        return _bind(how, query, key, value, _offsets(segment_ids, fewest, query, key), rest)

    def many(room: int) -> tuple[Array, ...]:
        def of_row(row: tuple[Array, ...]) -> tuple[Array, ...]:
            query, key, value, segment_ids, *gradient = (array[None] for array in row)
            masking = _offsets(segment_ids, room, query, key)
            found = _bind(how, query, key, value, masking)
            if rest:
                found = _bind(how, query, key, value, masking, (found[1], found[0], *gradient))
            return tuple(array[0] for array in found) if rest else (found[0][0],)

        results: tuple[Array, ...] = jax.lax.map(of_row, (query, key, value, segment_ids, *rest[2:]))
        return results if rest else (*results, jnp.zeros((rows * fewest, heads, length), jnp.float32))

    most = jnp.max(jnp.sum(_begins(segment_ids), axis=1))
    branch = (most <= fewest).astype(jnp.int32) + (most <= more).astype(jnp.int32)  # the usual one is the last
    found: tuple[Array, ...] = jax.lax.switch(branch, [lambda: many(length), lambda: many(more), few])
    return found


def _begins(segment_ids: Int[Array, "B S"]) -> Array:
    first = jnp.ones((len(segment_ids), 1), bool)
    return jnp.concatenate([first, segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)


_Masking = tuple[Array, Array, Array, Array]  # bias, lengths, offsets of queries, offsets of keys


def _offsets(segment_ids: Int[Array, "B S"], room: int, query: Array, key: Array) -> _Masking:
    """No bias, and lengths [B, M] and offsets [B, M + 1] of the documents of all rows, one after the other.

    Offsets count elements from the first row on. The places of documents that are not there have the length zero.
    """
    rows, length = segment_ids.shape
    starts = jnp.where(_begins(segment_ids), jnp.arange(length, dtype=jnp.int32), length)
    starts = jnp.sort(starts, axis=1)[:, :room]
    ends = jnp.concatenate([starts[:, 1:], jnp.full((rows, 1), length, jnp.int32)], axis=1)
    offsets = (starts + length * jnp.arange(rows, dtype=jnp.int32)[:, None]).reshape(-1)
    offsets = jnp.concatenate([offsets, jnp.full((rows,), rows * length, jnp.int32)]).reshape(rows, room + 1)
    of_query, of_key = (offsets * (array.shape[2] * array.shape[3]) for array in (query, key))
    return jnp.zeros(0, query.dtype), ends - starts, of_query, of_key


def _bias(segment_ids: Segments, dtype: Any) -> _Masking:
    """A bias [B, 1, S, S] that keeps documents apart, where there are some, and neither lengths nor offsets."""
    bias = nothing = jnp.zeros(0, dtype)
    if segment_ids is not None:
        apart = segment_ids[:, None, :, None] != segment_ids[:, None, None, :]
        bias = jnp.where(apart, jnp.asarray(jnp.finfo(dtype).min / 2, dtype), jnp.zeros((), dtype))
    return bias, nothing, nothing, nothing


def _bind(
    how: _How, query: Array, key: Array, value: Array, masking: _Masking, backward: tuple[Array, ...] = ()
) -> tuple[Array, ...]:
    from jax._src.cudnn import fused_attention_stablehlo as fused  # a plug-in's lowering: not needed on other platforms

    primitive: Any = fused._dot_product_attention_bwd_p if backward else fused._dot_product_attention_fwd_p
    bias, lengths, of_query, of_key = masking
    nothing = jnp.zeros(0, query.dtype)
    results = primitive.bind(
        query, key, value, bias, lengths, lengths, of_query, of_key, nothing, nothing, *backward,
        scale=query.shape[-1] ** -0.5,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(bias.size > 0, bias.size > 0),  # its gradient is computed, too
        mask_type=fused.MaskType.PADDING_CAUSAL if lengths.size > 0 else fused.MaskType.CAUSAL,
        layout=fused.AttentionLayout.BTNH.value,
        sliding_window_length=how.window,
        **({} if backward else {"is_training": True}),
    )  # fmt: skip
    return tuple(results[:3])
