"""The loss's own gradients against autodiff of the formula, whole and in parts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny_graphs
from affinage.model import ApplyConfig, apply, parse
from affinage.model.apply_config import Layout
from affinage.model.layers.losses import Objective, chunked_cross_entropy, cross_entropy, next_tokens
from affinage.model.products import multiply_out


def plain(logits, targets, weights, objective):
    """The formulas as papers write them."""
    log_p = jax.nn.log_softmax(logits)
    log_z = jax.scipy.special.logsumexp(logits, axis=-1)
    share = objective.label_smoothing
    wanted = (1 - share) * jax.nn.one_hot(targets, logits.shape[-1]) + share / logits.shape[-1]
    losses = -jnp.sum(wanted * log_p, axis=-1) + objective.z_loss * log_z**2
    return jnp.sum(losses * weights)


def example(seed, batch, length, width=8, vocabulary=11):
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(batch, length, width)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(vocabulary, width)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, vocabulary, (batch, length)), jnp.int32)
    weights = jnp.asarray(rng.integers(0, 3, (batch, length)), jnp.float32)
    return hidden, kernel, targets, weights


CASES = [(2, None, Objective()), (5, 3.0, Objective(z_loss=0.01)), (3, None, Objective(0.1, 0.2))]


def differentiated(function):
    """The value that training sees, the one without a gradient, and the gradients, compiled."""

    def scaled(*arrays, **static):
        return 1.5 * function(*arrays, **static)

    @partial(jax.jit, static_argnames=("chunk", "softcap", "objective"))
    def run(*arrays, **static):
        return scaled(*arrays, **static), *jax.value_and_grad(scaled, (0, 1))(*arrays, **static)

    return run


@differentiated
def formula(hidden, kernel, targets, weights, *, chunk, softcap, objective):
    return plain(multiply_out(hidden, kernel, softcap), targets, weights, objective)


@differentiated
def whole(hidden, kernel, targets, weights, *, chunk, softcap, objective):
    return cross_entropy(multiply_out(hidden, kernel, softcap), targets, weights, objective).objective


@differentiated
def in_parts(hidden, kernel, targets, weights, *, chunk, softcap, objective):
    objective = objective._replace(softcap=softcap, vocabulary=len(kernel))
    kernel = jnp.pad(kernel, ((0, 5), (0, 0)))  # as on accelerators, up to a multiple of 128
    return chunked_cross_entropy(hidden, kernel, targets, weights, objective, chunk, Layout()).objective


@pytest.mark.parametrize(("chunk", "softcap", "objective"), CASES, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_whole_and_in_parts_are_the_formula_and_so_are_their_gradients(seed, chunk, softcap, objective):
    arrays = example(seed, 2, 5)
    expected = formula(*arrays, chunk=chunk, softcap=softcap, objective=objective)
    for function in (whole, in_parts):
        found = function(*arrays, chunk=chunk, softcap=softcap, objective=objective)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-5), found, expected)


def test_extreme_logits_stay_finite():
    logits = jnp.asarray([[[1e4, -1e4, 0.0]]])
    sums, gradient = jax.value_and_grad(lambda x: cross_entropy(x, jnp.array([[1]]), jnp.ones((1, 1)), Objective())[0])(
        logits
    )
    assert float(sums) == 2e4
    np.testing.assert_allclose(gradient[0, 0], [1.0, -1.0, 0.0])


def test_targets_stop_at_the_end_of_a_document_and_of_the_row():
    tokens = jnp.arange(6)[None]
    targets, weights = next_tokens(tokens, {"segment_ids": jnp.array([[1, 1, 2, 2, 2, 3]])})
    np.testing.assert_array_equal(targets[0, :5], [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(weights[0], [1, 0, 1, 1, 0, 0])


@partial(jax.jit, static_argnums=0)
def applied(graph, params, batch):
    outputs = apply(graph, params, batch, ApplyConfig())
    return outputs.values[graph.loss], outputs.metrics


def test_the_node_gives_the_same_in_parts_and_reports_the_plain_cross_entropy():
    models = [tiny_graphs.llama(layers=1) for _ in range(3)]
    settings = {"z_loss": 1e-3, "label_smoothing": 0.1}
    for model, given in zip(models, ({}, settings, settings | {"chunk": 10}), strict=True):
        model["nodes"]["loss"] |= given
    batch = {"tokens": jnp.asarray(np.random.default_rng(1).integers(0, 97, (2, 13)), jnp.int32)}
    params = tiny_graphs.random_params(parse(models[0]))
    (plain, _), (once, metrics), (parts, others) = (applied(parse(model), params, batch) for model in models)
    np.testing.assert_allclose(once.sum, parts.sum, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), metrics, others)
    nats, count = metrics["cross_entropy"]
    assert float(nats) == pytest.approx(float(plain.sum)) != pytest.approx(float(once.sum))
    assert float(count) == 24
