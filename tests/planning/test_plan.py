"""`affinage plan` as its user sees it, what it warns of, and what it proposes."""

from types import SimpleNamespace

import pytest
from small_plans import SMALL, blocks_of, plan_of

from affinage.config.load import load_recipe
from affinage.errors import EXIT_USER_ERROR
from affinage.hardware.chips import find_slice
from affinage.planning.estimate import present
from affinage.planning.plan import compare, planned_graph
from run_affinage import set_words


def test_time_money_and_utilisation_are_of_one_step():
    made = plan_of(SMALL, "v4-8", "hardware.price=10")
    assert made.seconds == pytest.approx(100 * made.time.seconds)
    assert made.cost == pytest.approx(10 * 4 * made.seconds / 3600)
    assert made.tokens_per_second == pytest.approx(64 * 512 / made.time.seconds)
    assert made.mfu == pytest.approx(made.facts.flops / 100 / made.time.seconds / (4 * 275e12))
    # Nothing multiplies faster than the table says.
    assert 0 < made.mfu < made.where.chip.achievable


def test_a_price_is_that_of_the_chips_it_was_given_for():
    rented = "hardware.slice=v5e-16", "hardware.price=0.5"
    own, other = (plan_of(SMALL, name, *rented) for name in ("v5e-4", "v4-8"))
    assert own.price == 0.5 and other.price == find_slice("v4-8").chip.price
    assert plan_of(SMALL, "v5e-4", *reversed(rented)).price == 0.5  # in whatever order


def test_a_price_by_set_is_of_the_chips_of_on_and_a_base_has_none_for_the_slice_of_its_child(answer, tmp_path):
    (tmp_path / "rented.yaml").write_text(f"base: {SMALL}\nname: rented\nhardware: {{slice: h100x8, price: 2.5}}\n")
    child = tmp_path / "child.yaml"
    child.write_text("base: rented.yaml\nname: child\nhardware: {slice: a100x8}\n")
    assert load_recipe(child).recipe.hardware.price is None
    for words in ((), ("--on", "v4-8")):
        assert answer("plan", str(child), *words, "--set", "hardware.price=9")["price_per_chip_hour"] == 9


@pytest.mark.parametrize(
    ("name", "given", "word", "warned"),
    [
        ("v4-8", ("model.nodes.blocks.attention.heads=2",), "matrix unit", False),
        ("v6e-4", ("model.nodes.blocks.attention.heads=2",), "matrix unit", True),  # of 256, and heads have 128
        ("v4-8", ("pretrain.batch_size=4", "packing.seq_len=32"), "small batch", True),
        ("v4-8", (), "small batch", False),
        ("h100x4", ("pretrain.batch_size=4", "packing.seq_len=32"), "small batch", True),  # kernels take their start
        ("v5e-1", ("pretrain.batch_size=4096", "mesh={fsdp: 1}"), "--search", True),
    ],
    ids=str,
)
def test_what_could_be_better_is_warned_of(name, given, word, warned):
    assert any(word in warning for warning in plan_of(SMALL, name, *given).warnings) == warned


def test_dropout_of_attention_is_warned_of_with_what_it_costs():
    dropping, without = (plan_of(SMALL, "v4-8", f"model.nodes.blocks.attention.dropout={p}") for p in (0.1, 0))
    (warning,) = [warning for warning in dropping.warnings if "dropout" in warning]
    for made in (dropping, without):
        assert f"{made.time.seconds:.3g} s" in warning
    assert dropping.time.seconds > 1.5 * without.time.seconds


def test_a_gpu_is_planned_with_the_attention_that_a_run_takes_there():
    auto, xla, cudnn = (plan_of(SMALL, "h100x4", f"pretrain.attention={name}") for name in ("auto", "xla", "cudnn"))
    assert (auto.memory, auto.time) == (cudnn.memory, cudnn.time)
    # Of 8 layers, 16 rows of a device and 4 heads: the probabilities of all pairs, in bfloat16.
    kept = 8 * 16 * 4 * 512 * 512 * 2
    assert xla.memory.activations - cudnn.memory.activations > kept / 2  # of which a kernel keeps a row's sum and more
    assert blocks_of("pretrain.attention=xla", name="h100x4").seconds > blocks_of(name="h100x4").seconds


def test_slices_are_compared_fitting_ones_first_by_the_cost_of_a_token(monkeypatch):
    monkeypatch.setattr("affinage.planning.plan.COMPARED", ("v5e-1", "v4-8", "h100x4", "v6e-4", "v4-4096"))
    loaded = load_recipe(SMALL, ["pretrain.batch_size=256"])
    plans, ((refused, _),) = compare(loaded.recipe, planned_graph(loaded))
    keys = [(not made.fits, made.cost_per_billion) for made in plans]
    assert keys == sorted(keys) and len(plans) == 4 and refused.name == "v4-4096"


ON, ACCUMULATED = (SMALL, "--on", "v4-8"), "pretrain.gradient_accumulation_steps=2"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((SMALL, "--which", "--search"), "--search"),
        ((SMALL, "--curve", "weak"), "processor"),
        ((SMALL, "--on", "v5e-256", "--set", "mesh={fsdp: 8}"), "fsdp 8 does not fit 256 devices"),
        ((SMALL, "--training", "dpo"), "`dpo`"),
        ((SMALL, "--set", "pretrain=null"), "trains nothing"),
        # What a run refuses is not planned.
        ((*ON, *set_words("mesh={pipeline: 2, fsdp: 2}", "pretrain.attention=cudnn")), "cudnn"),
        ((*ON, *set_words("pretrain.optimizer_in_backward=true", ACCUMULATED)), "gradient_accumulation_"),
        ((*ON, *set_words("mesh={expert: 4}", "parallel.sharding.batch=[data, fsdp]")), "expert = 4"),
    ],
    ids=str,
)
def test_mistakes_are_one_message(affinage, words, named):
    status, out, err = affinage("plan", *words)
    assert status == EXIT_USER_ERROR and named in err and "Traceback" not in err and not out


def test_what_jax_was_given_of_a_gpu_is_what_there_is():
    given = {"bytes_limit": 50 * 2**30}
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3", memory_stats=lambda: given)
    assert present([gpu]).memory_per_device == given["bytes_limit"]
