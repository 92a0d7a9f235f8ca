"""Adapters are trained in place of the weights: as through merged weights, on any mesh, of experts too."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
import tiny_graphs
from affinage.checkpoint import CheckpointStore
from affinage.config.training import LoraSettings, SftSettings
from affinage.model import Adapters, Graph, abstract_params, init_params, parse
from affinage.training import train
from affinage.training.state import FROZEN
from run_affinage import refused

TARGETS = ("query", "value", "out", "gate", "down")
LORA = {"r": 4, "alpha": 6, "target_modules": TARGETS}
DENSE, EXPERTS = tiny.graph(layers=2), parse(tiny_graphs.moe(layers=1))
LAYERS: dict[str, dict] = {
    "dense": {},
    "experts": {"graph": EXPERTS, "lora": {"r": 3, "alpha": 7, "target_modules": ("query", "value")}},
}


def job(folder: Path = Path("unused"), graph: Graph = DENSE, hook: Any = None, **changes: Any):
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
    everything = Adapters(adapters.graph, LoraSettings())
    assert {path[-1] for path in everything.targets} == {*TARGETS, "key", "up"}


def test_targets_that_the_model_has_not_are_refused():
    mistake = refused(lambda: Adapters(DENSE, LoraSettings(target_modules=("query", "q_proj"))), match="q_proj")
    assert "down, gate, key, out, query, up, value" in str(mistake)
    by_default = Adapters(EXPERTS, LoraSettings()).targets
    assert {path[-1] for path in by_default} == {"query", "key", "value", "out"}  # those of experts have none
    refused(lambda: Adapters(EXPERTS, LoraSettings(target_modules=("query", "gate"))), match="gate")


def test_only_adapters_are_trained_and_in_checkpoints(tmp_path: Path):
    seen: list[Any] = []
    train(job(tmp_path, hook=lambda step, state: seen.append(jax.device_get(state))))
    first, last = seen[0], seen[-1]
    assert tiny.bits(first.frozen) == tiny.bits(last.frozen)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(last.params))
    shapes = {leaf.shape for leaf in jax.tree.leaves(last.params)} | {()}
    assert {leaf.shape for leaf in jax.tree.leaves(last.opt_state)} == shapes
    whole = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(DENSE)))
    store, frozen = CheckpointStore(tmp_path / "checkpoints"), CheckpointStore(tmp_path / FROZEN)
    saved = store.restore(10, store.abstract(10))
    assert sum(leaf.size for leaf in jax.tree.leaves(saved)) < whole
    assert tiny.bits(frozen.restore(0, frozen.abstract(0))["params"]) == tiny.bits(first.frozen)


@functools.cache
def first_state(kind: str):
    """Adapters that change something, on one device."""
    state = jax.device_get(tiny.uncompiled(job(**LAYERS[kind])).begin())
    return state._replace(params=jax.tree.map(lambda p: p + np.float32(0.02), state.params))


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "mesh", "micro_batches"),
    [("dense", {"fsdp": 2, "tensor": 2}, 2), ("dense", {"pipeline": 2}, 1), ("experts", {"expert": 2, "fsdp": 2}, 2)],
)
def test_any_mesh_makes_the_same_step(kind: str, mesh: dict[str, int], micro_batches: int):
    split = job(mesh=mesh, gradient_accumulation_steps=micro_batches, **LAYERS[kind])
    (_, expected), (_, got) = (tiny.steps_of(each, 2, first_state(kind)) for each in (job(**LAYERS[kind]), split))
    tiny.assert_close(got, expected, rtol=2e-5)
