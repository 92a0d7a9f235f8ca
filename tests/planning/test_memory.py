"""The plan's bytes against arrays that exist, and against what compilers take."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from small_plans import SMALL, TUNED, blocks_of, links, plan_of, planned

import tiny_graphs
from affinage.config.load import load_recipe
from affinage.config.recipe import Claims
from affinage.config.training import ParallelSettings, PretrainSettings
from affinage.hardware.chips import find_slice
from affinage.model import Graph, parse
from affinage.model.forward import batch_shapes
from affinage.parallel.sharding import make_mesh
from affinage.planning.estimate import HOP_SECONDS, step_memory
from affinage.planning.per_device import per_device
from affinage.planning.plan import Plan, contradictions, facts_of, only
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
    meshes = "mesh={data: 2, expert: 2}", "mesh={data: 4}"
    apart, together = (plan_of("moe-small", "v4-8", mesh).memory.activations for mesh in meshes)
    assert apart == pytest.approx(together, rel=0.05)


def test_of_split_rows_a_device_keeps_what_its_own_queries_see_of_all_keys():
    chosen, length = settings(attention="xla"), 1024

    def kept(context, **parallel):
        mesh = {"data": 1, "context": context}
        return memory(mesh, chosen, context=length, devices=context, **parallel).activations

    assert kept(1) > 16 * 4 * length * length * 4 * 2  # rows, heads, pairs, layers, bfloat16
    assert kept(4) == pytest.approx(kept(1) / 4, rel=0.05)
    assert kept(4, context_attention="ring") < kept(4) / 4


GB = 1e9
LAYERS, VECTORS = 8 * (4 * 256**2 + 3 * 256 * 1024 + 2 * 256), 2048 * 256  # numbers of small.yaml


@pytest.mark.parametrize(("name", "sizes", "axis", "bandwidth", "hops"), [
    # 16 x 16, closed; a link carries 50 GB/s each way. 15 of 16 parts arrive over two links.
    ("v5e-256", {"data": 16, "fsdp": 16}, "fsdp", 100, 8),
    ("v5e-16", {"data": 4, "fsdp": 4}, "fsdp", 50, 3),  # a line has one link at its end
    ("v4-128", {"fsdp": 64}, "fsdp", 300, 6),  # 4 x 4 x 4: three rings, in two directions
    ("v4-128", {"fsdp": 32, "tensor": 2}, "tensor", 50, 1),  # a part of a ring is a line
    ("v4-128", {"fsdp": 32, "tensor": 2}, "fsdp", 5 * 50, None),  # two whole rings and a line of two
    ("h100x8", {"fsdp": 8}, "fsdp", 450, None),
    ("h100x16", {"data": 2, "fsdp": 8}, "data", 50, None),  # between boxes by their network cards
    ("h100x16", {"fsdp": 16}, "fsdp", 400, None),
], ids=str)  # fmt: skip
def test_gathering_takes_what_arrives_over_the_slowest_links(name, sizes, axis, bandwidth, hops):
    link, parts = links(name, **sizes)[axis], sizes[axis]
    assert link.bandwidth == pytest.approx(bandwidth * GB)
    if hops is not None:
        seconds = (parts - 1) / bandwidth + hops * HOP_SECONDS
        assert link.all_gather(parts * GB) == pytest.approx(seconds)
        assert link.all_reduce(parts * GB) == pytest.approx(2 * seconds)
    if name == "v5e-256":
        assert link.all_to_all(parts * GB) == pytest.approx(15 / 4 / 100 + 8 * HOP_SECONDS)


def test_tensor_parallelism_waits_for_its_sums_and_fsdp_hides_its_own():
    tensor, fsdp = blocks_of("mesh={tensor: 4, data: 1}"), blocks_of()
    assert fsdp.exposed == 0 < fsdp.hidden
    # Four all-reduces a layer of [64, 512, 256] in bfloat16.
    assert tensor.exposed == pytest.approx(4 * 8 * links("v4-8", tensor=4)["tensor"].all_reduce(64 * 512 * 256 * 2))
    along = plan_of(SMALL, "v4-16", "mesh={fsdp: 4, tensor: 2}").time
    assert sum(along.parts.values()) == pytest.approx(along.seconds)


RING, WINDOW = "parallel.context_attention=ring", "model.nodes.blocks.attention.window=64"


@pytest.mark.parametrize(("name", "settings", "pairs", "products"), [
    # Forward 2 products, backward 7 in two kernels; heads of 64 use half of the matrix unit.
    ("v4-8", (), 512 * 513 // 2 - 384 * 385 // 2, 9 * 2),  # pairs of the last 128 queries of 512
    ("v4-8", (WINDOW,), 128 * 64, 9 * 2),
    ("v5e-4", ("pretrain.attention=xla",), 128 * 512, 5 * 2 + 1),  # one has the head as its rows
    ("v4-8", (RING, WINDOW), 128 * 256, 9 * 2),  # the keys of two of four devices
    ("h100x4", ("pretrain.attention=xla",), 128 * 512, 6),
], ids=str)  # fmt: skip
def test_a_step_waits_for_the_device_whose_queries_meet_most_keys(name, settings, pairs, products):
    made = plan_of(SMALL, name, "mesh={context: 4}", *settings)
    blocks = made.device.graph["blocks"]
    counted = next(node.flops for node in made.time.nodes if node.name == "blocks")
    cost = blocks.layer.cost((made.device.graph.shapes["embed"],), {"B": 64, "S": 512})
    assert counted == pytest.approx(3 * 8 * cost.matmul / 4 + 8 * 64 * 2 * 256 * pairs * products, rel=0.02)


def test_products_that_were_kept_are_not_done_again():
    none, dots, block = (blocks_of(f"parallel.remat={name}").flops for name in ("none", "dots", "block"))
    # `block` computes all of the forward pass again but its last product.
    assert none <= dots < block and 0.15 * none < block - dots < 0.3 * none


def test_a_layer_that_is_written_out_is_planned_as_one_that_is_repeated():
    layers = (f"model.nodes.blocks.repeat={number}" for number in (1, "null"))
    once, out = (plan_of(SMALL, "v4-8", each, "mesh={tensor: 4, data: 1}", "parallel.remat=block") for each in layers)
    assert (out.memory, out.time.seconds) == (once.memory, once.time.seconds)
    assert any("without `repeat`" in line for line in out.warnings)
    assert any("four times" in line for line in plan_of(SMALL, "h100x4", "parallel.remat=block").warnings)


def test_stages_wait_as_in_gpipe_and_less_in_several_rounds():
    given = "mesh={pipeline: 2, fsdp: 2}", "parallel.pipeline_micro_batches=4"
    for rounds in (1, 2):
        settings = *given, f"parallel.pipeline_rounds={rounds}"
        node, time = blocks_of(*settings), plan_of(SMALL, "v4-8", *settings).time
        assert time.bubble / (node.seconds + time.bubble) == pytest.approx(1 / (4 * rounds + 1))


def test_what_replicas_add_up_is_summed_once_in_float32():
    each = "pretrain.gradient_accumulation_steps="
    whole, parts = (plan_of(SMALL, "v4-8", "mesh={data: 4}", f"{each}{count}").time.nodes for count in (1, 4))
    # The compiler sums the products' dtype, but float32 of looked-up vectors.
    once = {"blocks": 2 * LAYERS, "loss": 2 * VECTORS, "embed": 4 * VECTORS}
    added = {"blocks": 4 * LAYERS, "loss": 4 * VECTORS, "embed": 4 * VECTORS}
    link = links("v4-8", data=4)["data"]
    for nodes, sizes in ((whole, once), (parts, added)):
        seconds = {node.name: node.hidden for node in nodes}  # beside the products: without `fsdp` of these sums alone
        assert [seconds[node] for node in sizes] == pytest.approx([link.all_reduce(size) for size in sizes.values()])


# ---- claims


def published():
    recipe, graph = planned("julian-600m-as-published")
    return facts_of(graph, recipe.pretrain, recipe.pretrain.batch_size, recipe.packing.seq_len), recipe.claims


FIGURES = {
    "tokens": "300,000 | 1,024 | 2,048 | 629.1B | not 39B | 39.32B | 64 sequences | 4 on each of the 16",
    "flops": "600M | 39B | 1.4e+20 | not 2.4e+19",
    "days": "38% | 0.97 days of a v4-32 | not 21 | 1.8% | 28% for 629.1B",
    "sources": "31.5B | not 39B",
    "sft.sources": "2.42M | not 2.47M",
    "compute_optimal": "65 tokens a parameter | over | 20 | not under",
    "sft.steps_per_epoch": "2.47M | 32 | 77,188 | not 45,383 | packing 1.7",
    "checkpoints": "10B | 100,000 | 170,000 | 64 × 2,048 | 76,2",
}


def test_every_contradiction_of_the_paper_is_named_with_its_figures():
    named = dict(contradictions(*published()))
    assert named.keys() == FIGURES.keys()
    for claim, figures in FIGURES.items():
        assert all(figure in named[claim] for figure in figures.split(" | ")), named[claim]


def test_what_is_consistent_is_not_complained_of():
    facts, _ = published()
    true = Claims(
        parameters=facts.parameters,
        tokens=facts.tokens,
        sources={"a": facts.tokens / 2, "b": facts.tokens / 4},
        epochs=4 / 3,
        flops=facts.flops_by_rule,
        mfu=0.4,
        slice="v4-32",
        days=facts.flops_by_rule / (0.4 * 16 * 275e12) / 86_400,
        compute_optimal=("over",),
    )
    assert not [*contradictions(facts, true)]
    assert [*dict(contradictions(facts, true.model_copy(update={"epochs": 1.0})))] == ["epochs"]
