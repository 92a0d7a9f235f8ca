"""cuDNN's flash attention on NVIDIA GPUs: causal, with the documents of a row by their offsets.

JAX's own interface knows documents as a dense bias [B, 1, S, S] only, of which no block is skipped and whose gradient
is computed, too. cuDNN itself takes, on Hopper and newer, where each document begins and ends: a row of packed
documents is then as many short sequences. Older GPUs get the bias.

The primitives are JAX's private ones, bound directly: their public wrapper looks for a local GPU, which a plan has not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from affinage.model.apply_config import STATISTICS

# A config makes room for `_FEWEST` documents a row, or for one for every `_TOKENS_EACH` tokens if that is more: cuDNN
# launches blocks and stores statistics for each of them, whether it exists or not. A batch with more documents in a row
# is computed row by row, which is slower, with room for documents of `_SHORTEST` tokens on average, or of one token.
_FEWEST, _TOKENS_EACH, _SHORTEST = 16, 128, 8


@dataclass(frozen=True)
class _How:
    """What is static of a config."""

    window: int | None
    documents: Literal["one", "offsets", "bias"]


def cudnn_attention(
    query: Float[Array, "B S H D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K D"],
    segment_ids: Int[Array, "B S"] | None,
    *,
    window: int | None,
    by_offsets: bool,
) -> Float[Array, "B S H D"]:
    """Causal attention within segments, which lie one after the other in a row; float16 or bfloat16.

    `by_offsets`: whether the GPU is a Hopper or newer.
    """
    documents: Any = "one" if segment_ids is None else "offsets" if by_offsets else "bias"
    return _attended(query, key, value, segment_ids, _How(window, documents))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attended(query: Array, key: Array, value: Array, segment_ids: Array | None, how: _How) -> Array:
    return _kernels(how)[0](query, key, value, segment_ids)[0]


def _forward(query: Array, key: Array, value: Array, segment_ids: Array | None, how: _How) -> tuple[Array, Any]:
    out, statistics = _kernels(how)[0](query, key, value, segment_ids)
    # Named, so that no policy of `jax.checkpoint` that keeps what is attended runs the kernel again.
    out, statistics = checkpoint_name(out, "attended"), checkpoint_name(statistics, STATISTICS)
    return out, (query, key, value, segment_ids, statistics, out)


def _backward(how: _How, kept: tuple[Any, ...], gradient: Array) -> tuple[Array, Array, Array, None]:
    query, key, value, segment_ids, statistics, out = kept
    gradients = _kernels(how)[1](query, key, value, segment_ids, statistics, out, gradient)
    return (*gradients, None)


_attended.defvjp(_forward, _backward)


@lru_cache(maxsize=16)
def _kernels(how: _How) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The forward and the backward pass; rows that `jax.vmap` adds in front are rows like the others."""
    passes = []
    for function in (_run_forward, _run_backward):
        one = jax.custom_batching.custom_vmap(partial(function, how))
        one.def_vmap(partial(_fold_rows, one))
        passes.append(one)
    return passes[0], passes[1]


def _fold_rows(function: Callable[..., Any], size: int, is_batched: Any, *arguments: Any) -> tuple[Any, Any]:
    def fold(array: Array, batched: bool) -> Array:
        array = array if batched else jnp.broadcast_to(array, (size, *array.shape))
        return array.reshape(-1, *array.shape[2:])

    results = function(*jax.tree.map(fold, arguments, tuple(is_batched)))
    results = jax.tree.map(lambda array: array.reshape(size, -1, *array.shape[1:]), results)
    return results, jax.tree.map(lambda _: True, results)


_Masking = tuple[Array, Array, Array, Array]  # bias, lengths, offsets of queries, offsets of keys


def _run_forward(how: _How, query: Array, key: Array, value: Array, segment_ids: Array | None) -> tuple[Array, Array]:
    """What is attended, and the statistics that the backward pass needs."""
    if how.documents != "offsets" or segment_ids is None:
        return _bind(how, query, key, value, *_bias(how, segment_ids, query.dtype))
    rooms = _rooms(query.shape[1])
    arrays = (query, key, value, segment_ids)

    def few() -> tuple[Array, Array]:
        return _bind(how, query, key, value, *_offsets(segment_ids, rooms[0], query, key))

    def many(room: int) -> tuple[Array, Array]:
        out = jax.lax.map(lambda row: _forward_of_rows(how, room, *_rows_of_one(row))[0][0], arrays)
        return out, jnp.zeros((len(query) * rooms[0], query.shape[2], query.shape[1]), jnp.float32)

    return _by_documents(segment_ids, rooms, few, many)


def _run_backward(
    how: _How,
    query: Array,
    key: Array,
    value: Array,
    segment_ids: Array | None,
    statistics: Array,
    out: Array,
    gradient: Array,
) -> tuple[Array, Array, Array]:
    rest = (statistics, out, gradient.astype(out.dtype))
    if how.documents != "offsets" or segment_ids is None:
        return _bind(how, query, key, value, *_bias(how, segment_ids, query.dtype), backward=rest)
    rooms = _rooms(query.shape[1])
    arrays = (query, key, value, segment_ids, rest[2])

    def few() -> tuple[Array, Array, Array]:
        return _bind(how, query, key, value, *_offsets(segment_ids, rooms[0], query, key), backward=rest)

    def many(room: int) -> tuple[Array, Array, Array]:
        def of_row(row: tuple[Array, ...]) -> tuple[Array, ...]:
            query, key, value, segment_ids, d_out = _rows_of_one(row)
            out, statistics = _forward_of_rows(how, room, query, key, value, segment_ids)
            offsets = _offsets(segment_ids, room, query, key)
            gradients = _bind(how, query, key, value, *offsets, backward=(statistics, out, d_out))
            return tuple(array[0] for array in gradients)

        return jax.lax.map(of_row, arrays)

    return _by_documents(segment_ids, rooms, few, many)


def _forward_of_rows(
    how: _How, room: int, query: Array, key: Array, value: Array, segment_ids: Array
) -> tuple[Array, Array]:
    return _bind(how, query, key, value, *_offsets(segment_ids, room, query, key))


def _rows_of_one(row: Any) -> Any:
    return tuple(array[None] for array in row)


def _rooms(length: int) -> tuple[int, int, int]:
    """Documents that a row of this many tokens may have, usually, rarely, and at most."""
    few = min(length, max(_FEWEST, length // _TOKENS_EACH))
    return few, max(few, length // _SHORTEST), length


def _by_documents(
    segment_ids: Int[Array, "B S"], rooms: tuple[int, ...], few: Callable[[], Any], many: Callable[[int], Any]
) -> Any:
    """`few()`, or where a row has more documents than that has room for, `many` with room for them."""
    most = jnp.max(jnp.sum(_begins(segment_ids), axis=1))
    usual = sum((most <= room).astype(jnp.int32) for room in rooms[:-1])  # the usual branch is the last one
    return jax.lax.switch(usual, [lambda: many(rooms[2]), lambda: many(rooms[1]), few])


def _begins(segment_ids: Int[Array, "B S"]) -> Array:
    first = jnp.ones((len(segment_ids), 1), bool)
    return jnp.concatenate([first, segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)


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


def _bias(how: _How, segment_ids: Array | None, dtype: Any) -> _Masking:
    """A bias [B, 1, S, S] that keeps documents apart, where there are some, and neither lengths nor offsets."""
    nothing = jnp.zeros(0, dtype)
    if segment_ids is None:
        return nothing, nothing, nothing, nothing
    apart = segment_ids[:, None, :, None] != segment_ids[:, None, None, :]
    return (
        jnp.where(apart, jnp.asarray(jnp.finfo(dtype).min / 2, dtype), jnp.zeros((), dtype)),
        nothing,
        nothing,
        nothing,
    )


def _bind(
    how: _How,
    query: Array,
    key: Array,
    value: Array,
    bias: Array,
    lengths: Array,
    of_query: Array,
    of_key: Array,
    backward: tuple[Array, ...] = (),
) -> Any:
    from jax._src.cudnn import fused_attention_stablehlo as fused  # a plug-in's lowering: not needed on other platforms

    primitive: Any = fused._dot_product_attention_bwd_p if backward else fused._dot_product_attention_fwd_p
    offsets = lengths.size > 0
    nothing = jnp.zeros(0, query.dtype)
    results = primitive.bind(
        query, key, value, bias, lengths, lengths, of_query, of_key, nothing, nothing, *backward,
        scale=query.shape[-1] ** -0.5,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(bias.size > 0, bias.size > 0),  # its gradient is computed, too
        mask_type=fused.MaskType.PADDING_CAUSAL if offsets else fused.MaskType.CAUSAL,
        layout=fused.AttentionLayout.BTNH.value,
        sliding_window_length=how.window,
        **({} if backward else {"is_training": True}),
    )  # fmt: skip
    return tuple(results[:3])
