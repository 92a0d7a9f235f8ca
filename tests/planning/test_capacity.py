"""`affinage plan capacity`: the search for the most layers, with a compiler that is a line."""

import pytest
from small_plans import plan_of

from affinage.hardware.chips import find_slice
from affinage.planning.compiled import CompileReport, capacity, compile_on, shape

GiB = 2**30
WHERE = find_slice("v4-16")


def compiler(fixed, per_layer, room=30.75, silent=False):
    """Refuses what needs more than a line says; as the real one, it may not tell how much."""

    def report(recipe, overrides, where):
        layers = int(overrides[-1].partition("repeat=")[2])
        needed = int((fixed + per_layer * layers) * GiB)
        fits = needed <= room * GiB
        return CompileReport(fits, 0 if silent and not fits else needed)

    return report


@pytest.mark.parametrize(("fixed", "per_layer", "silent"), [(2.0, 0.22, False), (9.0, 0.3, True)])
def test_the_search_ends_at_the_largest_model_that_fits(fixed, per_layer, silent, monkeypatch):
    monkeypatch.setattr("affinage.planning.compiled.compile_on", compiler(fixed, per_layer, silent=silent))
    reports, layers, _, made = capacity("capacity", shape(5120, WHERE), WHERE, tries=20)
    assert layers == int((30.75 - fixed) / per_layer // 2) * 2 == made.device.graph["blocks"].repeat
    assert len(reports) <= (12 if silent else 5)


def test_the_mesh_is_of_the_heads():
    assert shape(10240, find_slice("v4-128"))[-1] == "mesh={fsdp: 4, tensor: 16}"


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
    assert "FAX reached 13.7B at 0.87 s" in out and "refused" in err and "--set" in out
