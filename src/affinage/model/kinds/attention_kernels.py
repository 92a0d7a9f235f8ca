"""Attention by kernels that never hold the scores of a whole row: Splash on TPUs, cuDNN on GPUs. JAX ships both."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

LANES = 128  # Splash's smallest block: rows are filled up to a multiple of it
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
    heads, length = query.shape[1:3]
    whole = -(-length // LANES) * LANES
    fill = ((0, 0), (0, 0), (0, whole - length), (0, 0))
    query, key, value = (jnp.pad(array, fill) for array in (query, key, value))
    ids = None if segments is None else (jnp.pad(segments, ((0, 0), (0, whole - length))),) * 2
    kernel = splash_kernel(heads, whole, window=window, softcap=softcap, interpret=interpret)
    return by_splash(kernel, query, key, value, ids)[:, :, :length]


def splash_kernel(
    heads: int,
    length: int,
    *,
    window: int | None,
    softcap: float | None,
    head_shards: int = 1,
    sequence_shards: int = 1,
    kept: str | None = None,
    interpret: bool = False,
) -> Any:
    """Splash for rows of `length` tokens, a pytree of arrays that tell it which blocks to look at.

    Of a row whose heads and queries lie on several devices each has its part of these arrays (`splash_axes`), and
    `length` is a multiple of `LANES` times `sequence_shards`. What the backward pass needs of the kernel's results, the
    log-sum-exp of the scores with them, is called `kept` for a policy of `jax.checkpoint`.
    """
    # Pallas for TPUs takes a second to import.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    from affinage.model.kinds.attention_masks import causal_mask

    size = next(size for size in _BLOCKS if length // sequence_shards % size == 0)
    return splash.make_splash_mha(
        splash.MultiHeadMask([causal_mask(length, window)] * heads),
        block_sizes=splash.BlockSizes(size, size, size, size, size, size, size, size),
        attn_logits_soft_cap=softcap,
        head_shards=head_shards,
        q_seq_shards=sequence_shards,
        residual_checkpoint_name=kept,
        interpret=interpret,
    )


def splash_axes(kernel: Any) -> Any:
    """The logical axes of a kernel's arrays, in a tree like itself."""
    known = {"q_sequence": ("sequence",), "partial_mask_blocks": (None, None, None)}
    return jax.tree_util.tree_map_with_path(
        lambda path, _: known.get(path[-1].name, ("heads", "sequence", None)), kernel
    )


def queries_are_split(name: str, platform: str, length: int, parts: int) -> bool:
    """Whether, of rows that lie on several devices, each computes its own queries; if not, each computes whole rows."""
    return name == "splash" and platform == "tpu" and parts > 1 and length % (parts * LANES) == 0


def by_splash(
    kernel: Any,
    query: Float[Array, "B H S D"],
    key: Float[Array, "B K T D"],
    value: Float[Array, "B K T D"],
    segments: tuple[Int[Array, "B S"], Int[Array, "B T"]] | None,
) -> Float[Array, "B H S D"]:
    """What a kernel makes of a device's queries and all keys of their rows; `segments` of both."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    scaled = (query.astype(jnp.float32) * query.shape[-1] ** -0.5).astype(query.dtype)
    told = () if segments is None else (splash.SegmentIds(*segments),)
    of_a_row = jax.vmap(kernel)(scaled, key, value, *told)
    return of_a_row.astype(value.dtype)


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
