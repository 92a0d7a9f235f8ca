"""The mixture of experts against a loop over tokens and experts."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny_graphs
from affinage.model import ApplyConfig, apply, parse
from affinage.model.layer import LayerContext

KEY = jax.random.key(0)


def slow(moe, params, x, capacity):
    """Token after token, expert after expert: answers, and which choices found room."""

    def expert(kernels, index, token):
        gate, up, down = (np.asarray(kernels[name]["kernel"], np.float64) for name in ("gate", "up", "down"))
        hidden = token @ gate[index]
        return (hidden / (1 + np.exp(-hidden)) * (token @ up[index])) @ down[index]

    y, taken = np.zeros(x.shape), np.zeros((*x.shape[:2], moe.top_k), bool)
    for row in range(x.shape[0]):
        room = [capacity] * moe.experts
        for at, token in enumerate(np.asarray(x[row], np.float64)):
            logits = token @ np.asarray(params["router"]["kernel"], np.float64)
            probabilities = np.exp(logits) / np.exp(logits).sum()
            chosen = np.argsort(-probabilities)[: moe.top_k]
            scale = probabilities[chosen].sum() if moe.top_k > 1 else 1.0
            for k, index in enumerate(chosen):
                if room[index] > 0:
                    room[index] -= 1
                    taken[row, at, k] = True
                    y[row, at] += probabilities[index] / scale * expert(params, index, token)
    return y, taken


def block_of(**ffn):
    graph = parse(tiny_graphs.moe(layers=1, **ffn))
    params = jax.tree.map(lambda leaf: leaf[0], tiny_graphs.random_params(graph, std=0.3)["blocks"]["ffn"])
    return graph["blocks"].layer.ffn, params


@partial(jax.jit, static_argnums=(0, 3))
def apply_alone(moe, params, x, platform, key=KEY):
    result = moe.apply(params, x, LayerContext(ApplyConfig(platform=platform), {}, key=key))
    return result.value, result.losses, result.metrics


@pytest.mark.parametrize(("platform", "ffn", "key"), [
    ("cpu", {}, KEY),
    ("tpu", {}, KEY),
    ("tpu", {"experts": 5, "top_k": 1, "capacity_factor": 0.4}, KEY),
    ("cpu", {"experts": 3, "capacity_factor": 1.0}, KEY),
    ("cpu", {"capacity_factor": 0.5}, None),  # only training drops
    pytest.param("cpu", {"experts": 2, "capacity_factor": 2.5}, KEY, marks=pytest.mark.full),
], ids=str)  # fmt: skip
def test_it_is_the_loop_over_tokens_and_experts(platform, ffn, key):
    moe, params = block_of(**ffn)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 7, 32)), jnp.float32)
    value, _, metrics = apply_alone(moe, params, x, platform, key)
    factor = math.inf if moe.capacity_factor is None or key is None else moe.capacity_factor
    expected, taken = slow(moe, params, x, math.ceil(min(7, factor * moe.top_k * 7 / moe.experts)))
    np.testing.assert_allclose(value, expected, atol=1e-4)
    dropped, choices = metrics["dropped_share"]
    assert (float(dropped), float(choices)) == ((~taken).sum(), taken.size)


def test_losses_are_those_of_the_papers():
    moe, params = block_of(load_balance_weight=0.5, z_loss_weight=0.25)
    x = jnp.asarray(np.random.default_rng(3).normal(size=(3, 9, 32)), jnp.float32)
    _, losses, metrics = apply_alone(moe, params, x, "cpu")
    logits = np.asarray(x, np.float64) @ np.asarray(params["router"]["kernel"], np.float64)
    probabilities, balances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True), []
    for group in probabilities:
        chosen = np.argsort(-group)[:, :2]
        shares = np.bincount(chosen.reshape(-1), minlength=4) / chosen.size
        balances.append(4 * np.sum(shares * group.mean(0)))
    assert np.divide(*losses["load_balance"]) == pytest.approx(0.5 * np.mean(balances), rel=1e-5)
    z = np.mean(np.log(np.exp(logits).sum(-1)) ** 2)
    assert np.divide(*losses["router_z"]) == pytest.approx(0.25 * z, rel=1e-5)
    fullest, count = metrics["expert_load_max"]
    shares = np.bincount(np.argsort(-probabilities)[..., :2].reshape(-1), minlength=4) / (27 * 2)
    assert float(fullest / count) == pytest.approx(4 * shares.max(), rel=1e-5)


def test_micro_batches_add_up_and_later_tokens_change_nothing_before_them():
    graph = parse(tiny_graphs.moe(layers=1, capacity_factor=0.8, load_balance_weight=1.0))
    random, params = np.random.default_rng(1), tiny_graphs.random_params(graph)
    tokens = jnp.asarray(random.integers(0, tiny_graphs.VOCABULARY, (4, 12)), jnp.int32)
    mask = jnp.asarray(random.integers(0, 2, (4, 12)), jnp.float32)

    @jax.jit
    def objective(tokens, mask):
        outputs = apply(graph, params, {"tokens": tokens, "loss_mask": mask}, ApplyConfig(key=KEY))
        return outputs.values[graph.loss].sum, outputs.metrics, outputs.values["blocks"]

    whole, metrics, values = objective(tokens, mask)
    parts = [objective(tokens[i : i + 2], mask[i : i + 2]) for i in (0, 2)]
    assert float(whole) == pytest.approx(float(sum(part[0] for part in parts)), rel=1e-5)
    dropped = float(metrics["dropped_share"][0])
    assert 0 < dropped == pytest.approx(float(sum(part[1]["dropped_share"][0] for part in parts)), rel=1e-5)
    np.testing.assert_array_equal(values[:, :8], objective(tokens.at[:, 8:].set(0), mask)[2][:, :8])
