"""`affinage plan --search`: what it proposes fits, divides and is the fastest."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from affinage.cli import main
from affinage.errors import UserError
from affinage.hardware.slices import find_slice
from affinage.model.activations import batch_shapes
from affinage.parallel import make_mesh
from affinage.planning.plan import make_plan, planned_graph
from affinage.planning.search import Candidate, _candidates, _needs_more, _order, search
from affinage.recipe.load import load_recipe
from affinage.training.job import TrainJob
from affinage.training.program import Program

SMALL = str(Path(__file__).with_name("small.yaml"))
TINY = ["rows.context=32", "model.nodes.blocks.repeat=2", "pretrain.batch=16"]


def found(name, *overrides, count=3):
    loaded = load_recipe(SMALL, overrides)
    graph = planned_graph(loaded)
    return loaded, graph, search(loaded.recipe, graph, find_slice(name), count)


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Half of the choices, to be done in seconds."""
    monkeypatch.setattr("affinage.planning.search.REMATS", ("none", "block"))
    monkeypatch.setattr("affinage.planning.search.MOST_PARTS", 2)


def test_the_winners_are_those_of_all_that_were_estimated():
    overrides = ["rows.context=32", "model.nodes.blocks.repeat=2", "pretrain.batch=1"]
    loaded, graph, result = found("v4-8", *overrides)
    where, every = find_slice("v4-8"), []
    for tried in _candidates(loaded.recipe, graph, where):
        made = make_plan(tried.candidate.put_into(loaded.recipe), graph, where)
        every.append((_order(tried.candidate, made.time.seconds, loaded.recipe.pretrain), tried.candidate))
    every.sort(key=lambda pair: pair[0])
    assert [candidate for candidate, _ in result.best] == [candidate for _, candidate in every[:3]]


def test_the_winner_is_a_step_that_compiles(tmp_path):
    loaded, graph, result = found("v4-8", *TINY)
    winner = result.best[0][0]
    # In float32: XLA's compiler for processors dies of a pipeline's sums in bfloat16.
    chosen = [*winner.overrides(loaded.recipe, "pretrain"), "pretrain.precision.compute=float32"]
    recipe = load_recipe(SMALL, [*TINY, *chosen]).recipe
    assert dict(recipe.mesh) | winner.sizes == dict(recipe.mesh)
    mesh = make_mesh(dict(recipe.mesh), jax.devices())
    batch = {k: np.zeros(leaf.shape, leaf.dtype) for k, leaf in batch_shapes(graph, 16, 32).items()}
    job = TrainJob(
        graph=graph,
        settings=recipe.pretrain,
        mesh=dict(recipe.mesh),
        seed=0,
        feed=None,
        folder=tmp_path,
        parallel=recipe.parallel,
    )
    program = Program(job, mesh, batch)
    _, metrics = program.compile_training()(program.begin(), program.put(batch))
    assert np.isfinite(metrics["loss"])


def test_nothing_is_proposed_that_does_not_fit_and_smaller_devices_get_smaller_steps():
    _, _, result = found("v5e-1", "pretrain.batch=512", count=2)
    for candidate, made in result.best:
        assert made.fits
        assert candidate.micro_batches > 1 or candidate.remat != "none"


def test_what_is_left_out_unseen_needs_no_less_than_what_did_not_fit(monkeypatch):
    """Little is kept of few rows here, and the gradients of a micro-batch are nearly all that it needs."""
    monkeypatch.setattr("affinage.planning.search.MOST_PARTS", 4)
    monkeypatch.setattr("affinage.planning.search.REMATS", ("none", "dots", "block", "full"))
    wide = ["model.nodes.embed.width=1024", "model.nodes.blocks.ffn.width=4096"]
    loaded = load_recipe(SMALL, ["rows.context=32", "pretrain.batch=4", *wide])
    where, graph, needed = find_slice("v5e-1"), planned_graph(loaded), {}
    for one in _candidates(loaded.recipe, graph, where):
        needed[one.candidate] = make_plan(one.candidate.put_into(loaded.recipe), graph, where).memory.total
    pairs = [(one, other) for one in needed for other in needed if _needs_more(one, other)]
    assert len(pairs) > 100
    for one, other in pairs:
        assert needed[one] > 0.99 * needed[other], (one, other)


def test_a_slice_that_nothing_divides_over_is_said():
    with pytest.raises(UserError, match="no mesh of v4-8 divides small"):
        odd = ["pretrain.batch=3", "rows.context=33", "model.nodes.blocks.repeat=3"]
        found("v4-8", *odd, "model.nodes.blocks.attention={heads: 3, head_dim: 64}", "model.nodes.blocks.ffn.width=999")


def test_ties_are_decided_the_same_way_every_time():
    first, second = (found("v4-8", *TINY)[2] for _ in range(2))
    assert [c for c, _ in first.best] == [c for c, _ in second.best]
    assert first.estimated < first.candidates / 4


def test_experts_are_split_only_where_there_are_some():
    loaded = load_recipe("moe-small", ["pretrain.batch=16"])
    axes = [axis for tried in _candidates(loaded.recipe, planned_graph(loaded), find_slice("v4-8")) for axis in
            tried.candidate.sizes]  # fmt: skip
    assert "expert" in axes
    loaded = load_recipe(SMALL)
    meshes = [t.candidate.sizes for t in _candidates(loaded.recipe, planned_graph(loaded), find_slice("v4-8"))]
    assert meshes and all("expert" not in sizes for sizes in meshes)


def test_stages_are_searched_where_the_layers_divide():
    def stages(name, *overrides):
        loaded = load_recipe(SMALL, overrides)
        tried = _candidates(loaded.recipe, planned_graph(loaded), find_slice(name))
        return {one.candidate.sizes.get("pipeline", 1) for one in tried}

    assert stages("v4-8") == {1, 2, 4}
    assert stages("v4-8", "model.nodes.blocks.repeat=6") == {1, 2}
    assert stages("v4-8", "model.nodes.blocks.repeat=3") == {1}
    # The network between slices is crossed by rows, stages or, last, weights, never by a layer's sums.
    loaded = load_recipe(SMALL)
    tried = list(_candidates(loaded.recipe, planned_graph(loaded), find_slice("2xv4-8")))
    assert tried
    for one in tried:
        assert any(one.candidate.sizes.get(axis, 1) % 2 == 0 for axis in ("data", "fsdp", "pipeline"))


def test_what_the_settings_forbid_is_left_out():
    _, _, result = found("v4-8", *TINY, "pretrain.update=layerwise")
    assert len(result.best) == 3
    assert all(candidate.micro_batches == 1 and candidate.mesh[0] == 1 for candidate, _ in result.best)
    assert {candidate.remat for candidate, _ in result.best} == {"block"}  # with others it would be the same program
    with pytest.raises(UserError, match="the optimizer is adafactor"):
        found("v4-8", *TINY, "pretrain.update=layerwise", "pretrain.optimizer={name: adafactor}")
    # Keys do not go round within a pipeline: without it they may.
    loaded = load_recipe(SMALL, [*TINY, "parallel.context_attention=ring"])
    meshes = [tried.candidate.sizes for tried in _candidates(loaded.recipe, planned_graph(loaded), find_slice("v4-8"))]
    assert {"context": 4} in meshes and {"pipeline": 2, "data": 2} in meshes
    assert not any({"context", "pipeline"} <= mesh.keys() for mesh in meshes)


def test_a_model_that_fits_nowhere_is_said():
    with pytest.raises(
        UserError, match="nothing fits: weights and moments of small alone are more than a device of v5e-1"
    ):
        found("v5e-1", "model.nodes.embed.width=16384", "model.nodes.blocks.repeat=64")


def test_the_lines_to_paste_are_the_settings():
    candidate = Candidate((1, 2, 4, 1, 1, 1), 2, "block", "bfloat16")
    # Laid over the recipe's own mesh, as mappings of recipes are, it must be the mesh that was found.
    recipe = load_recipe(SMALL, ["mesh={tensor: 2}"]).recipe
    pasted = yaml.safe_load(candidate.lines(recipe, "pretrain"))["mesh"]
    assert {**recipe.mesh, **pasted} == {**dict.fromkeys(recipe.mesh, 1), "data": 2, "fsdp": 4}
    assert candidate.settings("pretrain")["pretrain"] == {"micro_batches": 2, "optimizer": {"moments": "bfloat16"}}


def test_the_verb_prints_a_table_and_json(capsys):
    words = [SMALL, "--on", "v4-8", "--search", "--best", "2", *(w for o in TINY for w in ("--set", o))]
    with pytest.raises(SystemExit):
        main(["plan", *words])
    assert "to paste into the recipe" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["plan", *words, "--json"])
    said = capsys.readouterr()
    assert "searching: the ways to split" in said.err and "searching: the fastest that fit of" in said.err
    told = json.loads(said.out)
    assert len(told["best"]) == 2 and told["best"][0]["plan"]["fits"]
