"""What is written in a form of its own for XLA:CPU computes the same as the obvious form, gradients included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from affinage.model.kinds.rotary import RopeSettings, rotary_tables, rotate
from affinage.model.product import product


@pytest.mark.parametrize("inputs, outputs", [(3, 8), (8, 3), (5, 5)])
def test_a_product_and_its_gradients(inputs, outputs):
    keys = jax.random.split(jax.random.key(0), 3)
    x, kernel = jax.random.normal(keys[0], (7, inputs)), jax.random.normal(keys[1], (inputs, outputs))
    weights = jax.random.normal(keys[2], (7, outputs))

    def loss(multiply):
        return lambda x, kernel: jnp.sum(jnp.sin(multiply(x, kernel)) * weights)

    ours, plain = (jax.value_and_grad(loss(f), argnums=(0, 1))(x, kernel) for f in (product, jnp.dot))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, plain)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("stored", [False, True])
def test_a_rotation_is_a_complex_product_and_its_gradient_that_of_autodiff(fraction, stored):
    settings = RopeSettings(theta=100.0, fraction=fraction)
    x = jax.random.normal(jax.random.key(0), (2, 3, 5, 8))
    weights = jax.random.normal(jax.random.key(1), x.shape)
    positions = jnp.array([[0, 1, 2, 3, 4], [3, 0, 1, 2, 9]])

    def by_complex_numbers(x):
        half = int(8 * fraction) // 2
        angles = jnp.einsum("bs,d->bsd", positions, 100.0 ** (-jnp.arange(half) / half))[:, None]
        turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * jnp.exp(1j * angles)
        return jnp.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)

    def ours(x):
        return rotate(x, rotary_tables(settings, positions, 8, stored=stored))

    def loss(turn):
        return lambda x: jnp.sum(jnp.tanh(turn(x)) * weights)

    np.testing.assert_allclose(ours(x), by_complex_numbers(x), rtol=1e-5, atol=1e-6)
    gradients = (jax.grad(loss(turn))(x) for turn in (ours, by_complex_numbers))
    np.testing.assert_allclose(*gradients, rtol=1e-5, atol=1e-6)
