"""Adapters are trained in place of the weights: as through merged weights, on any mesh, resumed exactly."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec

from affinage.checkpoint import CheckpointStore
from affinage.errors import UserError
from affinage.model import Adapters, Call, Graph, abstract_params, apply, init_params, parse
from affinage.parallel import make_mesh
from affinage.recipe.parallel import ParallelSettings
from affinage.recipe.training import TrainSettings
from affinage.recipe.tuning import LoraSettings, SftSettings
from affinage.training import TrainJob, train
from affinage.training.frozen import FROZEN
from affinage.training.program import Program

TARGETS = ["query", "value", "out", "gate", "down"]


def graph() -> Graph:
    told = tiny.graph().to_dict()
    told["nodes"]["blocks"]["scan"] = True  # half the compilation
    return parse(told)


def settings(steps: int = 10, rank: int = 4, dropout: float = 0.0, **changes: object) -> SftSettings:
    every = tiny.settings(steps, checkpoint={"every_steps": 4}, **changes).model_dump()
    common = {name: value for name, value in every.items() if name in TrainSettings.model_fields}
    lora = {"rank": rank, "alpha": 6, "targets": TARGETS, "dropout": dropout}
    return SftSettings.model_validate({**common, "sources": ["none"], "lora": lora})


def job(folder: Path, mesh: dict | None = None, parallel: dict | None = None, **changes: object) -> TrainJob:
    values = {"graph": graph(), "settings": settings(), "mesh": mesh or {"data": 1}, "seed": 1}
    values |= {"parallel": ParallelSettings.model_validate(parallel or {}), "feed": tiny.RandomFeed()}
    return TrainJob(**{**values, "folder": folder, **changes})


@functools.cache
def drawn() -> tuple[Adapters, dict, dict]:
    """Adapters with a B that is not zero, beside weights."""
    adapters = Adapters(graph(), LoraSettings(rank=4, alpha=6, targets=TARGETS))
    low = jax.jit(functools.partial(init_params, adapters))(jax.random.key(0))
    draw = np.random.default_rng(7)
    low = jax.tree.map(lambda p: p + draw.normal(0, 0.1, p.shape).astype(np.float32), low)
    return adapters, jax.jit(functools.partial(init_params, adapters.graph))(jax.random.key(1)), low


def test_the_loss_and_its_gradient_are_those_through_merged_weights():
    adapters, weights, low = drawn()
    batch = tiny.RandomFeed().batch(0)

    def loss(tree_of, low):
        return apply(adapters.graph, tree_of(weights, low), batch, Call()).values["loss"].mean()

    beside, merged = (
        jax.jit(jax.value_and_grad(functools.partial(loss, tree_of))) for tree_of in (adapters.beside, adapters.merged)
    )
    (value, gradient), (expected, through) = beside(low), merged(low)
    without, _ = beside(jax.tree.map(jnp.zeros_like, low))
    assert float(value) == pytest.approx(float(expected), rel=1e-6) and abs(float(value) - float(without)) > 1e-3
    for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(through), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


def test_a_new_adapter_changes_nothing_and_only_the_named_matrices_have_one():
    adapters, weights, _ = drawn()
    low = jax.jit(functools.partial(init_params, adapters))(jax.random.key(0))
    for ours, theirs in zip(jax.tree.leaves(adapters.merged(weights, low)), jax.tree.leaves(weights), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    blocks = low["blocks"]
    assert low.keys() == {"blocks"} and blocks["attention"].keys() | blocks["ffn"].keys() == {*TARGETS}
    spread = float(jnp.std(blocks["ffn"]["gate"]["lora_a"]))  # PyTorch's: uniform up to 1 / sqrt(inputs)
    assert spread == pytest.approx(1 / np.sqrt(3 * 32), rel=0.1)
    everything = Adapters(adapters.graph, LoraSettings())
    assert {path[-1] for path in everything.targets} == {*TARGETS, "key", "up"}


def test_a_target_that_the_model_has_not_is_refused():
    with pytest.raises(UserError, match=r"no matrix called `q_proj`[\s\S]*down, gate, key, out, query, up, value"):
        Adapters(graph(), LoraSettings(targets=("query", "q_proj")))


def test_only_adapters_are_trained_and_in_checkpoints(tmp_path: Path):
    seen = []
    train(job(tmp_path, on_step=(lambda step, state: seen.append(jax.device_get(state)),)))
    first, last = seen[0], seen[-1]
    for a, b in zip(jax.tree.leaves(first.frozen), jax.tree.leaves(last.frozen), strict=True):
        np.testing.assert_array_equal(a, b)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(last.params))
    shapes = {leaf.shape for leaf in jax.tree.leaves(last.params)} | {()}
    assert {leaf.shape for leaf in jax.tree.leaves(last.opt_state)} == shapes
    whole = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(graph())))
    saved = CheckpointStore(tmp_path / "checkpoints").restore(10, {"params": None, "opt_state": None})
    assert sum(leaf.size for leaf in jax.tree.leaves(saved)) < whole
    kept = CheckpointStore(tmp_path / FROZEN).restore(0, {"params": None})["params"]
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(first.frozen), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_step_has_two_products_for_a_frozen_matrix_where_it_has_three_for_a_trained_one():
    batch, mesh = tiny.RandomFeed().batch(0), make_mesh({"data": 1}, jax.devices())
    adapted, whole = (
        Program(job(Path("unused"), settings=chosen), mesh, batch)
        for chosen in (settings(), settings().model_copy(update={"lora": None}))
    )
    matrices = 2 * (4 * 32 * 32 + 3 * 32 * 64) + 32 * tiny.VOCABULARY  # attention, feed-forward, logits
    low = 2 * 4 * (3 * (32 + 32) + 2 * (32 + 64))  # of rank 4
    tokens = 8 * tiny.CONTEXT
    assert whole.flops_per_step - adapted.flops_per_step == tokens * (2 * matrices - 6 * low)


def test_resumed_it_ends_with_the_same_bits(tmp_path: Path):
    ends = []

    def last(step, state):
        if step == 10:
            ends.append(jax.device_get(state))

    chosen = settings(dropout=0.2)
    train(job(tmp_path / "whole", settings=chosen, on_step=(last,)))

    def dies(step, state):
        if step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(job(tmp_path / "cut", settings=chosen, on_step=(dies,)))
    summary = train(job(tmp_path / "cut", settings=chosen, on_step=(last,)))
    assert summary["resumed_at"] == [4]
    for a, b in zip(jax.tree.leaves(ends[0]), jax.tree.leaves(ends[1]), strict=True):
        np.testing.assert_array_equal(a, b)


def run(mesh: dict, parallel: dict | None = None, **changes: object) -> list[float]:
    """Loss and gradient's norm of two steps, from the same weights and adapters."""
    chosen = settings(dropout=0.3, **changes)
    of = job(Path("unused"), mesh, parallel, settings=chosen)
    program = Program(of, make_mesh(mesh, jax.devices()), tiny.RandomFeed().batch(0))
    state = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), first_state(), program.abstract)
    step, found = program.compile_training(), []
    for number in range(2):
        state, metrics = step(state, program.put(tiny.RandomFeed().batch(number)))
        found += [float(metrics["loss"]), float(metrics["grad_norm"])]
    return found


@functools.cache
def first_state():
    program = Program(job(Path("unused")), make_mesh({"data": 1}, jax.devices()), tiny.RandomFeed().batch(0))
    state = jax.device_get(program.begin())
    return state._replace(params=jax.tree.map(lambda p: p + np.float32(0.02), state.params))


@functools.cache
def on_one_device() -> list[float]:
    return run({"data": 1})


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ({"fsdp": 2, "tensor": 2}, {"micro_batches": 2}),
        ({"pipeline": 2}, {}),
    ],
)
def test_any_mesh_makes_the_same_step(mesh: dict, changes: dict):
    np.testing.assert_allclose(run(mesh, **changes), on_one_device(), rtol=2e-5)


def test_an_adapter_lies_where_its_matrix_lies():
    mesh = {"fsdp": 2, "tensor": 2}
    program = Program(job(Path("unused"), mesh), make_mesh(mesh, jax.devices()), tiny.RandomFeed().batch(0))
    query = program.abstract.params["blocks"]["attention"]["query"]
    assert query["lora_a"].sharding.spec == PartitionSpec(None, "fsdp")
    assert query["lora_b"].sharding.spec == PartitionSpec(None, None, "tensor")
    moments = [leaf for leaf in jax.tree.leaves(program.abstract.opt_state) if leaf.shape == query["lora_b"].shape]
    assert {leaf.sharding.spec for leaf in moments} == {query["lora_b"].sharding.spec}


def test_dropout_of_adapters_draws_a_mask_for_each_matrix():
    adapters, weights, low = drawn()
    adapters = Adapters(adapters.graph, adapters.settings.model_copy(update={"dropout": 0.5}))
    sites = [
        leaf["lora_site"]
        for half in adapters.beside(weights, low)["blocks"].values()
        for leaf in half.values()
        if isinstance(leaf, dict) and "lora_site" in leaf
    ]
    assert len({int(site[0]) for site in sites}) == len(TARGETS)
