"""What the example of BYOL learns without labels."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny_graphs
from affinage.model import ApplyConfig, apply, parse
from affinage.model.graph import analyze

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "byol"))

import byol

from run_affinage import refused

NODES = {
    "views": {"kind": "augment", "in": "images", "shift": 1, "rotate": 10, "noise": 0.1, "erase": 0.3},
    "encoder": {"kind": "encoder", "in": "views", "net": "conv", "hidden": [4], "width": 16},
    "projector": {"kind": "projector", "in": "encoder", "hidden": 16, "width": 8},
    "predictor": {"kind": "predictor", "in": "projector", "hidden": 16, "width": 8},
    "target": {"kind": "ema_copy", "in": "views", "of": ["encoder", "projector"]},
    "loss": {"kind": "cosine_regression_loss", "in": ["predictor", "target"]},
}
GRAPH = parse({"inputs": {"images": [8, 8, 1]}, "nodes": NODES})
PARAMS = tiny_graphs.random_params(GRAPH)
AVERAGE = jax.tree.map(lambda p: p + 0.1, PARAMS)
BATCH = {"images": np.float32(np.random.default_rng(0).random((4, 8, 8, 1))), "rows": np.arange(4, dtype=np.int32)}


@jax.jit
def values_of(params, average, batch=BATCH):
    return apply(GRAPH, params, batch, ApplyConfig(key=jax.random.key(7), ema_params=average)).values


def test_views_depend_on_key_and_row_alone_and_the_loss_compares_them_both_ways():
    values = values_of(PARAMS, AVERAGE)
    part = values_of(PARAMS, AVERAGE, {name: array[2:] for name, array in BATCH.items()})
    np.testing.assert_allclose(part["views"], values["views"][2:], rtol=1e-6, atol=1e-6)
    assert not np.allclose(values["views"][:, 0], values["views"][:, 1])
    total = 0.0
    for example in range(4):
        for view, other in ((0, 1), (1, 0)):
            p = np.asarray(values["predictor"][example, view], np.float64)
            z = np.asarray(values["target"][example, other], np.float64)
            total += 2 - 2 * np.dot(p, z) / np.linalg.norm(p) / np.linalg.norm(z)
    assert float(values["loss"].count) == 4 and float(values["loss"].sum) == pytest.approx(total, rel=1e-5)


def test_the_target_has_no_gradient_and_no_operations_of_a_backward_pass():
    gradient = jax.grad(lambda params: values_of(params, AVERAGE)["loss"].sum)(PARAMS)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradient["encoder"]["conv_0"]["kernel"]))
    apart = jax.grad(lambda params: values_of(PARAMS, params)["loss"].sum)(AVERAGE)
    assert set(apart) == set(PARAMS) and np.isfinite(sum(jnp.sum(leaf) for leaf in jax.tree.leaves(apart)))
    (target,) = (row for row in analyze(GRAPH, 4, 1) if row["name"] == "target")
    assert target["flops"] > 0 and target["training_flops"] == target["flops"]


@pytest.mark.parametrize("inputs", [{"images": 8}, {"tokens": [4]}], ids=str)
def test_inputs_without_the_size_of_one_row_are_refused(inputs):
    refused(parse, {"inputs": inputs, "nodes": NODES}, match="size of one row")


@pytest.mark.full
def test_its_features_of_digits_are_better_than_those_untrained(tmp_path):
    for labels, scores in byol.run(tmp_path, steps=900, draws=5).items():  # rounding moves three digits of all
        assert scores["trained"] > max(scores["untrained"], scores["pixels"]) + (0 if labels == "all" else 0.01)
