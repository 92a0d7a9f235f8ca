"""Attention by kernels that never hold the scores of a whole row: Splash on TPUs, cuDNN on GPUs. JAX ships both."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_LANES = 128  # rows are filled up to a multiple of it
_BLOCKS = (512, 256, 128)  # of queries and of keys, the largest that divides a row; 512 is what MaxText trains with


def splash_attention(
    query: Float[Array, "B H S D"],
    key: Float[Array, "B K S D"],
    value: Float[Array, "B K S D"],
    segments: Int[Array, "B S"] | None,
    *,
    window: int | None,
    softcap: float | None,
    interpret: bool = False,
) -> Float[Array, "B H S D"]:
    """Causal attention within segments by JAX's Splash kernel, with its own backward kernels; softmax in float32.

    What is filled up comes after every token, where causality hides it. `interpret` computes what the kernel would, on
    any platform, slowly.
    """
    # Pallas for TPUs takes a second to import.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    from affinage.model.kinds.attention_masks import causal_mask

    heads, length = query.shape[1:3]
    whole = -(-length // _LANES) * _LANES
    fill = ((0, 0), (0, 0), (0, whole - length), (0, 0))
    scaled = (query.astype(jnp.float32) * query.shape[-1] ** -0.5).astype(query.dtype)
    query, key, value = (jnp.pad(array, fill) for array in (scaled, key, value))
    size = next(size for size in _BLOCKS if whole % size == 0)
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([causal_mask(whole, window)] * heads),
        block_sizes=splash.BlockSizes(size, size, size, size, size, size, size, size),
        attn_logits_soft_cap=softcap,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    if segments is None:
        out = jax.vmap(kernel)(query, key, value)
    else:
        ids = jnp.pad(segments, ((0, 0), (0, whole - length)))
        out = jax.vmap(kernel)(query, key, value, splash.SegmentIds(ids, ids))
    return out[:, :, :length].astype(value.dtype)


def cudnn_attention(
    query: Float[Array, "B H S D"],
    key: Float[Array, "B K S D"],
    value: Float[Array, "B K S D"],
    mask: Bool[Array, "B S S"] | None,
    *,
    window: int | None,
) -> Float[Array, "B H S D"]:
    """Causal attention by cuDNN's flash attention.

    `mask` says what segments leave; cuDNN reads it as a bias [B, 1, S, S], one for all heads. Its causal mask alone
    would let packed documents see each other.
    """
    product = partial(
        jax.nn.dot_product_attention,
        mask=None if mask is None else mask[:, None],
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
    out = product(*(jnp.swapaxes(array, 1, 2) for array in (query, key, value)))
    return jnp.swapaxes(out, 1, 2)
