"""`affinage plan` as its user sees it."""

import dataclasses
import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from affinage.cli import main
from affinage.cli.plan_tables import show_comparison
from affinage.errors import EXIT_USER_ERROR, UserError
from affinage.hardware.matmul import measured_flops
from affinage.hardware.slices import find_slice
from affinage.model import parse
from affinage.model.kinds.attention_choice import Need, choose
from affinage.model.kinds.attention_kernels import splash_kernel
from affinage.model.parameter import parameters_in
from affinage.parallel.mesh import AXES
from affinage.planning.phases import phases
from affinage.planning.plan import compare, make_plan, planned_graph
from affinage.planning.published import SPEED_UPS, speed_ups
from affinage.planning.wires import wires
from affinage.recipe.load import load_recipe

SMALL = str(Path(__file__).with_name("small.yaml"))


def plan_of(recipe, name, *overrides):
    loaded = load_recipe(recipe, overrides)
    return make_plan(loaded.recipe, planned_graph(loaded), find_slice(name))


def test_time_money_and_utilisation_are_of_one_step():
    made = plan_of(SMALL, "v4-8", "hardware.price=10")
    assert made.seconds == pytest.approx(100 * made.time.seconds)
    assert made.cost == pytest.approx(10 * 4 * made.seconds / 3600)
    assert made.tokens_per_second == pytest.approx(64 * 512 / made.time.seconds)
    assert made.mfu == pytest.approx(made.facts.flops / 100 / made.time.seconds / (4 * 275e12))
    # Nothing multiplies faster than the table says.
    assert 0 < made.mfu < made.where.chip.achievable


def test_a_price_is_that_of_the_chips_it_was_given_for():
    own = plan_of(SMALL, "v5e-4", "hardware.slice=v5e-16", "hardware.price=0.5")
    other = plan_of(SMALL, "v4-8", "hardware.slice=v5e-16", "hardware.price=0.5")
    assert (own.price, own.price_source) == (0.5, "")
    assert other.price == find_slice("v4-8").chip.price and "remembered" in other.price_source
    both = "hardware.price={v5e: 0.5, h100: 2.1}"
    assert [plan_of(SMALL, name, both).price for name in ("v5e-8", "h100x8")] == [0.5, 2.1]
    assert plan_of(SMALL, "v4-8", both).price == other.price
    with pytest.raises(UserError, match="v7"):
        plan_of(SMALL, "v4-8", "hardware.price={v7: 1}")
    loaded = load_recipe(SMALL, ["hardware.price=0.01"])  # whose price it is, nothing says
    compared = compare(loaded.recipe, planned_graph(loaded))
    assert all(made.price != 0.01 for made in compared if not isinstance(made, tuple))


def test_no_node_is_faster_than_its_slowest_part():
    made = plan_of(SMALL, "v5e-16")
    for node in made.time.nodes:
        assert node.seconds >= max(node.compute, node.memory, node.hidden)
    assert made.time.seconds >= sum(node.seconds for node in made.time.nodes)


@pytest.mark.parametrize("mesh", ["{data: 4}", "{data: 2, pipeline: 2}", "{tensor: 4}"])
def test_the_parts_of_a_step_make_up_the_step(mesh):
    made = plan_of(SMALL, "v4-8", f"mesh={mesh}", "model.nodes.embed.vocab=4096")
    parts = phases(made.time, made.split.graph.loss)
    assert list(parts) == ["forward", "loss", "backward", "optimizer"]
    assert sum(parts.values()) == pytest.approx(made.time.seconds)
    # The backward pass multiplies twice for each product of the forward pass; what waits for links is half and half.
    assert parts["forward"] < parts["backward"] < 4 * parts["forward"]


def test_the_published_speed_up_lies_between_attention_by_kernel_and_by_products():
    kernel, plain = speed_ups()
    for name, published in SPEED_UPS.items():
        assert plain.ratios[name] < published * 1.01 and kernel.ratios[name] > published * 0.99, name


def test_tensor_parallelism_waits_for_its_sums_and_fsdp_hides_its_own():
    tensor = plan_of(SMALL, "v4-8", "mesh={tensor: 4, data: 1}")
    fsdp = plan_of(SMALL, "v4-8")
    blocks = {name: next(n for n in p.time.nodes if n.name == "blocks") for name, p in (("t", tensor), ("f", fsdp))}
    assert blocks["t"].exposed > 0 and blocks["f"].exposed == 0
    assert blocks["f"].hidden > 0
    # Four all-reduces a layer of [64, 512, 256] in bfloat16.
    one = wires(find_slice("v4-8"), dict.fromkeys(AXES, 1) | {"tensor": 4})["tensor"].all_reduce(64 * 512 * 256 * 2)
    assert blocks["t"].exposed == pytest.approx(4 * 8 * one)


def blocks_of(*overrides, name="v4-8"):
    return next(node for node in plan_of(SMALL, name, *overrides).time.nodes if node.name == "blocks")


def test_keys_and_values_are_gathered_for_as_many_heads_as_there_are_of_them():
    whole, grouped = (
        blocks_of("mesh={context: 4}", f"model.nodes.blocks.attention.kv_heads={heads}") for heads in (4, 1)
    )
    one = wires(find_slice("v4-8"), dict.fromkeys(AXES, 1) | {"context": 4})["context"]
    for node, heads in ((whole, 4), (grouped, 1)):
        assert node.axes["context"] > node.exposed  # the sums of gradients are beside the products
        assert node.exposed == pytest.approx(8 * 3 * one.all_gather(2 * 64 * 512 * heads * 64 * 2))


RING, WINDOW = "parallel.context_attention=ring", "model.nodes.blocks.attention.window=64"


@pytest.mark.parametrize(
    ("name", "settings", "pairs"),
    [
        ("v4-8", (), 512 * 513 // 2 - 384 * 385 // 2),  # those of the last 128 queries of 512
        ("v4-8", (WINDOW,), 128 * 64),
        ("v4-8", ("pretrain.attention=xla",), 128 * 512),
        ("v4-8", (RING,), 128 * 512),
        ("v4-8", (RING, WINDOW), 128 * 256),  # the keys of two of four devices
        ("h100x4", ("pretrain.attention=cudnn",), 512 * 513 // 2),  # of whole rows, on every device
    ],
)
def test_a_step_waits_for_the_device_whose_queries_meet_most_keys(name, settings, pairs):
    split, chip = plan_of(SMALL, name, "mesh={context: 4}", *settings), find_slice(name).chip
    blocks = split.split.graph["blocks"]
    products = next(node.compute for node in split.time.nodes if node.name == "blocks")
    counted = products * chip.flops_per_device * chip.achievable / 3  # a forward pass's
    cost = blocks.kind.cost((split.split.graph.shapes["embed"],), {"B": 64, "S": 512})
    assert counted == pytest.approx(8 * (cost.matmul / 4 + 64 * 2 * 2 * 256 * pairs))
    # What the model needs, and so the MFU's operations, is the same.
    assert split.facts == plan_of(SMALL, name, "mesh={data: 4}", *settings).facts


def test_the_last_device_of_a_row_has_most_blocks_of_splash_to_compute():
    kernel = splash_kernel(1, 8192, window=None, softcap=None, sequence_shards=4)
    for blocks in (kernel.fwd_mask_info.block_mask, kernel.dkv_mask_info.block_mask):
        of_devices = [np.count_nonzero(part) for part in np.split(np.asarray(blocks), 4, axis=1)]
        assert of_devices == [10, 26, 42, 58]  # the mean is 34: 1.71 times, where pairs are 1.75 times


def test_what_is_computed_again_is_sent_again():
    """The first of a layer's two sums, unless it is kept; both ways of an exchange of experts."""
    tensor, experts = "mesh={tensor: 4}", "model.nodes.blocks.ffn={kind: moe, experts: 4, top_k: 2, width: 256}"
    for settings, again in (((tensor,), (4, 4, 5)), (("mesh={expert: 4}", experts), (4, 6, 6))):
        sent = [blocks_of(*settings, f"parallel.remat={name}").exposed for name in ("none", "dots", "block")]
        assert sent == pytest.approx([sent[0] * times / 4 for times in again])


def test_layers_updated_one_by_one_are_planned_as_computed_again_whatever_is_said():
    """They are the same program, in time, in what is sent and in memory."""
    settings = "mesh={tensor: 4}", "pretrain.update=layerwise"
    unsaid, block, auto = (
        plan_of(SMALL, "v4-8", *settings, *more) for more in ((), ("parallel.remat=block",), ("parallel.remat=auto",))
    )
    for other in (unsaid, auto):
        assert other.time == block.time and other.memory == block.memory
        assert other.to_dict()["remat"] == "block"
    assert "block (as ever where layers are updated one by one" in str(auto.choice)
    plain, again = blocks_of("mesh={tensor: 4}"), blocks_of(*settings)
    assert again.exposed == pytest.approx(plain.exposed * 5 / 4)
    assert 3.5 / 3 * plain.compute < again.compute < 4 / 3 * plain.compute


def test_stages_pass_their_rows_on_once_for_every_round_and_weights_go_to_the_stages_of_several():
    settings = "mesh={pipeline: 2, fsdp: 2}", "parallel.pipeline_micro_batches=4"
    once, twice, four = (blocks_of(*settings, f"parallel.pipeline_rounds={rounds}").axes for rounds in (1, 2, 4))
    assert four["pipeline"] - twice["pipeline"] == pytest.approx(2 * once["pipeline"])
    parts = parameters_in(plan_of(SMALL, "v4-8", *settings).split.graph.parameters["blocks"])
    link = wires(find_slice("v4-8"), dict.fromkeys(AXES, 1) | {"pipeline": 2, "fsdp": 2})["pipeline"]
    # Float32 weights, half of them on each of two devices that hold the same layers, and as many gradients.
    weights = 2 * link.all_to_all(sum(part.size for part in parts) * 4 / 2)
    assert twice["pipeline"] - 2 * once["pipeline"] == pytest.approx(weights, rel=1e-2)


def test_gradients_are_summed_where_weights_are_copied():
    experts = "model.nodes.blocks.ffn={kind: moe, experts: 4, top_k: 2, width: 256}"

    def one_sum(axis, numbers):
        return wires(find_slice("v4-8"), dict.fromkeys(AXES, 1) | {axis: 4})[axis].all_reduce(2 * numbers)

    made = {axis: plan_of(SMALL, "v4-8", f"mesh={{{axis}: 4}}", experts) for axis in ("data", "context", "expert")}
    blocks = {axis: next(node for node in plan.time.nodes if node.name == "blocks") for axis, plan in made.items()}
    parts = parameters_in(made["data"].split.graph.parameters["blocks"])
    every, dense = sum(p.size for p in parts), sum(p.size for p in parts if "experts" not in p.axes)
    assert 0 < dense < every / 2
    for axis, numbers in {"data": every, "context": every, "expert": dense}.items():
        assert blocks[axis].hidden == pytest.approx(one_sum(axis, numbers), rel=5e-3), axis
    # Of two axes the second one sums what the first one has left of it.
    both = plan_of(SMALL, "v4-8", "mesh={data: 2, context: 2}", experts).time.nodes
    links = wires(find_slice("v4-8"), dict.fromkeys(AXES, 1) | {"data": 2, "context": 2})
    expected = links["context"].all_reduce(2 * every) + links["data"].all_reduce(every)
    assert next(node.hidden for node in both if node.name == "blocks") == pytest.approx(expected)


def test_collectives_are_told_by_the_axis_they_go_along():
    made = plan_of(SMALL, "v4-16", "mesh={fsdp: 4, tensor: 2}")
    along = made.time.collectives
    assert along.keys() == {"fsdp", "tensor"} == made.to_dict()["step"]["collectives"].keys()
    assert along["tensor"] == pytest.approx(sum(node.exposed for node in made.time.nodes))
    assert along["fsdp"] == pytest.approx(sum(node.hidden for node in made.time.nodes))


def test_logits_and_buffers_of_collectives_are_told_apart():
    wide = ["model.nodes.embed.width=1024", "model.nodes.blocks.ffn.width=4096", "rows.context=64", "pretrain.batch=4"]
    split, whole = (plan_of(SMALL, "v4-8", *wide, f"mesh={{fsdp: {n}, data: {4 // n}}}").memory for n in (4, 1))
    assert (split.buffers, whole.buffers) == (1024 * 4096 * 2, 0)  # one gathered matrix, in bfloat16
    large = plan_of(SMALL, "v4-8", "mesh={data: 4}", "model.nodes.blocks.repeat=1", "model.nodes.embed.vocab=32000")
    # Of 16 rows, as 0.98 GiB are no reason for parts: logits in float32, and their gradient in bfloat16.
    assert large.memory.logits == 16 * 512 * 32000 * (4 + 2)
    for memory in (split, whole, large.memory):
        parts = (memory.activations, memory.logits, memory.buffers, memory.working)
        assert memory.transient == sum(parts)
        assert memory.total == memory.state + memory.batch + memory.weight_copies + memory.gradients + sum(parts)


def test_stages_share_the_head_where_the_table_says_so():
    table = "parallel.sharding={vocab: [tensor, pipeline]}"
    each, shared = (plan_of(SMALL, "v4-8", "mesh={pipeline: 4}", *more) for more in ((), (table,)))
    head = [next(node.compute for node in made.time.nodes if node.name == "logits") for made in (each, shared)]
    assert head[0] == pytest.approx(4 * head[1])


def test_a_pipeline_has_the_bubble_of_gpipe():
    made = plan_of(SMALL, "v4-8", "mesh={pipeline: 2, fsdp: 2}", "parallel.pipeline_micro_batches=8")
    work = next(node.seconds for node in made.time.nodes if node.name == "blocks")
    assert made.time.bubble / (work + made.time.bubble) == pytest.approx(1 / (8 + 1))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("mesh={pipeline: 2, context: 2}", "parallel.context_attention=ring"), "ring attention does not go through"),
        (("mesh={pipeline: 2, fsdp: 2}", "pretrain.attention=splash"), "attention by splash does not go through"),
        (("mesh={fsdp: 4}", "pretrain.update=layerwise", "pretrain.micro_batches=2"), "micro_batches is 2"),
        (("pretrain.update=layerwise", "parallel.remat=dots"), "whatever `dots` would keep"),
        (("pretrain.update=layerwise", "parallel.remat={keep: [query]}"), "whatever activations by name would keep"),
    ],
    ids=["ring", "kernel", "layerwise", "dots", "names"],
)
def test_what_a_run_refuses_is_not_planned(settings, said):
    with pytest.raises(UserError, match=said):
        plan_of(SMALL, "v4-8", *settings)


def test_a_mesh_axis_that_splits_nothing_is_refused_and_one_for_experts_that_are_not_is_told():
    mesh = "mesh={data: 1, context: 4}"
    with pytest.raises(UserError, match="nothing of this model is split along context = 4") as refused:
        plan_of("byol-digits", "v4-8", mesh)
    assert refused.value.fix == "Set `mesh: {data: 4}`."
    assert plan_of("byol-digits", "v4-8", "mesh={data: 4}").fits
    experts = "model.nodes.blocks.ffn={kind: moe, experts: 4, top_k: 2, width: 256}"
    for settings, told in (
        (("mesh={expert: 4}",), True),
        (("mesh={expert: 4}", experts), False),
        (("mesh={expert: 4}", "parallel.sharding.embed=[fsdp, expert]"), False),
        (("mesh={fsdp: 4}",), False),
    ):
        said = [warning for warning in plan_of(SMALL, "v4-8", *settings).warnings if "has experts" in warning]
        assert bool(said) == told and all("`mesh.data`" in warning for warning in said)
    with pytest.raises(UserError, match="nothing of this model is split along expert = 4"):
        plan_of(SMALL, "v4-8", "mesh={expert: 4}", "parallel.sharding.batch=[data, fsdp]")


def test_recomputation_trades_memory_for_products():
    plain, block = (plan_of(SMALL, "v4-8", f"parallel.remat={name}") for name in ("none", "block"))
    assert block.memory.activations < 0.3 * plain.memory.activations
    compute = [next(node.compute for node in made.time.nodes if node.name == "blocks") for made in (plain, block)]
    # All of the forward pass but the last product of a layer, whose result nothing reads again.
    assert 3.5 / 3 * compute[0] < compute[1] < 4 / 3 * compute[0]


def test_dropout_that_rules_the_kernel_out_is_told_where_there_is_one():
    dropout = "model.nodes.blocks.attention.dropout=0.1"
    assert any("dropout of attention" in warning for warning in plan_of(SMALL, "v4-8", dropout).warnings)
    assert plan_of(SMALL, "v4-8").warnings == ()
    for other in ("cpu", "h100x4"):  # where `auto` is no kernel
        assert not any("dropout of attention" in warning for warning in plan_of(SMALL, other, dropout).warnings)


NOT_BY_CUDNN = [
    ("model.nodes.blocks.attention.head_dim=20", "heads of 20"),
    ("model.nodes.blocks.attention.dropout=0.1", "dropout of 0.1"),
    ("model.nodes.blocks.attention.softcap=30.0", "a soft-cap of 30.0"),
    ("pretrain.precision.compute=float32", "float32"),
    ("rows.context=511", "rows of 511 tokens"),
]


@pytest.mark.parametrize(("setting", "said"), NOT_BY_CUDNN)
def test_what_cudnn_would_refuse_in_a_run_is_refused_by_its_plan(setting, said):
    with pytest.raises(UserError, match=f"attention by cudnn cannot honour {said}"):
        plan_of(SMALL, "h100x4", "pretrain.attention=cudnn", setting)


def test_a_kernel_that_is_taken_only_by_name_is_named():
    def told(where: str, *settings: str) -> bool:
        return any("pretrain.attention=cudnn" in warning for warning in plan_of(SMALL, where, *settings).warnings)

    assert told("h100x4") and not told("v4-8")
    assert not told("h100x4", "pretrain.attention=cudnn")
    assert not any(told("h100x4", setting) for setting, _ in NOT_BY_CUDNN)
    assert not told("h100x4", "mesh={pipeline: 2, fsdp: 2}")


def test_a_gpu_is_planned_with_the_attention_that_a_run_takes_there():
    auto, xla, cudnn = (plan_of(SMALL, "h100x4", f"pretrain.attention={name}") for name in ("auto", "xla", "cudnn"))
    assert choose("auto", Need("gpu", jnp.bfloat16, 64, 512, False, 0.0, None)) == "xla"
    assert (auto.memory, auto.time) == (xla.memory, xla.time)
    # Of 8 layers, 16 rows of a device and 4 heads: the probabilities of all pairs, in bfloat16.
    kept = 8 * 16 * 4 * 512 * 512 * 2
    assert auto.memory.activations - cudnn.memory.activations > kept / 2  # of which a kernel keeps a row's sum and more
    compute = [next(node.compute for node in made.time.nodes if node.name == "blocks") for made in (auto, cudnn)]
    assert compute[0] > compute[1]
    with pytest.raises(UserError, match="attention by splash cannot honour a gpu"):
        plan_of(SMALL, "h100x4", "pretrain.attention=splash")


def test_slices_are_compared_fitting_ones_first_by_the_cost_of_a_token():
    loaded = load_recipe(SMALL, ["pretrain.batch=256"])
    found = compare(loaded.recipe, planned_graph(loaded))
    plans = [entry for entry in found if not isinstance(entry, tuple)]
    keys = [(not made.fits, made.cost_per_billion) for made in plans]
    assert keys == sorted(keys) and len(plans) > 20


@pytest.mark.parametrize(
    ("overrides", "lines", "changes"),
    [
        (["mesh={fsdp: 1}"], 1, ["mesh.fsdp=auto"]),
        (["pretrain.batch=8"], 1, ["pretrain.batch=256"]),
        (["mesh={fsdp: 16}", "pretrain.batch=8"], 2, ["mesh.fsdp=auto", "pretrain.batch=16"]),
    ],
)
def test_slices_that_are_left_out_are_told_once_for_each_reason(capsys, overrides, lines, changes):
    def settings(*given):
        return [word for override in given for word in ("--set", override)]

    status, out, _ = told(capsys, SMALL, "--which", *settings(*overrides))
    assert status == 0 and out.count("Left out: ") == lines and out.count(", v5e-256") <= 1
    assert re.findall(r"--set (mesh\S+|pretrain.batch\S+)", out) == changes
    _, out, _ = told(capsys, SMALL, "--which", *settings(*overrides, *changes, "pretrain.batch=256"))
    assert "Left out" not in out, "what is said works as it is pasted"


def test_what_is_too_small_is_told_once_for_each_remedy(capsys):
    _, out, _ = told(capsys, SMALL, "--which", "--set", "rows.context=65536", "--set", "pretrain.batch=256")
    lines = out.splitlines()
    remedies = [lines[number + 1] for number, line in enumerate(lines) if line.startswith("Too small: ")]
    assert remedies and len(remedies) == len(set(remedies)) and all(line.startswith("  ") for line in remedies)


def test_what_is_nearly_full_and_what_trains_on_other_tokens_is_told(capsys):
    rows = ("pretrain.batch=null", "pretrain.batch_per_device=16")
    small, large = (plan_of(SMALL, name, *rows) for name in ("v4-8", "v4-16"))
    chip = dataclasses.replace(small.where.chip, usable_bytes=int(small.memory.total / 0.95))
    full = dataclasses.replace(small, where=dataclasses.replace(small.where, chip=chip))
    show_comparison([full, large], as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines[1:3]] == ["nearly", "yes"]
    assert f"{100 * 64 * 512:,} to {100 * 128 * 512:,} tokens" in " ".join(lines)
    show_comparison([large, large], as_json=False)
    assert "per device" not in (told := capsys.readouterr().out) and "nearly" not in told


def test_experts_without_a_capacity_are_told_of_on_gpus():
    experts = "model.nodes.blocks.ffn={kind: moe, experts: 4, top_k: 2, width: 256, capacity_factor: %s}"
    warned = [
        any("capacity_factor" in warning for warning in plan_of(SMALL, name, experts % capacity).warnings)
        for name, capacity in (("h100x4", "null"), ("h100x4", "2.0"), ("v4-8", "null"))
    ]
    assert warned == [True, False, False]


def test_a_model_of_images_is_planned_too():
    loaded = load_recipe("byol-digits", ["mesh.data=auto"])
    made = make_plan(loaded.recipe, parse(loaded.recipe.model), find_slice("v4-8"))
    assert made.memory.averages > 0 and made.time.seconds > 0


def told(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *words])
    out = capsys.readouterr()
    return ended.value.code or 0, out.out, out.err


def test_the_verb_prints_and_speaks_json(capsys):
    status, out, _ = told(capsys, SMALL, "--on", "v4-8", "--json")
    assert status == 0
    answer = json.loads(out)
    assert answer["slice"]["chips"] == 4 and answer["fits"] and answer["mesh"] == {"fsdp": 4}
    assert sum(answer["memory"][part] for part in ("weights", "optimizer", "activations")) < answer["memory"]["total"]
    status, out, _ = told(capsys, SMALL, "--on", "v4-8")
    assert status == 0 and "estimate: fits" in out and "tokens/s" in out


def test_what_was_measured_of_a_processor_is_said_and_of_a_chip_nothing(capsys):
    found = []
    for where in ("cpu", "v4-8"):
        _, out, _ = told(capsys, "quickstart", "--on", where)
        found.append(re.findall(r"measured just now: ([\d,]+) GFLOP/s in products", out))
    (rate,), of_a_chip = found
    assert int(rate.replace(",", "")) == pytest.approx(measured_flops() / 1e9, abs=1) and not of_a_chip


def test_a_batch_that_does_not_divide_is_planned_with_the_nearest_that_does(capsys):
    status, out, err = told(capsys, SMALL, "--on", "v5e-256", "--json")
    assert status == 0 and json.loads(out)["rows"] == 256
    assert "batch 64 does not divide" in err and "--set pretrain.batch=256" in err


def test_what_of_a_recipe_is_planned_is_said(capsys):
    def extent(*words):
        return next(line for line in told(capsys, *words)[1].splitlines() if "planned: " in line)

    data = "the data (affinage data julian-sft, without an accelerator)"
    assert extent("julian-sft", "--on", "v4-32") == f"planned: pretrain; not planned: {data}, sft (--stage sft)"
    alone = ("julian-sft", "--on", "v4-32", "--set", "pretrain=null", "--set", "data=null")
    assert extent(*alone) == "planned: sft"
    assert extent("julian-data", "--which").startswith("julian-data; planned: pretrain; not planned: the data (")


def test_the_published_recipe_is_planned_on_the_slice_it_claims(capsys):
    status, out, _ = told(capsys, "julian-600m-as-published")
    assert status == 0
    assert "on v4-32" in out and "Claims that cannot be true" in out and "629.1B tokens, not 39B" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((SMALL, "--on", "v4-9"), "there is no v4-9"),
        ((SMALL, "--on", "v4-8", "--which"), "--which looks through all slices"),
        ((SMALL, "--which", "--search"), "--which and --search do not go together"),
        ((SMALL, "--on", "v4-8", "--curve", "weak", "--compile"), "--curve and --compile do not go together"),
        ((SMALL, "--curve", "weak"), "a processor has none"),
        ((SMALL, "--on", "v5e-256", "--set", "mesh={fsdp: 8}"), "the mesh has 8 devices, the slice 256"),
    ],
)
def test_mistakes_are_one_message(capsys, words, message):
    status, out, err = told(capsys, *words)
    assert status == EXIT_USER_ERROR and message in err and "Traceback" not in err and not out
