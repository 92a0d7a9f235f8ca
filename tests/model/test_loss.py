"""The loss's own gradients against autodiff of the formula, whole and in parts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny_graphs
from affinage.model import ApplyConfig, apply, parse
from affinage.model.layers.losses import cross_entropy, next_tokens


def example(vocabulary=97):
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(2, 5, vocabulary)) * 3, jnp.float32)
    targets = jnp.asarray(rng.integers(0, vocabulary, (2, 5)), jnp.int32)
    return logits, targets, jnp.asarray(rng.integers(0, 3, (2, 5)), jnp.float32)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_gradient_is_that_of_the_formula(on_cpu):
    logits, targets, weights = example()

    def formula(logits):
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
        return -1.5 * jnp.sum(log_p * weights)

    def ours(logits):
        return 1.5 * cross_entropy(logits, targets, weights, on_cpu).cross_entropy

    expected, found = (jax.jit(jax.value_and_grad(function))(logits) for function in (formula, ours))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-5), found, expected)


def test_extreme_logits_stay_finite():
    logits = jnp.asarray([[[1e4, -1e4, 0.0]]])
    nats, gradient = jax.value_and_grad(lambda x: cross_entropy(x, jnp.array([[1]]), jnp.ones((1, 1)))[0])(logits)
    assert float(nats) == 2e4
    np.testing.assert_allclose(gradient[0, 0], [1.0, -1.0, 0.0])


def test_targets_stop_at_the_end_of_a_document_and_of_the_row():
    tokens = jnp.arange(6)[None]
    targets, weights = next_tokens(tokens, {"segment_ids": jnp.array([[1, 1, 2, 2, 2, 3]])})
    np.testing.assert_array_equal(targets[0, :5], [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(weights[0], [1, 0, 1, 1, 0, 0])


@partial(jax.jit, static_argnums=(0, 3))
def applied(graph, params, batch, platform):
    def loss(params):
        outputs = apply(graph, params, batch, ApplyConfig(platform=platform))
        return outputs.values[graph.loss].sum, outputs.metrics

    return jax.value_and_grad(loss, has_aux=True)(params)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_in_parts_it_is_the_same_with_the_same_gradients(platform):
    """Also where the vocabulary is padded, as on accelerators."""
    whole, parts = (tiny_graphs.llama(layers=1) for _ in range(2))
    parts["nodes"]["loss"]["chunk"] = 10
    batch = {"tokens": jnp.asarray(np.random.default_rng(1).integers(0, 97, (2, 13)), jnp.int32)}
    params = tiny_graphs.random_params(parse(whole))
    expected = applied(parse(whole), params, batch, "cpu")
    found = applied(parse(parts), params, batch, platform)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)
    assert float(found[0][1]["accuracy"][1]) == 24
