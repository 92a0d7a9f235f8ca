"""Checksums of arrays, computed on the devices that hold them.

A checksum is the wrapping sum, over all elements, of a hash of the element's bits and its index. The hash is a
bijection of the bits for a fixed index, so any one changed element changes the sum; two changes cancel each other out
with a probability of 2^-32. A sum has no order, so an array has the same checksum on any mesh.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

PyTree = Any
Checksums = dict[str, list[Any]]  # path of an array -> [dtype, shape, checksum as 8 hexadecimal digits]


def checksums(state: Mapping[str, PyTree]) -> Checksums:
    """The checksum of every array of a state, by its path; one program on the devices, started by all processes."""
    leaves = leaves_by_path(state)
    sums = np.asarray(_sums(list(leaves.values()))).tolist() if leaves else []
    return {
        path: [str(leaf.dtype), list(leaf.shape), f"{value:08x}"]
        for (path, leaf), value in zip(leaves.items(), sums, strict=True)
    }


def leaves_by_path(state: Mapping[str, PyTree]) -> dict[str, Any]:
    """The leaves of trees by their dotted paths; a field of a tuple and the same key of a mapping are alike."""
    found = jax.tree_util.tree_leaves_with_path(dict(state))
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in found}


@jax.jit
def _sums(leaves: list[Array]) -> UInt32[Array, " N"]:
    return jnp.stack([_checksum(leaf) for leaf in leaves])


def _checksum(array: Array) -> UInt32[Array, ""]:
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    size = min(array.dtype.itemsize, 4)  # of 8 bytes, two halves
    bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * size}")).astype(jnp.uint32)
    index = jnp.zeros(bits.shape, jnp.uint32)
    for axis in range(bits.ndim):
        stride = math.prod(bits.shape[axis + 1 :]) % 2**32
        index += jnp.uint32(stride) * jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    # The finalizer of MurmurHash3, after the index has been spread over all bits: each line is a bijection of `mixed`.
    mixed = bits ^ (index * jnp.uint32(0x9E3779B1) + jnp.uint32(0x7F4A7C15))
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)
