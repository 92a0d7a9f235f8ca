"""BYOL's nodes: views by row, a target that no gradient reaches, and the loss against plain numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny_graphs
from affinage.errors import UserError
from affinage.model import Call, apply, first_averages, parse

GRAPH = parse(tiny_graphs.byol())
KEY = jax.random.key(7)
IMAGES = np.random.default_rng(0).random((4, 8, 8, 1)).astype(np.float32)
PARAMS = tiny_graphs.random_params(GRAPH)
BATCH = {"images": IMAGES, "rows": np.arange(4, dtype=np.int32)}


@jax.jit
def values_of(params, averages, batch=BATCH, key=KEY):
    return apply(GRAPH, params, batch, Call(key=key, averages=averages)).values


@jax.jit
def views_of(batch, key):
    return apply(GRAPH, {}, batch, Call(key=key, until="views")).values["views"]


@pytest.mark.full
def test_views_depend_on_key_and_row_alone():
    whole, other = views_of(BATCH, KEY), views_of(BATCH, jax.random.key(8))
    np.testing.assert_allclose(
        views_of({name: array[2:] for name, array in BATCH.items()}, KEY), whole[2:], rtol=1e-6, atol=1e-6
    )
    assert not np.any(np.all(np.isclose(whole, other), axis=(2, 3, 4)))
    assert not np.allclose(whole[:, 0], whole[:, 1])
    np.testing.assert_array_equal(views_of(BATCH, None), np.stack([IMAGES] * 2, axis=1))


@pytest.mark.full
def test_no_gradient_reaches_the_target_branch():
    def loss(params, averages):
        return apply(GRAPH, params, BATCH, Call(key=KEY, averages=averages)).values["loss"].sum

    ours, target = jax.jit(jax.grad(loss, argnums=(0, 1)))(PARAMS, first_averages(GRAPH, PARAMS))
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(target))
    assert all(np.any(leaf) for name in GRAPH.parameters for leaf in jax.tree.leaves(ours[name]["dense_0"]["kernel"]))


def test_the_loss_is_twice_one_minus_cosine_over_both_orders():
    averages = first_averages(GRAPH, jax.tree.map(lambda p: p + 0.1, PARAMS))
    values = values_of(PARAMS, averages)
    total = 0.0
    for example in range(4):
        for view, other in ((0, 1), (1, 0)):
            p = np.asarray(values["predictor"][example, view], np.float64)
            z = np.asarray(values["target"][example, other], np.float64)
            total += 2 - 2 * np.dot(p, z) / np.linalg.norm(p) / np.linalg.norm(z)
    assert float(values["loss"].count) == 4
    assert float(values["loss"].sum) == pytest.approx(total, rel=1e-5)
    zero = {**PARAMS, "predictor": jax.tree.map(jnp.zeros_like, PARAMS["predictor"])}
    assert np.isfinite(values_of(zero, averages)["loss"].sum)


@pytest.mark.parametrize(
    ("inputs", "nodes", "named"),
    [
        ({"images": [8, 8, 1]}, {"target": {"kind": "ema_copy", "in": "views", "of": ["encode"]}}, "`encode`"),
        ({"images": [8, 8, 1]}, {"views": {"kind": "augment", "in": "images", "views": 1}}, "two views"),
        ({"images": [8, 8, 1]}, {"target": {"kind": "ema_copy", "in": "views", "of": "loss"}}, "copied"),
        ({"images": 8}, {}, "size of one row"),
        ({"tokens": [4]}, {}, "size of one row"),
    ],
    ids=str,
)
def test_mistakes_are_refused(inputs, nodes, named):
    with pytest.raises(UserError, match=named):
        parse({"inputs": inputs, "nodes": tiny_graphs.byol()["nodes"] | nodes})
