"""BYOL's nodes: views by row, a target that no gradient reaches, and the loss against plain numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny_graphs
from affinage.errors import UserError
from affinage.model import Call, apply, first_averages, init_params, moved_averages, parse

GRAPH = parse(tiny_graphs.byol())
KEY = jax.random.key(7)


def batch(size: int = 4) -> dict[str, np.ndarray]:
    images = np.random.default_rng(0).random((size, 8, 8, 1)).astype(np.float32)
    return {"images": images, "rows": np.arange(size, dtype=np.int32)}


@pytest.fixture(scope="module")
def params():
    return init_params(GRAPH, jax.random.key(0))


def test_the_graph_survives_being_written_down():
    for model in (tiny_graphs.byol(), tiny_graphs.byol(net="conv", hidden=[4])):
        assert parse(parse(model).to_dict()) == parse(model)


def test_views_depend_on_key_and_row_alone():
    whole = batch()
    views = apply(GRAPH, {}, whole, Call(key=KEY, until="views")).values["views"]
    part = {name: array[2:] for name, array in whole.items()}
    np.testing.assert_array_equal(apply(GRAPH, {}, part, Call(key=KEY, until="views")).values["views"], views[2:])
    other = apply(GRAPH, {}, whole, Call(key=jax.random.key(8), until="views")).values["views"]
    assert not np.any(np.all(np.isclose(views, other), axis=(2, 3, 4)))
    assert not np.allclose(views[:, 0], views[:, 1])
    plain = apply(GRAPH, {}, whole, Call(until="views")).values["views"]
    np.testing.assert_array_equal(plain, np.stack([whole["images"]] * 2, axis=1))


def test_no_gradient_reaches_the_target_branch(params):
    averages = first_averages(GRAPH, params)

    def loss(params, averages):
        return apply(GRAPH, params, batch(), Call(key=KEY, averages=averages)).values["loss"].sum

    ours, target = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, averages)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(target))
    assert all(np.any(leaf) for name in GRAPH.parameters for leaf in jax.tree.leaves(ours[name]["dense_0"]["kernel"]))


def test_averages_begin_as_copies_and_follow_the_formula(params):
    averages = first_averages(GRAPH, params)
    assert set(averages["target"]) == {"encoder", "projector"}
    for name, tree in averages["target"].items():
        jax.tree.map(np.testing.assert_array_equal, tree, params[name])
    moved = jax.tree.map(lambda p: p + 1.0, params)
    got = moved_averages(GRAPH, averages, moved)["target"]
    for name, tree in got.items():
        jax.tree.map(
            lambda new, old, p: np.testing.assert_allclose(new, 0.9 * old + 0.1 * p, rtol=1e-6, atol=1e-7),
            tree,
            averages["target"][name],
            moved[name],
        )


def test_the_target_is_computed_from_the_averages(params):
    call = Call(key=KEY, averages=first_averages(GRAPH, params))
    values = apply(GRAPH, params, batch(), call).values
    np.testing.assert_allclose(values["target"], values["projector"], rtol=1e-5, atol=1e-6)
    changed = {**params, "encoder": jax.tree.map(lambda p: p * 1.5 + 0.1, params["encoder"])}
    np.testing.assert_array_equal(apply(GRAPH, changed, batch(), call).values["target"], values["target"])
    with pytest.raises(ValueError, match="moving averages"):
        apply(GRAPH, params, batch(), Call(key=KEY))


def test_the_loss_is_twice_one_minus_cosine_over_both_orders(params):
    call = Call(key=KEY, averages=first_averages(GRAPH, jax.tree.map(lambda p: p + 0.1, params)))
    values = apply(GRAPH, params, batch(), call).values
    total = 0.0
    for example in range(4):
        for view, other in ((0, 1), (1, 0)):
            p = np.asarray(values["predictor"][example, view], np.float64)
            z = np.asarray(values["target"][example, other], np.float64)
            total += 2 - 2 * np.dot(p, z) / np.linalg.norm(p) / np.linalg.norm(z)
    assert float(values["loss"].count) == 4
    assert float(values["loss"].sum) == pytest.approx(total, rel=1e-5)
    zero = {**params, "predictor": jax.tree.map(jnp.zeros_like, params["predictor"])}
    assert np.isfinite(apply(GRAPH, zero, batch(), call).values["loss"].sum)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": {"kind": "ema_copy", "in": "views", "of": ["encode"]}}, "`encode` is not a node"),
        ({"views": {"kind": "augment", "in": "images", "views": 1}}, "at least two views"),
        ({"target": {"kind": "ema_copy", "in": "views", "of": "loss"}}, "cannot be copied"),
    ],
)
def test_mistakes_are_told(change, message):
    model = tiny_graphs.byol()
    with pytest.raises(UserError, match=message):
        parse({**model, "nodes": model["nodes"] | change})


def test_inputs_of_arrays_have_a_size():
    model = tiny_graphs.byol()
    for inputs in ({"images": 8}, {"images": [8, 0, 1]}, {"images": []}, {"tokens": [4]}):
        with pytest.raises(UserError, match="size of one row"):
            parse({**model, "inputs": inputs})
