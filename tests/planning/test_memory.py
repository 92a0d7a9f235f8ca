"""The plan's bytes against arrays that exist, and against what compilers take."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from small_plans import SMALL, plan_of

import tiny_graphs
from affinage.config.load import load_recipe
from affinage.config.training import ParallelSettings, PretrainSettings
from affinage.errors import UserError
from affinage.hardware.chips import find_slice
from affinage.model import Graph, parse
from affinage.model.forward import batch_shapes
from affinage.parallel import make_mesh
from affinage.planning.estimate import step_memory
from affinage.planning.per_device import per_device
from affinage.planning.plan import Plan, only
from affinage.training.state import split_params
from affinage.training.trainer import Trainer, TrainJob

CONTEXT = 16


GRAPH = parse(tiny_graphs.llama(layers=4, vocabulary=128))


def settings(**changed: Any) -> PretrainSettings:
    given = {"steps": 10, "batch_size": 16, "schedule": {"peak_lr": 1e-3, "min_lr": 0.0}, "optimizer": {}}
    return PretrainSettings.model_validate(given | changed)


def memory(mesh: dict, chosen: PretrainSettings, *, context: int = CONTEXT, **more: Any) -> Any:
    """On TPUs, eight unless `devices` says otherwise; `more` is of the parallel settings."""
    where = replace(find_slice("v4-16"), shape=(more.pop("devices", 8), 1, 1))
    return step_memory(per_device(GRAPH, chosen, mesh, context, where, ParallelSettings(**more)))


def state_of(graph: Graph, chosen: Any, mesh: dict, context: int, folder: Any) -> tuple[int, int, int]:
    """Bytes that the state of a run has on its last device: weights, those that no step changes, moments."""
    batch = {k: np.zeros(leaf.shape, leaf.dtype) for k, leaf in batch_shapes(graph, chosen.batch_size, context).items()}
    job = TrainJob(graph=graph, settings=chosen, mesh=mesh, seed=0, feed=None, folder=folder)  # type: ignore[arg-type]
    state = Trainer(job, make_mesh(mesh, jax.devices()), batch).begin()

    def held(tree: Any) -> int:
        return sum(leaf.addressable_shards[-1].data.nbytes for leaf in jax.tree.leaves(tree))

    return held(state.params), held(state.frozen), held(state.opt_state)


def test_weights_and_moments_are_the_bytes_of_the_real_state(tmp_path):
    mesh = {"fsdp": 4, "tensor": 2}
    chosen = settings(optimizer={"state_dtype": "bfloat16"}, precision={"params": "bfloat16"})
    planned = memory(mesh, chosen)
    found = planned.weights, planned.frozen, planned.optimizer
    assert found == state_of(GRAPH, chosen, mesh, CONTEXT, tmp_path)


TUNED = "{steps: 50, batch_size: 8, sources: [chats.jsonl], schedule: {peak_lr: 1.0e-4, min_lr: 0}, seq_len: 256}"


def tuned(stage: str, *changes: str, on: str = "v4-8") -> Plan:
    overrides = [f"sft={TUNED}", f"dpo={TUNED}", "model.nodes.blocks.repeat=2", *changes]
    return plan_of(SMALL, on, *overrides, *only(stage, load_recipe(SMALL, overrides).recipe))  # type: ignore[arg-type]


def test_a_tuning_is_planned_with_the_state_and_the_products_of_its_step(tmp_path):
    changes = ["dpo.lora={r: 4, target_modules: [query, up]}", "dpo.optimizer.state_dtype=bfloat16"]
    made = tuned("dpo", *changes)
    assert made.section == "dpo" and made.device.seq_len == 256
    found = made.memory.weights, made.memory.frozen, made.memory.optimizer
    assert found == state_of(made.device.graph, made.device.settings, {"fsdp": 4}, 256, tmp_path)
    # A GPU pads no narrow matrices; the backward pass of its attention kernel has one product more than are counted.
    on_gpus = tuned("dpo", *changes, on="h100x4")
    flops = sum(node.flops for node in on_gpus.time.nodes) * on_gpus.device.layout.mesh.size
    assert 1 <= flops / split_params(made.device.graph, made.device.settings).step_flops(8, 256) < 1.15


def test_adapters_need_less_of_everything():
    wide = "model.nodes.embed.vocab=4096"  # memory is fullest at the logits, where there are gradients already
    whole, low = tuned("dpo", wide), tuned("dpo", wide, "dpo.lora={r: 4}")
    assert low.memory.gradients < whole.memory.gradients / 10 and low.memory.optimizer < whole.memory.optimizer / 10
    assert low.time.update < whole.time.update / 5
    # The frozen weights are read in bfloat16 all the same.
    assert low.memory.weight_copies == pytest.approx(whole.memory.weight_copies, rel=0.1)


def test_experts_on_several_devices_take_what_they_take_on_one():
    apart, together = (
        plan_of("moe-small", "v4-8", f"mesh={mesh}").memory.activations
        for mesh in ("{data: 2, expert: 2}", "{data: 4}")
    )
    assert apart == pytest.approx(together, rel=0.05)


def test_of_split_rows_a_device_keeps_what_its_own_queries_see_of_all_keys():
    chosen, length = settings(attention="xla"), 1024

    def kept(context, **parallel):
        mesh = {"data": 1, "context": context}
        return memory(mesh, chosen, context=length, devices=context, **parallel).activations

    probabilities = 16 * 4 * length * length * 4 * 2  # rows, heads, pairs, layers, bfloat16
    assert kept(1) > probabilities
    assert kept(4) == pytest.approx(kept(1) / 4, rel=0.05)
    assert kept(4, context_attention="ring") < kept(4) / 4


@pytest.mark.parametrize(
    ("mesh", "changed", "named", "fix"),
    [
        ({"data": "auto"}, {"batch_size": 12}, "batch 12", "8 or 16"),
        ({"fsdp": 3}, {}, "3", ""),
        ({"tensor": 8}, {}, "heads = 4", "8"),
        ({"data": 2}, {}, "2 devices", "auto"),
    ],
    ids=str,
)
def test_what_does_not_divide_is_refused_with_what_does(mesh, changed, named, fix):
    with pytest.raises(UserError, match=named) as refused:
        memory(mesh, settings(**changed))
    assert fix in refused.value.fix
