"""How often a step sums its gradients over devices, and what adding up those of micro-batches reads and writes."""

from pathlib import Path

import pytest

from affinage.cli import main
from affinage.hardware.slices import find_slice
from affinage.parallel.mesh import AXES
from affinage.planning.plan import make_plan, planned_graph
from affinage.planning.roofline import MEMORY_ACHIEVABLE
from affinage.planning.wires import wires
from affinage.recipe.load import load_recipe

SMALL = str(Path(__file__).with_name("small.yaml"))
DATA, PARTS = "mesh={data: 4}", "pretrain.micro_batches=4"
EXPERTS = "model.nodes.blocks.ffn={kind: moe, experts: 4, top_k: 2, width: 512}"
LAYERS, VECTORS = 8 * (4 * 256**2 + 3 * 256 * 1024 + 2 * 256), 2048 * 256  # numbers of small.yaml


def plan_of(name, *overrides):
    loaded = load_recipe(SMALL, overrides)
    return make_plan(loaded.recipe, planned_graph(loaded), find_slice(name))


def sums(name, *overrides):
    """Seconds beside the products, by node: without `fsdp` sums of gradients alone."""
    return {node.name: node.hidden for node in plan_of(name, *overrides).time.nodes}


def one_sum(name, size, axis="data"):
    return wires(find_slice(name), dict.fromkeys(AXES, 1) | {axis: 4})[axis].all_reduce(size)


@pytest.mark.parametrize("name", ["v4-8", "h100x4"])
def test_what_replicas_add_up_is_summed_once_in_float32(name):
    whole, parts = (sums(name, DATA, *more) for more in ((), (PARTS,)))
    # The compiler sums the products' dtype, but float32 of looked-up vectors.
    once = {"blocks": 2 * LAYERS, "logits": 2 * VECTORS, "embed": 4 * VECTORS}
    added = {"blocks": 4 * LAYERS, "logits": 4 * VECTORS, "embed": 4 * VECTORS}
    for found, sizes in ((whole, once), (parts, added)):
        assert [found[node] for node in sizes] == pytest.approx([one_sum(name, size) for size in sizes.values()])


def test_where_devices_go_together_layers_and_vectors_are_summed_in_every_micro_batch():
    for axis, more in (("data", (EXPERTS,)), ("context", ())):
        whole, parts = (sums("v4-8", f"mesh={{{axis}: 4}}", *more, *each) for each in ((), (PARTS,)))
        assert parts["blocks"] == pytest.approx(4 * whole["blocks"])
        assert parts["embed"] == pytest.approx(4 * one_sum("v4-8", 4 * VECTORS, axis))
        assert parts["logits"] == pytest.approx(one_sum("v4-8", 4 * VECTORS, axis))


def test_a_pipeline_sums_in_every_tick():
    mesh = "mesh={pipeline: 2, data: 2}", "parallel.pipeline_micro_batches=4"
    links = wires(find_slice("v4-8"), dict.fromkeys(AXES, 1) | {"pipeline": 2, "data": 2})
    assert sums("v4-8", *mesh)["blocks"] == pytest.approx(5 * links["data"].all_reduce(LAYERS))


def test_adding_up_reads_two_gradients_and_writes_one_in_every_micro_batch():
    assert plan_of("v4-8").time.adding == 0
    parts = plan_of("v4-8", PARTS).time
    numbers, bandwidth = (LAYERS + 2 * VECTORS + 256) / 4, find_slice("v4-8").chip.memory_bandwidth
    assert parts.adding == pytest.approx(4 * 3 * 4 * numbers / (bandwidth * MEMORY_ACHIEVABLE), rel=1e-3)
    assert parts.seconds > sum(node.seconds for node in parts.nodes) + parts.update


@pytest.mark.parametrize(("slices", "devices", "told"), [("2xv4-8", 8, True), ("v4-8", 4, False)])
def test_sums_that_are_made_again_are_told_where_they_cost(slices, devices, told, capsys):
    """Experts in micro-batches, over the network between two slices and within one."""
    with pytest.raises(SystemExit):
        asked = (f"mesh={{data: {devices}}}", PARTS, EXPERTS)
        main(["plan", SMALL, "--on", slices, *(word for one in asked for word in ("--set", one))])
    assert ("summed over devices in every micro-batch" in capsys.readouterr().out) is told
