"""Flash attention by the kernels of accelerators: cuDNN's on NVIDIA GPUs, Splash on TPUs."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from affinage.model.apply_config import STATISTICS, Layout

Queries = Float[Array, "B S H D"]
Keys = Float[Array, "B S K D"]  # and values; each of the K heads is for H / K heads of queries
Segments = Int[Array, "B S"] | None  # the documents of a row, one after the other; None: a row is one document

# ---- cuDNN: causal, with the documents of a row by their offsets ----
# JAX's own interface knows documents as a dense bias [B, 1, S, S] only, of which no block is skipped and whose gradient
# is computed, too. cuDNN itself takes, on Hopper and newer, where each document begins and ends: a row of packed
# documents is then as many short sequences. Older GPUs get the bias. The primitives are JAX's private ones, bound
# directly: their public wrapper looks for a local GPU, which a plan has not.

# A call makes room for `_FEWEST` documents a row, or for one for every `_TOKENS_EACH` tokens if that is more: cuDNN
# launches blocks and stores statistics for each of them, whether it exists or not. A batch with more documents in a row
# is computed row by row, which is slower, with room for documents of `_SHORTEST` tokens on average, or of one token.
_FEWEST, _TOKENS_EACH, _SHORTEST = 16, 128, 8
_How = tuple[int | None, bool]  # the window, and whether documents are given by offsets, as on Hopper


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def cudnn_attention(query: Queries, key: Keys, value: Keys, segment_ids: Segments, how: _How) -> Queries:
    """Causal attention within segments, one after the other in a row, in bfloat16."""
    return _kernel(how)(query, key, value, segment_ids)[0]


def _forward(query: Queries, key: Keys, value: Keys, segment_ids: Segments, how: _How) -> tuple[Queries, Any]:
    out, statistics = _kernel(how)(query, key, value, segment_ids)
    # Named, so that no policy of `jax.checkpoint` that keeps what is attended runs the kernel again.
    out, statistics = checkpoint_name(out, "attended"), checkpoint_name(statistics, STATISTICS)
    return out, (query, key, value, segment_ids, statistics, out)


def _backward(how: _How, saved: tuple[Any, ...], gradient: Queries) -> tuple[Queries, Keys, Keys, None]:
    return (*_kernel(how)(*saved, gradient.astype(saved[-1].dtype)), None)


cudnn_attention.defvjp(_forward, _backward)


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


def _run(how: _How, query: Queries, key: Keys, value: Keys, segment_ids: Segments, *rest: Array) -> tuple[Array, ...]:
    """What is attended and the statistics; of `rest`, which is these and a gradient, the gradients."""
    if segment_ids is None or not how[1]:
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
            results = _bind(how, query, key, value, masking)
            if rest:
                results = _bind(how, query, key, value, masking, (results[1], results[0], *gradient))
            return tuple(array[0] for array in results) if rest else (results[0][0],)

        results: tuple[Array, ...] = jax.lax.map(of_row, (query, key, value, segment_ids, *rest[2:]))
        return results if rest else (*results, jnp.zeros((rows * fewest, heads, length), jnp.float32))

    most = jnp.max(jnp.sum(_begins(segment_ids), axis=1))
    branch = (most <= fewest).astype(jnp.int32) + (most <= more).astype(jnp.int32)  # the usual one is the last
    results: tuple[Array, ...] = jax.lax.switch(branch, [lambda: many(length), lambda: many(more), few])
    return results


def _begins(segment_ids: Int[Array, "B S"]) -> Bool[Array, "B S"]:
    return jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)


_Masking = tuple[Array, Array, Array, Array]  # bias, lengths, offsets of queries, offsets of keys


def _offsets(segment_ids: Int[Array, "B S"], room: int, query: Queries, key: Keys) -> _Masking:
    """No bias, lengths [B, M] and offsets [B, M + 1] in elements of all rows' documents; missing ones have length 0."""
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
    how: _How, query: Queries, key: Keys, value: Keys, masking: _Masking, backward: tuple[Array, ...] = ()
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
        sliding_window_length=how[0],
        **({} if backward else {"is_training": True}),
    )  # fmt: skip
    return tuple(results[:3])


# ---- Splash: JAX's kernel for TPUs, which skips the blocks of a row that no query sees ----

LANES = 128  # the kernel's smallest block: rows are filled up to a multiple of it
_BLOCKS = (512, 256, 128)  # of queries and of keys, the largest that divides a row; 512 is what MaxText trains with


def splash_attention(
    query: Queries, key: Keys, value: Keys, ids: Segments, *, window: int | None, interpret: bool = False
) -> Queries:
    """Causal attention within segments; softmax in float32. `interpret` computes it on any platform, slowly."""
    # Rows are filled up behind their tokens, where causality hides it.
    length, heads = query.shape[1:3]
    whole = -(-length // LANES) * LANES
    fill = ((0, 0), (0, whole - length), (0, 0), (0, 0))
    query, key, value = (jnp.pad(array, fill) for array in (query, key, value))
    segments = () if ids is None else (jnp.pad(ids, fill[:2]),) * 2
    return _run_splash(_splash_kernel(heads, whole, window, interpret), query, key, value, *segments)[:, :length]


def splash_on_parts(
    query: Queries, key: Keys, value: Keys, ids: Segments, layout: Layout, window: int | None, interpret: bool = False
) -> Queries:
    """Splash where the tokens of a row lie on several devices: each has its queries, and gathers all keys.

    For the backward pass a device keeps its own keys alone, and gathers the others again.
    """
    shards: dict[str, Any] = {"head_shards": layout.parts("heads"), "q_seq_shards": layout.parts("sequence")}
    length = layout.whole(query.shape[1], "sequence")
    kernel = _splash_kernel(query.shape[2], length, window, interpret, **shards)
    of_query, of_key = (("batch", "sequence", heads, "head_dim") for heads in ("heads", "kv_heads"))
    of_segments = () if ids is None else (("batch", "sequence"), ("batch", "keys"))
    segments = () if ids is None else (ids, layout.resplit(ids, *of_segments))

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("attended"))
    def run(kernel: Any, query: Array, key: Array, value: Array, *segments: Array) -> Array:
        over = layout.mesh_axes("sequence")
        keys, values = (jax.lax.all_gather(array, over, axis=1, tiled=True) for array in (key, value))
        return _run_splash(kernel, query, keys, values, *segments)

    axes_of = {"q_sequence": ("sequence",), "partial_mask_blocks": (None, None, None)}
    of_kernel = jax.tree_util.tree_map_with_path(
        lambda path, _: axes_of.get(path[-1].name, ("heads", "sequence", None)), kernel
    )
    kernel = jax.tree.map(lambda array, axes: layout.resplit(array, (None,) * array.ndim, axes), kernel, of_kernel)
    inputs = (of_kernel, of_query, of_key, of_key, *of_segments)
    return layout.mapped(run, inputs, of_query)(kernel, query, key, value, *segments)


def queries_are_split(length: int, parts: int) -> bool:
    """Whether, of rows of `length` tokens on `parts` devices, each computes its own queries instead of whole rows."""
    return parts > 1 and length % (parts * LANES) == 0


def _splash_kernel(heads: int, length: int, window: int | None, interpret: bool, **shards: Any) -> Any:
    """The kernel for rows of `length` tokens, a pytree of arrays that say which blocks to visit."""
    # Pallas for TPUs takes a second to import.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    size = next(size for size in _BLOCKS if length // shards.get("q_seq_shards", 1) % size == 0)
    shape = (length, length)
    mask = splash.CausalMask(shape) if window is None else splash.LocalMask(shape, (window - 1, 0), 0)
    return splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(*(size,) * 8),
        residual_checkpoint_name="attended",
        interpret=interpret,
        **({"head_shards": 1, "q_seq_shards": 1} | shards),
    )


def _run_splash(kernel: Any, query: Queries, key: Keys, value: Keys, *segments: Array) -> Queries:
    """A kernel's results for the queries and all keys of rows; `segments` of both."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    scaled = (query.astype(jnp.float32) * query.shape[-1] ** -0.5).astype(query.dtype)
    by_head = (jnp.swapaxes(array, 1, 2) for array in (scaled, key, value))
    out = jax.vmap(kernel)(*by_head, *([splash.SegmentIds(*segments)] if segments else []))
    return jnp.swapaxes(out, 1, 2).astype(value.dtype)
