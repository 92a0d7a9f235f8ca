"""`affinage plan capacity`: the search for the most layers, with a compiler that is a line."""

import json

import pytest

from affinage.cli import main
from affinage.errors import UserError
from affinage.hardware.slices import find_slice
from affinage.planning.capacity import capacity, shape
from affinage.planning.compiled import Verdict, compile_on
from affinage.planning.plan import make_plan, planned_graph
from affinage.recipe.load import load_recipe

GiB = 2**30


def compiler(fixed, per_layer, room=30.75, silent=False):
    """Refuses what needs more than a line says; as the real one, it may not tell how much."""

    def verdict(recipe, overrides, where, counted):
        layers = int(overrides[-1].partition("repeat=")[2])
        needed = int((fixed + per_layer * layers) * GiB)
        fits = needed <= room * GiB
        return Verdict(fits, 0 if silent and not fits else needed)

    return verdict


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize(("fixed", "per_layer"), [(2.0, 0.22), (0.1, 0.226), (9.0, 0.3), (0.5, 0.5)])
def test_the_search_ends_at_the_largest_model_that_fits(fixed, per_layer, silent):
    where = find_slice("v4-16")
    found = capacity(
        "capacity", shape(5120, where), where, tries=20, compiler=compiler(fixed, per_layer, silent=silent)
    )
    expected = int((30.75 - fixed) / per_layer // 2) * 2
    assert found.largest.layers == expected
    assert len({one.layers for one in found.attempts}) == len(found.attempts) <= 12
    if not silent:
        assert len(found.attempts) <= 5
    assert found.plan.facts.parameters == found.largest.parameters
    assert found.fax.parameters == 13.7e9


def test_it_stops_after_so_many_compilations():
    where = find_slice("v4-16")
    found = capacity("capacity", shape(5120, where), where, tries=2, compiler=compiler(2.0, 0.2))
    assert len(found.attempts) == 2 and found.largest.verdict.fits


def test_the_mesh_is_of_the_heads():
    assert shape(5120, find_slice("v4-16"))[-1] == "mesh={fsdp: 1, tensor: 8}"
    assert shape(10240, find_slice("v4-128"))[-1] == "mesh={fsdp: 4, tensor: 16}"
    assert shape(16384, find_slice("v4-512"))[-1] == "mesh={fsdp: 4, tensor: 64}"
    with pytest.raises(UserError, match="no whole heads"):
        shape(5000, find_slice("v4-16"))


def test_the_estimate_knows_that_layers_are_updated_in_place():
    def memory(update):
        loaded = load_recipe("capacity", ["model.nodes.blocks.repeat=20", f"pretrain.update={update}"])
        return make_plan(loaded.recipe, planned_graph(loaded), find_slice("v4-16")).memory

    whole, layerwise = memory("whole"), memory("layerwise")
    assert whole.weights == layerwise.weights
    assert layerwise.gradients < 0.2 * whole.weights < whole.gradients


@pytest.mark.full
def test_the_real_compiler_holds_no_gradients_of_all_layers():
    pytest.importorskip("libtpu", reason="needs `pip install affinage[tpu]`")
    small = ["model.nodes.embed.width=1024", "model.nodes.blocks.attention.heads=8", "model.nodes.blocks.repeat=24"]
    small += ["model.nodes.blocks.ffn.width=4096", "tokenizer.vocabulary=2048", "model.nodes.embed.vocab=2048"]
    verdict = compile_on("capacity", [*small, "mesh.tensor=4"], find_slice("v4-8"))
    assert verdict.fits
    weights = verdict.argument_bytes / 3  # and two moments, all in bfloat16
    assert verdict.temporary_bytes < 0.7 * weights


def test_the_verb_says_what_fax_reached(capsys, monkeypatch):
    monkeypatch.setattr("affinage.planning.capacity.capacity.__kwdefaults__", {**capacity.__kwdefaults__, "compiler":
                        compiler(2.0, 0.22)})  # fmt: skip
    words = ["plan", "capacity", "--on", "v4-16", "--width", "5120"]
    with pytest.raises(SystemExit):
        main(words)
    told = capsys.readouterr()
    assert "FAX reached 13.7B at 0.87 s" in told.out and "refused" in told.err and "--set" in told.out
    with pytest.raises(SystemExit):
        main([*words, "--json"])
    assert json.loads(capsys.readouterr().out)["fax"]["ratio"] > 2.8
