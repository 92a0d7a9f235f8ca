"""One step is the same on any mesh, with any accumulation, layer by layer, and of adapters beside frozen weights."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tiny
import tiny_graphs
from affinage.checkpoint import CheckpointStore
from affinage.config.training import LoraSettings, ParallelSettings, SftSettings
from affinage.model import Adapters, Graph, abstract_params, apply, init_params, parse
from affinage.training import train
from affinage.training.state import FROZEN, Purpose, TrainState, random_key
from affinage.training.trainer import Trainer
from run_affinage import refused

ONE, BATCH = {"data": 1}, tiny.RandomFeed().batch(0)


def job(mesh: dict[str, int], **changes: Any) -> Any:
    return tiny.job(Path("unused"), graph=tiny.graph(dropout=0.1, layers=1), mesh=mesh, seed=3, **changes)


@functools.cache
def alone() -> tuple[Trainer, Any, TrainState]:
    """The program on one device, its compiled step and the state it begins with, on the host."""
    program, step = tiny.compiled(job(ONE))
    return program, step, jax.device_get(program.begin())


def run(steps: int, mesh: dict[str, int] = ONE, **changes: Any) -> tuple[TrainState, list[dict[str, float]]]:
    return tiny.steps_of(job(mesh, **changes), steps, alone()[2])


def begin() -> TrainState:
    program, _, first = alone()
    return tiny.placed(first, program.abstract)


@pytest.fixture(scope="module")
def expected() -> list[dict[str, float]]:
    return run(8)[1]


@pytest.mark.parametrize(("mesh", "micro_batches"), [
    (ONE, 4),
    ({"fsdp": 2, "tensor": 2}, 2),
    pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, 1, marks=pytest.mark.full),
    pytest.param({"fsdp": 8}, 1, marks=pytest.mark.full),
], ids=str)  # fmt: skip
def test_steps_on_any_mesh_equal_those_on_one_device(mesh: dict[str, int], micro_batches: int, expected):
    tiny.assert_close(run(8, mesh, gradient_accumulation_steps=micro_batches)[1], expected)


def test_the_gradient_is_that_of_the_mean_loss(expected):
    program, _, first = alone()
    config = dataclasses.replace(program.apply_config, key=random_key(3, Purpose.DROPOUT, jnp.int32(0)))

    @jax.jit
    def mean(params):
        loss = apply(program.job.graph, params, BATCH, config).values[program.job.graph.loss]
        return loss.sum / loss.count

    assert expected[0]["loss"] == pytest.approx(float(mean(first.params)), rel=1e-5)
    norm = optax.tree.norm(jax.jit(jax.grad(mean))(first.params))
    assert expected[0]["grad_norm"] == pytest.approx(float(norm), rel=1e-5)


def test_a_large_gradient_is_clipped_to_its_norm():
    state, (metrics,) = run(1, optimizer={"max_grad_norm": 0.01})
    moment = optax.tree.norm(optax.tree.get(state.opt_state, "mu"))  # the mean of the gradients by 1 - b1
    assert metrics["grad_norm"] > 0.01 and float(moment) == pytest.approx(0.01 * (1 - 0.9), rel=1e-4)


def test_a_run_begins_with_the_same_weights_on_any_mesh():
    split = tiny.uncompiled(job({"fsdp": 2, "tensor": 2}, initial_params=None))
    assert tiny.bits(split.begin()) == tiny.bits(alone()[2])


def test_a_batch_without_targets_has_a_loss_of_zero_and_does_no_harm():
    state, metrics = alone()[1](begin(), BATCH | {"loss_mask": np.zeros_like(BATCH["loss_mask"])})
    assert float(metrics["loss"]) == 0 and float(metrics["skipped"]) == 0
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(state.params))


@pytest.mark.full
def test_bfloat16_weights_moments_and_products_train():
    precision = {"compute": "bfloat16", "params": "bfloat16"}
    state, seen = run(20, precision=precision, optimizer={"state_dtype": "bfloat16"})
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
    assert np.mean([m["loss"] for m in seen[-5:]]) < seen[0]["loss"] - 0.2


def test_dropout_depends_on_the_step_alone(expected):
    _, step, _ = alone()
    later, loss = TrainState(jnp.int32(7), *begin()[1:]), float(step(begin(), BATCH)[1]["loss"])
    assert loss == expected[0]["loss"] and float(step(later, BATCH)[1]["loss"]) != loss


def test_the_feed_must_yield_the_batch_that_the_settings_say():
    program = alone()[0]
    with pytest.raises(ValueError, match="8 rows"):
        Trainer(dataclasses.replace(program.job, settings=tiny.settings(batch_size=16)), program.mesh, program.batch)


@pytest.mark.parametrize("in_backward", [False, pytest.param(True, marks=pytest.mark.full)])
def test_every_step_moves_the_average_of_the_weights_by_the_formula_and_a_skipped_one_leaves_it(in_backward: bool):
    how = {"ema": {"decay": 0.75}, "precision": {"params": "bfloat16"}, "optimizer_in_backward": in_backward}
    job = tiny.job(Path("unused"), mesh={"fsdp": 2}, feed=tiny.SickFeed(not_finite=(3,)), **how)
    program, step = tiny.compiled(job)
    state = program.begin()
    expected = jax.tree.map(lambda p: np.asarray(p, np.float32), state.params)
    for number in range(4):
        state, metrics = step(state, program.put(job.feed.batch(number)))
        assert bool(metrics["skipped"]) == (number == 2)
        if number != 2:
            moved = jax.device_get(state.params)
            expected = jax.tree.map(lambda e, p: 0.75 * e + 0.25 * p.astype(np.float32), expected, moved)
        jax.tree.map(lambda got, e: np.testing.assert_allclose(got, e, rtol=1e-6), state.ema_params, expected)
    for average, weights in zip(jax.tree.leaves(state.ema_params), jax.tree.leaves(state.params), strict=True):
        assert average.dtype == np.float32 and average.sharding == weights.sharding


# ---- layers that are updated one by one are updated as together


SPLIT_SEQUENCE = {"sharding": {"batch": ["data"], "sequence": ["fsdp"], "residual": ["fsdp", "tensor"]}}
SPLIT = {"mesh": {"fsdp": 2, "tensor": 2}, "parallel": ParallelSettings.model_validate(SPLIT_SEQUENCE)}
TIED = {"tied": True, "block": {"dropout": 0.1}, "optimizer": {"state_dtype": "bfloat16"}}


def in_layers(in_backward: bool, tied: bool = False, block: dict | None = None, clip: float = 1e9, **changed: Any):
    nodes = tiny.graph().to_dict()["nodes"]
    nodes["blocks"] |= block or {}
    own = {"tied": "embed"} if tied else {"tied": False, "vocab": tiny.VOCABULARY}
    nodes["logits"] = {"kind": "unembed", "in": "norm", **own}
    changed["optimizer"] = {"max_grad_norm": clip, **changed.get("optimizer", {})}
    graph = parse({"inputs": ["tokens"], "nodes": nodes})
    return tiny.job(Path("unused"), graph=graph, optimizer_in_backward=in_backward, **changed)


@pytest.mark.parametrize("changed", [TIED, pytest.param(SPLIT, marks=pytest.mark.full)], ids=["tied", "split"])
def test_it_is_the_plain_step_where_nothing_is_clipped(changed: dict):
    (before, plain), (after, ours) = (tiny.steps_of(in_layers(update, **changed), 3) for update in (False, True))
    for one, other in zip(plain, ours, strict=True):
        assert other.pop("torn") == 0.0 and other == pytest.approx(one, rel=2e-5)
    for one, other in zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True):
        np.testing.assert_allclose(other, one, atol=2e-4 if changed is TIED else 1e-5)
        assert other.sharding == one.sharding


@pytest.mark.full
def test_each_layer_is_clipped_by_its_own_norm():
    layerwise, whole = (tiny.steps_of(in_layers(update, clip=1e-3), 2)[1] for update in (True, False))
    assert layerwise[0]["grad_norm"] == pytest.approx(whole[0]["grad_norm"], rel=1e-5)  # before clipping
    assert layerwise[1]["loss"] != whole[1]["loss"]


@pytest.mark.parametrize(("changed", "why"), [
    ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps"),
    ({"optimizer": {"name": "sgd"}}, "sgd"),
    ({"block": {"ffn": {"kind": "moe", "experts": 4, "top_k": 2, "width": 16}}}, "mixture of experts"),
])  # fmt: skip
def test_what_it_does_not_go_with_is_refused(changed: dict, why: str):
    refused(lambda: tiny.compiled(in_layers(True, **changed)), match=why)


# ---- adapters are trained in place of the weights: on any mesh, of experts too


TARGETS = ("query", "value", "out", "gate", "down")
LORA = {"r": 4, "alpha": 6, "target_modules": TARGETS}
DENSE, EXPERTS = tiny.graph(layers=2), parse(tiny_graphs.moe(layers=1))
LAYERS: dict[str, dict] = {
    "dense": {},
    "experts": {"graph": EXPERTS, "lora": {"r": 3, "alpha": 7, "target_modules": ("query", "value")}},
}


def adapted(folder: Path = Path("unused"), graph: Graph = DENSE, hook: Any = None, **changes: Any):
    mesh, lora = changes.pop("mesh", {"data": 1}), changes.pop("lora", LORA)
    settings = tiny.tuning(SftSettings, 10, own={"lora": lora}, **changes)
    return tiny.job(folder, 10, hook, graph=graph, mesh=mesh, settings=settings)


def test_a_new_adapter_changes_nothing_and_only_the_named_matrices_have_one():
    adapters, weights = Adapters(DENSE, LoraSettings(**LORA)), tiny_graphs.random_params(DENSE, seed=1)
    low = jax.jit(functools.partial(init_params, adapters))(jax.random.key(0))
    assert tiny.bits(adapters.merged(weights, low)) == tiny.bits(weights)
    blocks = low["blocks"]
    assert low.keys() == {"blocks"} and blocks["attention"].keys() | blocks["ffn"].keys() == {*TARGETS}
    spread = float(jnp.std(blocks["ffn"]["gate"]["lora_a"]))  # PyTorch's: uniform up to 1 / sqrt(inputs)
    assert spread == pytest.approx(1 / np.sqrt(3 * 32), rel=0.1)
    assert {path[-1] for path in Adapters(adapters.graph, LoraSettings()).targets} == {*TARGETS, "key", "up"}


def test_targets_that_the_model_has_not_are_refused():
    mistake = refused(lambda: Adapters(DENSE, LoraSettings(target_modules=("query", "q_proj"))), match="q_proj")
    assert "down, gate, key, out, query, up, value" in str(mistake)
    by_default = Adapters(EXPERTS, LoraSettings()).targets
    assert {path[-1] for path in by_default} == {"query", "key", "value", "out"}  # those of experts have none
    refused(lambda: Adapters(EXPERTS, LoraSettings(target_modules=("query", "gate"))), match="gate")


def test_only_adapters_are_trained_and_in_checkpoints(tmp_path: Path):
    seen: list[Any] = []
    train(adapted(tmp_path, hook=lambda step, state: seen.append(jax.device_get(state))))
    first, last = seen[0], seen[-1]
    assert tiny.bits(first.frozen) == tiny.bits(last.frozen)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(last.params))
    shapes = {leaf.shape for leaf in jax.tree.leaves(last.params)} | {()}
    assert {leaf.shape for leaf in jax.tree.leaves(last.opt_state)} == shapes
    whole = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(DENSE)))
    store, frozen = CheckpointStore(tmp_path / "checkpoints"), CheckpointStore(tmp_path / FROZEN)
    assert sum(leaf.size for leaf in jax.tree.leaves(store.restore(10, store.abstract(10)))) < whole
    assert tiny.bits(frozen.restore(0, frozen.abstract(0))["params"]) == tiny.bits(first.frozen)


@functools.cache
def first_adapters(kind: str):
    """Adapters that change something, on one device."""
    state = jax.device_get(tiny.uncompiled(adapted(**LAYERS[kind])).begin())
    return state._replace(params=jax.tree.map(lambda p: p + np.float32(0.02), state.params))


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "mesh", "micro_batches"),
    [("dense", {"fsdp": 2, "tensor": 2}, 2), ("dense", {"pipeline": 2}, 1), ("experts", {"expert": 2, "fsdp": 2}, 2)],
)
def test_any_mesh_makes_the_same_step_of_adapters(kind: str, mesh: dict[str, int], micro_batches: int):
    how = {"mesh": mesh, "gradient_accumulation_steps": micro_batches}
    jobs = adapted(**LAYERS[kind]), adapted(**how, **LAYERS[kind])
    (_, expected), (_, got) = (tiny.steps_of(each, 2, first_adapters(kind)) for each in jobs)
    tiny.assert_close(got, expected, rtol=2e-5)
