"""Seconds of a step: products, what is sent and by which links, sums of gradients, bubbles."""

import pytest
from small_plans import SMALL, blocks_of, links, plan_of

from affinage.planning.estimate import HOP_SECONDS

GB = 1e9
HOP = HOP_SECONDS
LAYERS, VECTORS = 8 * (4 * 256**2 + 3 * 256 * 1024 + 2 * 256), 2048 * 256  # numbers of small.yaml
DATA, PARTS = "mesh={data: 4}", "pretrain.gradient_accumulation_steps=4"


@pytest.mark.parametrize(
    ("name", "sizes", "axis", "parts", "seconds"),
    [
        # 16 x 16, closed; a link carries 50 GB/s each way. 15 of 16 parts arrive over two links.
        ("v5e-256", {"data": 16, "fsdp": 16}, "fsdp", 16, 15 / 100 + 8 * HOP),
        ("v5e-16", {"data": 4, "fsdp": 4}, "fsdp", 4, 3 / 50 + 3 * HOP),  # a line has one link at its end
        ("v4-128", {"fsdp": 64}, "fsdp", 64, 63 / 300 + 6 * HOP),  # 4 x 4 x 4: three rings, in two directions
        ("v4-128", {"fsdp": 32, "tensor": 2}, "tensor", 2, 1 / 50 + HOP),  # a part of a ring is a line
    ],
    ids=str,
)
def test_gathering_takes_what_arrives_over_the_links(name, sizes, axis, parts, seconds):
    link = links(name, **sizes)[axis]
    assert link.all_gather(parts * GB) == pytest.approx(seconds)
    assert link.all_reduce(parts * GB) == pytest.approx(2 * seconds)
    if name == "v5e-256":
        assert link.all_to_all(parts * GB) == pytest.approx(15 / 4 / 100 + 8 * HOP)


@pytest.mark.parametrize(
    ("name", "sizes", "axis", "bandwidth"),
    [
        ("v4-128", {"fsdp": 32, "tensor": 2}, "fsdp", 5 * 50),  # two whole rings and a line of two
        ("h100x8", {"fsdp": 8}, "fsdp", 450),
        ("h100x16", {"data": 2, "fsdp": 8}, "data", 50),  # between boxes by their network cards
        ("h100x16", {"fsdp": 16}, "fsdp", 400),
    ],
    ids=str,
)
def test_an_axis_has_the_bandwidth_of_its_slowest_links(name, sizes, axis, bandwidth):
    assert links(name, **sizes)[axis].bandwidth == pytest.approx(bandwidth * GB)


def test_tensor_parallelism_waits_for_its_sums_and_fsdp_hides_its_own():
    tensor, fsdp = blocks_of("mesh={tensor: 4, data: 1}"), blocks_of()
    assert fsdp.exposed == 0 < fsdp.hidden
    # Four all-reduces a layer of [64, 512, 256] in bfloat16.
    assert tensor.exposed == pytest.approx(4 * 8 * links("v4-8", tensor=4)["tensor"].all_reduce(64 * 512 * 256 * 2))
    along = plan_of(SMALL, "v4-16", "mesh={fsdp: 4, tensor: 2}").time
    assert sum(along.parts.values()) == pytest.approx(along.seconds)


RING, WINDOW = "parallel.context_attention=ring", "model.nodes.blocks.attention.window=64"


@pytest.mark.parametrize(
    ("name", "settings", "pairs", "products"),
    [
        # Forward 2 products, backward 7 in two kernels; heads of 64 use half of the matrix unit.
        ("v4-8", (), 512 * 513 // 2 - 384 * 385 // 2, 9 * 2),  # pairs of the last 128 queries of 512
        ("v4-8", (WINDOW,), 128 * 64, 9 * 2),
        ("v5e-4", ("pretrain.attention=xla",), 128 * 512, 5 * 2 + 1),  # one has the head as its rows
        ("v4-8", (RING, WINDOW), 128 * 256, 9 * 2),  # the keys of two of four devices
        ("h100x4", ("pretrain.attention=xla",), 128 * 512, 6),
    ],
    ids=str,
)
def test_a_step_waits_for_the_device_whose_queries_meet_most_keys(name, settings, pairs, products):
    made = plan_of(SMALL, name, "mesh={context: 4}", *settings)
    blocks = made.device.graph["blocks"]
    counted = next(node.flops for node in made.time.nodes if node.name == "blocks")
    cost = blocks.layer.cost((made.device.graph.shapes["embed"],), {"B": 64, "S": 512})
    attention = 8 * 64 * 2 * 256 * pairs * products
    assert counted == pytest.approx(3 * 8 * cost.matmul / 4 + attention, rel=0.02)


def test_products_that_were_kept_are_not_done_again():
    none, dots, block = (blocks_of(f"parallel.remat={name}").flops for name in ("none", "dots", "block"))
    # `block` computes all of the forward pass again but its last product.
    assert none <= dots < block and 0.15 * none < block - dots < 0.3 * none


def test_stages_wait_as_in_gpipe_and_less_in_several_rounds():
    given = "mesh={pipeline: 2, fsdp: 2}", "parallel.pipeline_micro_batches=4"
    for rounds in (1, 2):
        settings = *given, f"parallel.pipeline_rounds={rounds}"
        node, time = blocks_of(*settings), plan_of(SMALL, "v4-8", *settings).time
        assert time.bubble / (node.seconds + time.bubble) == pytest.approx(1 / (4 * rounds + 1))


def sums(name, *overrides):
    """Seconds beside the products, by node: without `fsdp` sums of gradients alone."""
    return {node.name: node.hidden for node in plan_of(SMALL, name, *overrides).time.nodes}


def test_what_replicas_add_up_is_summed_once_in_float32():
    name = "v4-8"
    whole, parts = (sums(name, DATA, *more) for more in ((), (PARTS,)))
    # The compiler sums the products' dtype, but float32 of looked-up vectors.
    once = {"blocks": 2 * LAYERS, "loss": 2 * VECTORS, "embed": 4 * VECTORS}
    added = {"blocks": 4 * LAYERS, "loss": 4 * VECTORS, "embed": 4 * VECTORS}
    link = links(name, data=4)["data"]
    for found, sizes in ((whole, once), (parts, added)):
        assert [found[node] for node in sizes] == pytest.approx([link.all_reduce(size) for size in sizes.values()])
