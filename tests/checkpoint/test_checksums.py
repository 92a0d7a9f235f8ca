"""Checksums of arrays: the same on any mesh, and another one for any changed element."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from affinage.checkpoint.metadata import checksums

DTYPES = ["float32", "bfloat16", "int32", "int8", "bool", "float8_e4m3fn"]


def checksum(array: np.ndarray | jax.Array) -> str:
    return checksums({"tree": {"x": jnp.asarray(array)}})["tree.x"][2]


@given(dtype=st.sampled_from(DTYPES), shape=st.sampled_from([(1,), (16,), (8, 6), (2, 3, 4)]), data=st.data())
def test_any_one_changed_element_changes_the_checksum(dtype: str, shape: tuple[int, ...], data: st.DataObject):
    array = np.asarray(jnp.asarray(np.random.default_rng(0).integers(0, 2, shape), dtype))
    changed = array.copy()
    bits = changed.view(np.uint8).reshape(-1)
    at = data.draw(st.integers(0, bits.size - 1))
    bits[at] ^= 1 if dtype == "bool" else 1 << data.draw(st.integers(0, 7))
    assert checksum(changed) != checksum(array) == checksum(array.copy())


@pytest.mark.parametrize(
    "spec", [PartitionSpec(), PartitionSpec("a"), PartitionSpec("b", "a"), PartitionSpec(("a", "b"))]
)
def test_the_checksum_is_the_same_on_any_mesh(spec: PartitionSpec):
    array = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    assert checksum(jax.device_put(array, NamedSharding(mesh, spec))) == checksum(array)
