"""From float32 values back to the dtype that weights are stored in."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float32, PRNGKeyArray

PyTree = Any


def stored_like(old: PyTree, new: PyTree, key: PRNGKeyArray | None) -> PyTree:
    """`new` in the dtypes of `old`; what becomes bfloat16 is rounded stochastically if there is a key.

    Args:
        old: tree of arrays, for their dtypes.
        new: the same tree in float32.
        key: of this step; each array has draws of its own. None: to the nearest, ties to even.
    """
    leaves, structure = jax.tree.flatten(old)
    rounded = []
    for index, (before, after) in enumerate(zip(leaves, jax.tree.leaves(new), strict=True)):
        if key is not None and before.dtype == jnp.bfloat16:
            rounded.append(stochastic_bfloat16(after, jax.random.fold_in(key, index)))
        else:
            rounded.append(after.astype(before.dtype))
    return jax.tree.unflatten(structure, rounded)


def stochastic_bfloat16(x: Float32[Array, "..."], key: PRNGKeyArray) -> BFloat16[Array, "..."]:
    """One of the two bfloat16 neighbours of each value, each as probable as the value is near to it.

    The expectation is the value itself, so that updates under half a unit in the last place are not lost. bfloat16 is
    the upper half of a float32: a uniform 16-bit integer is added to the lower half, which is then cut off. What is not
    finite stays as it is.
    """
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise
    upper = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), upper, x.astype(jnp.bfloat16))
