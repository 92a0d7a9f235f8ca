"""Adapters of a mixture's experts: as through merged weights in either way of computing them, and on any mesh."""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

import tiny_graphs
from affinage.errors import UserError
from affinage.model import Adapters, Call, apply, init_params, parse
from affinage.parallel import make_mesh
from affinage.recipe.training import TrainSettings
from affinage.recipe.tuning import LoraSettings, SftSettings
from affinage.training import TrainJob
from affinage.training.program import Program

LORA = {"rank": 3, "alpha": 7, "targets": ("query", "gate", "up", "down")}


@functools.cache
def drawn(capacity: float | None) -> tuple[Adapters, dict, dict]:
    """Adapters with a B that is not zero, beside weights."""
    adapters = Adapters(parse(tiny_graphs.moe(capacity_factor=capacity, layers=1)), LoraSettings(**LORA))
    low = jax.jit(functools.partial(init_params, adapters))(jax.random.key(0))
    draw = np.random.default_rng(7)
    low = jax.tree.map(lambda p: p + draw.normal(0, 0.1, p.shape).astype(np.float32), low)
    return adapters, tiny_graphs.random_params(adapters.graph, seed=1), low


@pytest.mark.parametrize(("platform", "capacity"), [("tpu", None), ("cpu", 0.7)])
def test_the_loss_and_its_gradient_are_those_through_merged_weights(platform: str, capacity: float | None):
    """In groups of any size, and in buffers of equal size that drop tokens."""
    adapters, weights, low = drawn(capacity)
    tokens = np.random.default_rng(1).integers(0, tiny_graphs.VOCABULARY, (2, 24)).astype(np.int32)
    call = Call(platform=platform, attention="xla", key=jax.random.key(0))

    def loss(tree_of, low):
        return apply(adapters.graph, tree_of(weights, low), {"tokens": tokens}, call).values["loss"].mean()

    beside, merged = (
        jax.jit(jax.value_and_grad(functools.partial(loss, tree_of))) for tree_of in (adapters.beside, adapters.merged)
    )
    (value, gradient), (expected, through) = beside(low), merged(low)
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(through), strict=True):
        assert np.abs(theirs).max() > 0
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


def test_every_expert_has_its_own_product_added():
    adapters, weights, low = drawn(None)
    merged = adapters.merged(weights, low)
    a, b = (np.asarray(low["blocks"]["ffn"]["down"][name]) for name in ("lora_a", "lora_b"))
    before, after = (np.asarray(tree["blocks"]["ffn"]["down"]["kernel"]) for tree in (weights, merged))
    assert a.shape == (1, 4, 24, 3) and b.shape == (1, 4, 3, 32)
    for layer, expert in np.ndindex(1, 4):
        added = 7 / 3 * a[layer, expert] @ b[layer, expert]
        np.testing.assert_allclose(after[layer, expert] - before[layer, expert], added, rtol=1e-3, atol=1e-5)


def test_experts_have_adapters_by_name_only_and_without_dropout():
    graph = parse(tiny_graphs.moe())
    assert {path[-1] for path in Adapters(graph, LoraSettings()).targets} == {"query", "key", "value", "out"}
    with pytest.raises(UserError, match=r"no dropout[\s\S]*leave down, gate, up out"):
        Adapters(graph, LoraSettings(**LORA, dropout=0.1))


def run(mesh: dict, **changes: object) -> list[float]:
    """Loss and gradient's norm of a step, from the same weights and adapters."""
    every = tiny.settings(10, **changes).model_dump()
    common = {name: value for name, value in every.items() if name in TrainSettings.model_fields}
    settings = SftSettings.model_validate({**common, "sources": ["none"], "lora": LORA})
    told = tiny.graph().to_dict()
    told["nodes"]["blocks"] |= {
        "repeat": 1,
        "ffn": {"kind": "moe", "experts": 4, "top_k": 2, "width": 24},
    }
    job = TrainJob(graph=parse(told), settings=settings, mesh=mesh, seed=1, feed=tiny.RandomFeed(), folder=Path("none"))
    program = Program(job, make_mesh(mesh, jax.devices()), tiny.RandomFeed().batch(0))
    state = program.begin()
    moved = jax.tree.map(lambda p: p + np.float32(0.02), state.params)
    state = state._replace(params=jax.tree.map(lambda p, like: jax.device_put(p, like.sharding), moved, state.params))
    _, metrics = program.compile_training()(state, program.put(tiny.RandomFeed().batch(0)))
    return [float(metrics["loss"]), float(metrics["grad_norm"])]


def test_any_mesh_makes_the_same_step():
    split = run({"expert": 2, "fsdp": 2}, micro_batches=2)
    np.testing.assert_allclose(split, run({"data": 1}), rtol=2e-5)
