"""`affinage plan --search` and `--curve`: what they propose fits, divides and is the fastest."""

import pytest
import yaml
from small_plans import SMALL, plan_of

from affinage.config.load import load_recipe
from affinage.hardware.chips import find_slice
from affinage.planning.compiled import CompileReport, capacity, compile_on, shape
from affinage.planning.plan import NEARLY_FULL, make_plan, planned_graph
from affinage.planning.search import Candidate, candidates, curve, order, search
from run_affinage import refused, set_words

TINY = ["packing.seq_len=32", "model.nodes.blocks.repeat=2", "pretrain.batch_size=4"]
TINY += ["model.nodes.embed.width=64", "model.nodes.blocks.ffn.width=128"]


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Half of the choices, and slices that a test has time for."""
    monkeypatch.setattr("affinage.planning.search.REMATS", ("none", "block"))
    monkeypatch.setattr("affinage.planning.search.MOST_MICRO_BATCHES", 1)
    monkeypatch.setattr("affinage.planning.search.MOST_CHIPS", 8)


def found(name, *overrides, count=3):
    loaded = load_recipe(SMALL, overrides)
    graph = planned_graph(loaded)
    return loaded, graph, search(loaded.recipe, graph, find_slice(name), count)


def divided(name, *overrides, recipe=SMALL):
    """The meshes that a search tries."""
    loaded = load_recipe(recipe, overrides)
    tried = candidates(loaded.recipe, planned_graph(loaded), find_slice(name))
    return [candidate.sizes for candidate, _ in tried]


@pytest.mark.parametrize(
    ("name", "overrides", "remats"),
    [
        ("v4-8", ["packing.seq_len=32", "model.nodes.blocks.repeat=2", "pretrain.batch_size=1"], ("none", "block")),
        # Where memory decides: little is kept of few rows, and gradients of a micro-batch are nearly all it needs.
        pytest.param("v5e-1", ["pretrain.batch_size=512"], ("none", "dots", "block"), marks=pytest.mark.full),
    ],
    ids=["all fit", "few fit"],
)
def test_the_winners_are_the_fastest_of_all_that_fit(name, overrides, remats, monkeypatch):
    monkeypatch.setattr("affinage.planning.search.REMATS", remats)
    monkeypatch.setattr("affinage.planning.search.MOST_MICRO_BATCHES", 2)
    loaded, graph, (best, count, estimated) = found(name, *overrides)
    where, fitting = find_slice(name), []
    every = [candidate for candidate, _ in candidates(loaded.recipe, graph, where)]
    for candidate in every:
        made = make_plan(candidate.put_into(loaded.recipe), graph, where)
        if made.memory.total <= NEARLY_FULL * made.capacity:
            fitting.append((order(candidate, made.time.seconds), candidate))
    fitting.sort(key=lambda pair: pair[0])
    assert [candidate for candidate, _ in best] == [candidate for _, candidate in fitting[:3]]
    assert (len(fitting) == len(every) == count) == (name == "v4-8")
    assert all(made.fits for _, made in best)
    assert estimated < count or name == "v5e-1"  # where three hardly fit, all are looked at


ODD = "model.nodes.blocks={repeat: 3, attention: {heads: 3, head_dim: 64}, ffn: {width: 999}}"
TOO_WIDE = ["model.nodes.embed.width=16384", "model.nodes.blocks.repeat=64"]


@pytest.mark.parametrize(
    ("name", "overrides", "named"),
    [
        ("v4-8", [ODD, "pretrain.batch_size=3", "packing.seq_len=33"], "no mesh of v4-8"),
        pytest.param("v5e-1", TOO_WIDE, "weights and moments alone", marks=pytest.mark.full),
    ],
    ids=["nothing divides", "nothing fits"],
)
def test_a_search_that_finds_nothing_names_why(name, overrides, named):
    refused(lambda: found(name, *overrides), match=named)


def test_where_nothing_leaves_a_tenth_what_fits_nearly_is_proposed_and_said_so(affinage, monkeypatch):
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


def test_the_verb_speaks_json(answer):
    best = answer("plan", SMALL, "--on", "v4-8", "--search", *set_words(*TINY))["best"]
    assert len(best) == 3 and best[0]["fits"] == "yes" and best[0]["settings"]["mesh"]


@pytest.mark.full
def test_weak_scaling_keeps_the_rows_of_a_device_and_strong_scaling_the_batch():
    loaded = load_recipe(SMALL)
    graph = planned_graph(loaded)
    weak, strong = (curve(loaded.recipe, graph, kind, find_slice("v4-8")) for kind in ("weak", "strong"))
    assert [made.where.name for made, _ in weak] == ["v4-8", "v4-16"]
    assert [made.device.rows for made, _ in weak] == [64, 128]
    assert {made.device.rows for made, _ in strong} == {64}
    assert weak[0][1] == strong[0][1] == 1.0 and weak[-1][1] > strong[-1][1]
    assert strong[0][0].time.seconds > strong[1][0].time.seconds
    wrong = load_recipe(SMALL, ["pretrain.optimizer_in_backward=true", "pretrain.gradient_accumulation_steps=2"])
    refused(lambda: curve(wrong.recipe, graph, "weak", find_slice("v4-8")), match="gradient_accumulation_steps")


# ---- the most layers, with a compiler that is a line

GiB = 2**30
WHERE = find_slice("v4-16")


def compiler(fixed, per_layer, silent=False):
    """Refuses what needs more than a line says; as the real one, it may not tell how much."""

    def report(recipe, overrides, where):
        layers = int(overrides[-1].partition("repeat=")[2])
        needed = int((fixed + per_layer * layers) * GiB)
        fits = needed <= 30.75 * GiB
        return CompileReport(fits, 0 if silent and not fits else needed)

    return report


@pytest.mark.parametrize(("fixed", "per_layer", "silent"), [(2.0, 0.22, False), (9.0, 0.3, True)])
def test_the_search_ends_at_the_largest_model_that_fits(fixed, per_layer, silent, monkeypatch):
    monkeypatch.setattr("affinage.planning.compiled.compile_on", compiler(fixed, per_layer, silent=silent))
    reports, layers, _, made = capacity("capacity", shape(5120, WHERE), WHERE, tries=20)
    assert layers == int((30.75 - fixed) / per_layer // 2) * 2 == made.device.graph["blocks"].repeat
    assert len(reports) <= (12 if silent else 5)


def test_the_mesh_is_of_whole_heads():
    assert shape(10240, find_slice("v4-128"))[-1] == "mesh={fsdp: 4, tensor: 16}"
    for width in (200, 0):
        refused(shape, width, WHERE, match="no whole heads of 128")


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
    weights = report.argument_bytes / 3  # and two moments, all in bfloat16
    assert report.temporary_bytes < 0.7 * weights


def test_the_verb_compares_with_what_fax_reached(affinage, monkeypatch):
    monkeypatch.setattr("affinage.planning.compiled.compile_on", compiler(2.0, 0.22))
    _, out, err = affinage("plan", "capacity", "--on", "v4-16", "--width", "5120")
    assert "FAX: parameters 13,700,000,000, seconds 0.9 s" in out and "does not fit" in err and "--set" in out
