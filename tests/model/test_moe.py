"""The mixture of experts against a loop over tokens and experts."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny_graphs
from affinage.errors import UserError
from affinage.model import Call, abstract_params, apply, logical_axes, parse
from affinage.model.kind import Context
from affinage.parallel import MeshLayout
from affinage.parallel.mesh import make_mesh
from affinage.parallel.sharding import batch_sharding, param_shardings

KEY = jax.random.key(0)


def tokens_of(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, tiny_graphs.VOCABULARY, shape), jnp.int32)


def slow(moe, params, x, capacity):
    """Token after token, expert after expert: answers, and which choices found room."""

    def expert(kernels, index, token):
        gate, up, down = (np.asarray(kernels[name]["kernel"], np.float64) for name in ("gate", "up", "down"))
        if index is not None:
            gate, up, down = gate[index], up[index], down[index]
        hidden = token @ gate
        return (hidden / (1 + np.exp(-hidden)) * (token @ up)) @ down

    y, taken = np.zeros(x.shape), np.zeros((*x.shape[:2], moe.top_k), bool)
    for row in range(x.shape[0]):
        room = [capacity] * moe.experts
        for at, token in enumerate(np.asarray(x[row], np.float64)):
            logits = token @ np.asarray(params["router"]["kernel"], np.float64)
            probabilities = np.exp(logits) / np.exp(logits).sum()
            chosen = np.argsort(-probabilities)[: moe.top_k]
            scale = probabilities[chosen].sum() if moe.normalise_gates else 1.0
            for k, index in enumerate(chosen):
                if room[index] > 0:
                    room[index] -= 1
                    taken[row, at, k] = True
                    y[row, at] += probabilities[index] / scale * expert(params, index, token)
            if moe.shared_experts:
                y[row, at] += expert(params["shared"], None, token)
    return y, taken


def block_of(**ffn):
    graph = parse(tiny_graphs.moe(layers=1, **ffn))
    params = jax.tree.map(lambda leaf: leaf[0], tiny_graphs.random_params(graph, std=0.3)["blocks"]["ffn"])
    return graph["blocks"].kind.ffn, params


def apply_alone(moe, params, x, platform="cpu", batch=None):
    return moe.apply(params, x, Context(Call(platform=platform), batch or {}, key=KEY))


@settings(max_examples=10)
@given(
    experts=st.integers(2, 5),
    top_k=st.integers(1, 2),
    capacity_factor=st.sampled_from([None, 0.4, 1.0, 2.5]),
    shared=st.integers(0, 2),
    normalise=st.booleans(),
    rows=st.integers(1, 3),
    platform=st.sampled_from(["cpu", "tpu"]),
    seed=st.integers(0, 99),
)
def test_it_is_the_loop_over_tokens_and_experts(
    experts, top_k, capacity_factor, shared, normalise, rows, platform, seed
):
    moe, params = block_of(
        experts=experts,
        top_k=top_k,
        capacity_factor=capacity_factor,
        shared_experts=shared,
        normalise_gates=normalise,
    )
    x = jnp.asarray(np.random.default_rng(seed).normal(size=(rows, 7, 32)), jnp.float32)
    result = apply_alone(moe, params, x, platform)
    capacity = 7 if capacity_factor is None else min(7, math.ceil(capacity_factor * top_k * 7 / experts))
    expected, taken = slow(moe, params, x, capacity)
    np.testing.assert_allclose(result.value, expected, atol=1e-4)
    dropped, choices = result.metrics["dropped_share"]
    assert (float(dropped), float(choices)) == ((~taken).sum(), taken.size)


@pytest.mark.parametrize("over", ["row", "batch"])
def test_losses_are_those_of_the_papers(over):
    moe, params = block_of(balance_over=over, load_balance_weight=0.5, z_loss_weight=0.25)
    x = jnp.asarray(np.random.default_rng(3).normal(size=(3, 9, 32)), jnp.float32)
    result = apply_alone(moe, params, x)
    logits = np.asarray(x, np.float64) @ np.asarray(params["router"]["kernel"], np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    groups = probabilities if over == "row" else probabilities.reshape(1, 27, 4)
    balances = []
    for group in groups:
        chosen = np.argsort(-group)[:, :2]
        shares = np.bincount(chosen.reshape(-1), minlength=4) / chosen.size
        balances.append(4 * np.sum(shares * group.mean(0)))
    assert np.divide(*result.losses["load_balance"]) == pytest.approx(0.5 * np.mean(balances), rel=1e-5)
    z = np.mean(np.log(np.exp(logits).sum(-1)) ** 2)
    assert np.divide(*result.losses["router_z"]) == pytest.approx(0.25 * z, rel=1e-5)
    fullest, count = result.metrics["expert_load_max"]
    shares = np.bincount(np.argsort(-probabilities)[..., :2].reshape(-1), minlength=4) / (27 * 2)
    assert float(fullest / count) == pytest.approx(4 * shares.max(), rel=1e-5)


def test_even_routing_has_a_balance_of_one():
    moe, params = block_of()
    params["router"]["kernel"] = jnp.zeros_like(params["router"]["kernel"])
    x = jnp.ones((1, 8, 32))
    balance, count = apply_alone(moe, params, x).metrics["load_balance"]
    assert float(balance / count) == pytest.approx(1.0)


@partial(jax.jit, static_argnums=(0, 3))
def objective(graph, params, batch, platform="cpu"):
    outputs = apply(graph, params, batch, Call(key=KEY, platform=platform))
    return outputs.values[graph.loss].sum, outputs.metrics, outputs.values["blocks"]


@pytest.mark.parametrize("capacity_factor", [None, 0.8])
def test_gradients_are_the_same_scanned_unrolled_and_on_every_platform(capacity_factor):
    graphs = [
        parse(tiny_graphs.moe(capacity_factor=capacity_factor, shared_experts=1, scan=scan)) for scan in (True, False)
    ]
    params, batch = tiny_graphs.random_params(graphs[0]), {"tokens": tokens_of(2, 11)}

    @partial(jax.jit, static_argnums=(1, 2))
    def gradient(params, graph, platform):
        return jax.grad(lambda p: objective(graph, p, batch, platform)[0])(params)

    first, *others = (gradient(params, graph, platform) for graph in graphs for platform in ("cpu", "tpu"))
    for other in others:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), first, other)
    assert float(jnp.abs(first["blocks"]["ffn"]["router"]["kernel"]).max()) > 1e-3


def test_micro_batches_add_up_to_the_batch():
    graph = parse(tiny_graphs.moe(capacity_factor=0.8, load_balance_weight=1.0))
    params, tokens = tiny_graphs.random_params(graph), tokens_of(4, 12)
    mask = jnp.asarray(np.random.default_rng(1).integers(0, 2, (4, 12)), jnp.float32)
    whole, metrics, _ = objective(graph, params, {"tokens": tokens, "loss_mask": mask})
    parts = [objective(graph, params, {"tokens": tokens[i : i + 2], "loss_mask": mask[i : i + 2]}) for i in (0, 2)]
    z = sum(part[1]["router_z"][0] for part in parts)
    assert float(whole) == pytest.approx(float(sum(part[0] for part in parts)), rel=1e-5)
    assert float(metrics["router_z"][0]) == pytest.approx(float(z), rel=1e-5)
    dropped = sum(part[1]["dropped_share"][0] for part in parts)
    assert float(metrics["dropped_share"][0]) == float(dropped) > 0


def test_later_tokens_and_padding_change_nothing_before_them():
    graph = parse(tiny_graphs.moe(capacity_factor=0.7))
    params, tokens = tiny_graphs.random_params(graph), tokens_of(2, 16)
    changed = tokens.at[:, 10:].set(0)
    ours, other = (objective(graph, params, {"tokens": t})[2] for t in (tokens, changed))
    np.testing.assert_array_equal(ours[:, :10], other[:, :10])


def test_only_training_drops():
    dropless, tight = (parse(tiny_graphs.moe(capacity_factor=factor)) for factor in (None, 0.5))
    params, batch = tiny_graphs.random_params(dropless), {"tokens": tokens_of(2, 16)}
    values = [apply(graph, params, batch, Call()).values["blocks"] for graph in (dropless, tight)]
    np.testing.assert_array_equal(*values)
    trained = objective(tight, params, batch)[2]
    assert np.abs(np.asarray(trained - values[0])).max() > 1e-3


@pytest.mark.parametrize("sizes", [{"fsdp": 2, "expert": 4}, {"tensor": 2, "fsdp": 4}])
@pytest.mark.parametrize("capacity_factor", [None, 0.8])
def test_a_mesh_changes_nothing(sizes, capacity_factor):
    graph = parse(tiny_graphs.moe(capacity_factor=capacity_factor, layers=1))
    params, batch = tiny_graphs.random_params(graph), {"tokens": tokens_of(8, 12)}

    def value(params, batch, call):
        outputs = apply(graph, params, batch, call)
        return outputs.values[graph.loss].sum, outputs.metrics

    expected = jax.jit(jax.value_and_grad(partial(value, call=Call(key=KEY, platform="tpu")), has_aux=True))(
        params, batch
    )
    mesh = make_mesh(sizes, jax.devices())
    shardings = param_shardings(
        mesh,
        logical_axes(graph) | {"embed": {"embedding": (None, "embed")}, "logits": {"kernel": (None, "embed")}},
        abstract_params(graph),
    )
    spread = jax.device_put(params, shardings), jax.device_put(batch, batch_sharding(mesh))
    if "expert" in sizes:
        up = shardings["blocks"]["ffn"]["up"]["kernel"]
        assert up.spec[1] == "expert"
    call = Call(key=KEY, platform="tpu", layout=MeshLayout(mesh))
    found = jax.jit(jax.value_and_grad(partial(value, call=call), has_aux=True))(*spread)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-4), found, expected)


@pytest.mark.parametrize(
    ("ffn", "message"),
    [
        ({"top_k": 5}, "more than the 4 experts"),
        ({"capacity": 1.0}, "Did you mean `model.nodes.blocks.ffn.capacity_factor`"),
        ({"activation": "swiglo"}, "Did you mean `swiglu`"),
    ],
)
def test_mistakes_are_told(ffn, message):
    with pytest.raises(UserError, match=message):
        parse(tiny_graphs.moe(**ffn))
