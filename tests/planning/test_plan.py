"""`affinage plan` as its user sees it, what it warns of, and what it proposes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml
from small_plans import SMALL, TUNED, blocks_of, plan_of, planned

from affinage.config.load import load_recipe
from affinage.config.recipe import CheckpointSettings
from affinage.errors import EXIT_USER_ERROR
from affinage.hardware.chips import find_slice
from affinage.pipeline.models import checkpoint_count
from affinage.planning.compiled import CompileReport, capacity, compile_on, shape
from affinage.planning.estimate import present
from affinage.planning.plan import NEARLY_FULL, compare, default_slice, make_plan
from affinage.planning.search import Candidate, candidates, curve, order, search
from run_affinage import refused, set_words


def test_time_money_and_utilisation_are_of_one_step():
    made = plan_of(SMALL, "v4-8", "hardware.price=10")
    assert made.seconds == pytest.approx(100 * made.time.seconds)
    assert made.cost == pytest.approx(10 * 4 * made.seconds / 3600)
    assert made.tokens_per_second == pytest.approx(64 * 512 / made.time.seconds)
    assert made.mfu == pytest.approx(made.facts.flops / 100 / made.time.seconds / (4 * 275e12))
    # Nothing multiplies faster than the table says.
    assert 0 < made.mfu < made.where.chip.achievable
    for cost, text in ((1234.5, "$1,234 at"), (0.0812, "$0.081 at"), (0.000129, "$0.00013 at"), (0.0, "$0 at")):
        assert text in replace(made, cost=cost).outcome


def test_checkpoints_that_stay_are_counted_with_the_one_that_is_being_saved():
    for keep_every, begun, steps, count in ((None, 0, 200, 4), (80, 0, 2000, 27), (40, 0, 200, 5), (40, 80, 300, 6)):
        rules = CheckpointSettings(every_steps=40, keep_last=3, keep_every=keep_every)
        assert checkpoint_count(rules, begun, steps) == count


def test_a_price_is_that_of_the_chips_it_was_given_for():
    rented = "hardware.slice=v5e-16", "hardware.price=0.5"
    own, other = (plan_of(SMALL, name, *rented) for name in ("v5e-4", "v4-8"))
    assert own.price == 0.5 and other.price == find_slice("v4-8").chip.price
    assert plan_of(SMALL, "v5e-4", *reversed(rented)).price == 0.5  # in whatever order
    assert refused(default_slice, load_recipe(SMALL, ["hardware.slice=h100x9"]).recipe).where == "hardware.slice"


def test_a_price_by_set_is_of_the_chips_of_on_and_a_base_has_none_for_the_slice_of_its_child(answer, tmp_path):
    (tmp_path / "rented.yaml").write_text(f"base: {SMALL}\nname: rented\nhardware: {{slice: h100x8, price: 2.5}}\n")
    child = tmp_path / "child.yaml"
    child.write_text("base: rented.yaml\nname: child\nhardware: {slice: a100x8}\n")
    assert load_recipe(child).recipe.hardware.price is None
    for words in ((), ("--on", "v4-8")):
        assert answer("plan", str(child), *words, "--set", "hardware.price=9")["price_per_chip_hour"] == 9


@pytest.mark.parametrize(("name", "given", "word", "warned"), [
    ("v4-8", ("model.nodes.blocks.attention.heads=2",), "matrix unit", False),
    ("v6e-4", ("model.nodes.blocks.attention.heads=2",), "matrix unit", True),  # of 256, and heads have 128
    ("v4-8", ("pretrain.batch_size=4", "packing.seq_len=32"), "small batch", True),
    ("v4-8", (), "small batch", False),
    ("v4-8", ("pretrain.batch_size=4096", "pretrain.steps=20"), "large batch: 2.097M tokens a step", True),
    ("v4-8", (), "large batch", False),
    ("v4-8", ("pretrain.batch_size=64", "pretrain.steps=1000000"), "few tokens: 32,768 tokens a step", True),
    ("v4-8", ("pretrain.batch_size=512", "pretrain.steps=1000000"), "learn", False),
    ("h100x4", ("pretrain.batch_size=4", "packing.seq_len=32"), "small batch", True),  # kernels take their start
    ("v5e-1", ("pretrain.batch_size=4096", "mesh={fsdp: 1}"), "--search", True),
    ("v4-8", ("pretrain.per_device_batch_size=8",), "rows a device", True),
    ("v4-8", ("pretrain.per_device_batch_size=8", "hardware.slice=v4-8"), "rows a device", False),
    ("v4-8", (f"sft={TUNED}", "pretrain=null"), "num_epochs: 1 may end sft earlier", True),
], ids=str)  # fmt: skip
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


def test_slices_are_compared_fitting_ones_first_by_the_cost_of_a_token(affinage, monkeypatch):
    monkeypatch.setattr("affinage.planning.plan.COMPARED", ("v5e-1", "v4-8", "h100x4", "v6e-4", "v4-4096"))
    plans, (left_out,) = compare(*planned(SMALL, "pretrain.batch_size=1024"), make_plan)
    keys = [(not made.fits, made.cost_per_billion) for made in plans]
    assert keys == sorted(keys) and len(plans) == 4 and left_out.name == "v4-4096" and not plans[-1].row()["cost"]
    told = affinage("plan", SMALL, "--which", *set_words("pretrain.batch_size=1024"))[1]
    table = told.partition("\nrefused")[0].splitlines()[2:]
    assert max(map(len, table)) <= 80 and {"tokens", "price", "cost"} <= {*table[0].split()}
    told = affinage("plan", SMALL, "--which", *set_words("mesh={fsdp: 1}"))[1]
    assert "refused: v4-8, h100x4, v6e-4, v4-4096\n  v4-8: the mesh" in told and told.count("Let one axis") == 1
    assert "52.43M" in table[1] and table[-1].split()[-4:] == ["–", "1.2", "–", "–"], "no cost of what does not fit"


ON, ACCUMULATED = (SMALL, "--on", "v4-8"), "pretrain.gradient_accumulation_steps=2"


@pytest.mark.parametrize(("words", "named"), [
    ((SMALL, "--which", "--search"), "one slice at a time"),
    ((SMALL, "--curve", "weak"), "processor"),
    ((SMALL, "--on", "v5e-256", "--set", "mesh={fsdp: 8}"), "fsdp 8 does not fit 256 devices"),
    ((SMALL, "--training", "dpo"), "`dpo`"),
    ((SMALL, "--set", "pretrain=null"), "trains nothing"),
    # What a run refuses is not planned.
    ((*ON, *set_words("mesh={pipeline: 2, fsdp: 2}", "pretrain.attention=cudnn")), "cudnn"),
    ((*ON, *set_words("pretrain.optimizer_in_backward=true", ACCUMULATED)), "gradient_accumulation_"),
    ((*ON, *set_words("mesh={expert: 4}", "parallel.sharding.batch=[data, fsdp]")), "expert = 4"),
], ids=str)  # fmt: skip
def test_mistakes_are_one_message(affinage, words, named):
    status, out, err = affinage("plan", *words)
    assert status == EXIT_USER_ERROR and named in err and "Traceback" not in err and not out


def test_what_jax_was_given_of_a_gpu_is_what_there_is():
    given = {"bytes_limit": 50 * 2**30}
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3", memory_stats=lambda: given)
    assert present([gpu]).memory_per_device == given["bytes_limit"]


# ---- `--search` and `--curve`: what they propose fits, divides and is the fastest

TINY = ["packing.seq_len=32", "model.nodes.blocks.repeat=2", "pretrain.batch_size=4"]
TINY += ["model.nodes.embed.width=64", "model.nodes.blocks.ffn.width=128"]


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Half of the choices, and slices that a test has time for."""
    monkeypatch.setattr("affinage.planning.search.REMATS", ("none", "block"))
    monkeypatch.setattr("affinage.planning.search.MOST_MICRO_BATCHES", 1)
    monkeypatch.setattr("affinage.planning.search.MOST_CHIPS", 8)


def divided(name, *overrides, recipe=SMALL):
    """The meshes that a search tries."""
    return [candidate.sizes for candidate, _ in candidates(*planned(recipe, *overrides), find_slice(name))]


@pytest.mark.parametrize(("name", "overrides", "remats"), [
    ("v4-8", ["packing.seq_len=32", "model.nodes.blocks.repeat=2", "pretrain.batch_size=1"], ("none", "block")),
    # Where memory decides: little is kept of few rows, and gradients of a micro-batch are nearly all it needs.
    pytest.param("v5e-1", ["pretrain.batch_size=512"], ("none", "dots", "block"), marks=pytest.mark.full),
], ids=["all fit", "few fit"])  # fmt: skip
def test_the_winners_are_the_fastest_of_all_that_fit(name, overrides, remats, monkeypatch):
    monkeypatch.setattr("affinage.planning.search.REMATS", remats)
    monkeypatch.setattr("affinage.planning.search.MOST_MICRO_BATCHES", 2)
    (recipe, graph), where, fitting = planned(SMALL, *overrides), find_slice(name), []
    best, count, estimated = search(recipe, graph, where, 3)
    every = [candidate for candidate, _ in candidates(recipe, graph, where)]
    for candidate in every:
        made = make_plan(candidate.put_into(recipe), graph, where)
        if made.memory.total <= NEARLY_FULL * made.capacity:
            fitting.append((order(candidate, made.time.seconds), candidate))
    fitting.sort(key=lambda pair: pair[0])
    assert [candidate for candidate, _ in best] == [candidate for _, candidate in fitting[:3]]
    assert (len(fitting) == len(every) == count) == (name == "v4-8")
    assert all(made.fits for _, made in best)
    assert estimated < count or name == "v5e-1"  # where three hardly fit, all are looked at


ODD = "model.nodes.blocks={repeat: 3, attention: {heads: 3, head_dim: 64}, ffn: {width: 999}}"
TOO_WIDE = ["model.nodes.embed.width=16384", "model.nodes.blocks.repeat=64"]


@pytest.mark.parametrize(("name", "overrides", "named"), [
    ("v4-8", [ODD, "pretrain.batch_size=3", "packing.seq_len=33"], "no mesh of v4-8"),
    pytest.param("v5e-1", TOO_WIDE, "weights and moments alone", marks=pytest.mark.full),
], ids=["nothing divides", "nothing fits"])  # fmt: skip
def test_a_search_that_finds_nothing_names_why(name, overrides, named):
    refused(search, *planned(SMALL, *overrides), find_slice(name), 3, match=named)


def test_where_nothing_leaves_a_tenth_what_fits_nearly_is_proposed_and_said_so(affinage, answer, monkeypatch):
    best = answer("plan", SMALL, "--on", "v4-8", "--search", *set_words(*TINY))["best"]
    assert len(best) == 3 and best[0]["fits"] == "yes" and best[0]["settings"]["mesh"]
    for module in ("plan", "search"):
        monkeypatch.setattr(f"affinage.planning.{module}.NEARLY_FULL", 0.0)
    status, out, _ = affinage("plan", SMALL, "--on", "v5e-1", "--search", *set_words(*TINY))
    assert status == 0 and "to paste into the recipe" in out and "More than 90 %" in out and "--compile" in out


def test_only_axes_of_which_there_is_something_are_tried():
    assert any("expert" in sizes for sizes in divided("v4-8", "pretrain.batch_size=16", recipe="moe-small"))
    assert not any("expert" in sizes for sizes in divided("v4-8"))
    for repeat, stages in ((6, {1, 2}), (3, {1})):
        tried = divided("v4-8", f"model.nodes.blocks.repeat={repeat}")
        assert {sizes.get("pipeline", 1) for sizes in tried} == stages


def test_the_lines_to_paste_and_the_overrides_are_the_settings():
    candidate = Candidate((1, 2, 4, 1, 1, 1), 2, "block")
    # Laid over the recipe's own mesh, as mappings of recipes are, it must be the mesh that was found.
    recipe = load_recipe(SMALL, ["mesh={tensor: 2}"]).recipe
    pasted = yaml.safe_load(yaml.safe_dump(candidate.settings(recipe)))
    assert {**recipe.mesh, **pasted["mesh"]} == {**dict.fromkeys(recipe.mesh, 1), "data": 2, "fsdp": 4}
    set_again = load_recipe(SMALL, ["mesh={tensor: 2}", *candidate.overrides(recipe)]).recipe
    assert dict(set_again.mesh) == {**recipe.mesh, **pasted["mesh"]} and set_again.parallel.remat == "block"
    assert set_again.pretrain.gradient_accumulation_steps == 2


@pytest.mark.full
def test_weak_scaling_keeps_the_rows_of_a_device_and_strong_scaling_the_batch():
    weak, strong = (curve(*planned(SMALL), kind, find_slice("v4-8")) for kind in ("weak", "strong"))
    assert [made.where.name for made, _ in weak] == ["v4-8", "v4-16"]
    assert [made.device.rows for made, _ in weak] == [64, 128]
    assert {made.device.rows for made, _ in strong} == {64}
    assert weak[0][1] == strong[0][1] == 1.0 and weak[-1][1] > strong[-1][1]
    assert strong[0][0].time.seconds > strong[1][0].time.seconds
    wrong = planned(SMALL, "pretrain.optimizer_in_backward=true", "pretrain.gradient_accumulation_steps=2")
    refused(curve, *wrong, "weak", find_slice("v4-8"), match="gradient_accumulation_steps")


# ---- the most layers, with a compiler that is a line

GiB = 2**30
WHERE = find_slice("v4-16")


def compiler(fixed, per_layer, silent=False):
    """Refuses what needs more than a line says; as the real one, it may not tell how much."""

    def report(recipe, overrides, where):
        needed = int((fixed + per_layer * int(overrides[-1].partition("repeat=")[2])) * GiB)
        return CompileReport(fits := needed <= 30.75 * GiB, 0 if silent and not fits else needed)

    return report


@pytest.mark.parametrize(("fixed", "per_layer", "silent"), [(2.0, 0.22, False), (9.0, 0.3, True)])
def test_the_search_ends_at_the_largest_model_that_fits(fixed, per_layer, silent, monkeypatch):
    monkeypatch.setattr("affinage.planning.compiled.compile_on", compiler(fixed, per_layer, silent=silent))
    reports, layers, _, made = capacity("capacity", shape(5120, WHERE), WHERE, tries=20)
    assert layers == int((30.75 - fixed) / per_layer // 2) * 2 == made.device.graph["blocks"].repeat
    assert len(reports) <= (12 if silent else 5)


def test_the_mesh_is_of_whole_heads():
    assert shape(10240, find_slice("v4-128"))[-1] == "mesh={fsdp: 4, tensor: 16}"
    assert all(refused(shape, width, WHERE, match="no whole heads of 128") for width in (200, 0))


def test_the_estimate_knows_that_layers_are_updated_in_place():
    whole, layerwise = (
        plan_of("capacity", "v4-16", "model.nodes.blocks.repeat=20", f"pretrain.optimizer_in_backward={update}").memory
        for update in ("false", "true")
    )
    assert whole.weights == layerwise.weights
    assert layerwise.gradients < 0.2 * whole.weights < whole.gradients


@pytest.mark.full
def test_the_real_compiler_holds_no_gradients_of_all_layers():
    pytest.importorskip("libtpu", reason="needs `pip install affinage[tpu]`")
    small = ["model.nodes.embed.width=1024", "model.nodes.blocks.attention.heads=8", "model.nodes.blocks.repeat=24"]
    small += ["model.nodes.blocks.ffn.width=4096", "tokenizer.vocab_size=2048", "model.nodes.embed.vocab=2048"]
    report = compile_on("capacity", [*small, "mesh.tensor=4"], find_slice("v4-8"))
    assert report.fits
    assert report.temporary_bytes < 0.7 * report.argument_bytes / 3  # of weights and two moments, all in bfloat16


def test_what_does_not_fit_is_said_first_and_has_no_speed_or_cost_whoever_finds_it(affinage, answer, monkeypatch):
    for needed, words in ((99, ()), (99, ("--compile",)), (1, ("--compile",))):
        given = set_words("pretrain.batch_size=64" if needed == 99 and words else "pretrain.batch_size=4096")
        report = CompileReport(needed < 99, needed * GiB, message="it needs 99 GiB")
        monkeypatch.setattr("affinage.planning.compiled.compile_on", lambda *_, report=report: report)
        status, out, err = affinage("plan", SMALL, "--on", "v5e-1", *words, *given)
        second, fits = out.splitlines()[1], needed < 99
        assert status == 0 and second.startswith("does not fit") == ("--search" in out) == (not fits)
        assert ("$" in out) == ("tokens/s" in out) == ("seconds of a step" in out) == fits, out
        assert (answer("plan", SMALL, "--on", "v5e-1", *words, *given)["cost"] is not None) == fits
        assert ("compiling for v5e-1" in err) == bool(words)
    assert "cpu, this machine (for another: --on" in affinage("plan", SMALL)[1].splitlines()[0]


def test_the_verb_compares_with_what_fax_reached(affinage, monkeypatch):
    monkeypatch.setattr("affinage.planning.compiled.compile_on", compiler(2.0, 0.22))
    _, out, err = affinage("plan", "capacity", "--on", "v4-16", "--width", "5120")
    assert "FAX: parameters 13,700,000,000, seconds 0.9 s" in out and "--set" in out
    assert "compiling for v4-16" in err and "does not fit" in err
