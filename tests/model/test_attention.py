"""Attention's own gradient against autodiff of the plain formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from affinage.model import Call
from affinage.model.kind import Context
from affinage.model.kinds.attention_products import attention, plain_attention

SEGMENTS = jnp.array([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize(("documents", "tolerance"), [(1, 2e-5), (29, 2e-5), (86, 5e-5)], ids=["7", "203", "602"])
@pytest.mark.parametrize("in_blocks", [False, True])
def test_the_gradient_by_hand_is_autodiffs(documents, tolerance, in_blocks):
    segments = jnp.repeat(SEGMENTS, documents, axis=1)
    length = segments.shape[1]
    keys = jax.random.split(jax.random.key(0), 4)
    query = 2 * jax.random.normal(keys[0], (2, 2, 3, length, 4))  # B K G S D
    key, value = (2 * jax.random.normal(k, (2, 2, length, 4)) for k in keys[1:3])
    weights = jax.random.normal(keys[3], query.shape)
    mask = jnp.tril(jnp.ones((1, length, length), bool)) & (segments[:, :, None] == segments[:, None, :])
    context = Context(Call(), {})

    def by_hand(*arrays):
        return jnp.sum(weights * attention(*arrays, mask, in_blocks))

    def plain(*arrays):
        return jnp.sum(weights * plain_attention(*arrays, mask, context, dropout=0.0, softcap=None))

    found = jax.jit(jax.value_and_grad(by_hand, (0, 1, 2)))(query, key, value)
    expected = jax.jit(jax.value_and_grad(plain, (0, 1, 2)))(query, key, value)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance), found, expected)
