"""Splash: JAX's flash attention kernel for TPUs, which skips the blocks of a row that no query sees."""

from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from affinage.model.apply_config import Layout
from affinage.model.products import Keys, Queries, Segments

LANES = 128  # the kernel's smallest block: rows are filled up to a multiple of it
_BLOCKS = (512, 256, 128)  # of queries and of keys, the largest that divides a row; 512 is what MaxText trains with


def splash_attention(
    query: Queries,
    key: Keys,
    value: Keys,
    segment_ids: Segments,
    *,
    window: int | None,
    interpret: bool = False,
) -> Queries:
    """Causal attention within segments, with the kernel's own backward pass; softmax in float32.

    Rows are filled up behind their tokens, where causality hides it. `interpret` computes the kernel's results on any
    platform, slowly.
    """
    length, heads = query.shape[1:3]
    whole = -(-length // LANES) * LANES
    fill = ((0, 0), (0, whole - length), (0, 0), (0, 0))
    query, key, value = (jnp.pad(array, fill) for array in (query, key, value))
    ids = () if segment_ids is None else (jnp.pad(segment_ids, fill[:2]),) * 2
    return _run(_kernel(heads, whole, window, interpret), query, key, value, *ids)[:, :length]


def splash_on_parts(
    query: Queries,
    key: Keys,
    value: Keys,
    segment_ids: Segments,
    layout: Layout,
    *,
    window: int | None,
    interpret: bool = False,
) -> Queries:
    """Splash where the tokens of a row lie on several devices: each has its queries, and gathers all keys.

    For the backward pass a device keeps its own keys and gathers the others again: those of whole rows, of every layer,
    would be as many times more as there are devices.
    """
    shards: dict[str, Any] = {"head_shards": layout.parts("heads"), "q_seq_shards": layout.parts("sequence")}
    length = layout.whole(query.shape[1], "sequence")
    kernel = _kernel(query.shape[2], length, window, interpret, **shards)
    of_query, of_key = (("batch", "sequence", heads, "head_dim") for heads in ("heads", "kv_heads"))
    of_segments = () if segment_ids is None else (("batch", "sequence"), ("batch", "keys"))
    segments = () if segment_ids is None else (segment_ids, layout.resplit(segment_ids, *of_segments))

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("attended"))
    def run(kernel: Any, query: Array, key: Array, value: Array, *segments: Array) -> Array:
        over = layout.mesh_axes("sequence")
        keys, values = (jax.lax.all_gather(array, over, axis=1, tiled=True) for array in (key, value))
        return _run(kernel, query, keys, values, *segments)

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


def _kernel(heads: int, length: int, window: int | None, interpret: bool, **shards: Any) -> Any:
    """The kernel for rows of `length` tokens, a pytree of arrays that say which blocks to visit.

    Its results and the log-sum-exp of its scores are named `attended` for policies of `jax.checkpoint`.
    """
    # Pallas for TPUs takes a second to import.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    size = next(size for size in _BLOCKS if length // shards.get("q_seq_shards", 1) % size == 0)
    return splash.make_splash_mha(
        splash.MultiHeadMask([_causal_mask(length, window)] * heads),
        block_sizes=splash.BlockSizes(*(size,) * 8),
        residual_checkpoint_name="attended",
        interpret=interpret,
        **({"head_shards": 1, "q_seq_shards": 1} | shards),
    )


def _run(kernel: Any, query: Queries, key: Keys, value: Keys, *segments: Array) -> Queries:
    """A kernel's results for the queries and all keys of rows; `segments` of both."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    scaled = (query.astype(jnp.float32) * query.shape[-1] ** -0.5).astype(query.dtype)
    by_head = (jnp.swapaxes(array, 1, 2) for array in (scaled, key, value))
    out = jax.vmap(kernel)(*by_head, *([splash.SegmentIds(*segments)] if segments else []))
    return jnp.swapaxes(out, 1, 2).astype(value.dtype)


def _causal_mask(length: int, window: int | None) -> Any:
    """JAX's causal mask, or with a window its local one, without looking at every pair of tokens.

    The kernel wants the mask of every block of queries and keys, and JAX computes each from its positions: 40 s for
    rows of 131,072 tokens, at each of two times. All but those at an edge are all visible or all hidden.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import CausalMask, LocalMask

    reach = length if window is None else window - 1
    mask = CausalMask((length, length)) if window is None else LocalMask((length, length), (reach, 0), 0)

    class Banded(type(mask)):  # type: ignore[misc]
        def __getitem__(self, idx: tuple[slice, slice]) -> Any:
            queries, keys = (part.indices(length) for part in idx)
            nearest, furthest = queries[0] - (keys[1] - 1), queries[1] - 1 - keys[0]  # tokens a key is before a query
            hidden, visible = furthest < 0 or nearest > reach, nearest >= 0 and furthest <= reach
            if not hidden and not visible:
                return super().__getitem__(idx)
            return _uniform((queries[1] - queries[0], keys[1] - keys[0]), visible)

    mask.__class__ = Banded
    return mask


@lru_cache(maxsize=8)
def _uniform(shape: tuple[int, int], value: bool) -> Any:
    block = np.full(shape, value)
    block.setflags(write=False)
    return block
