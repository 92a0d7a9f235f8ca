"""What a report says was to be expected of a training, on the devices that it ran on."""

import json
from pathlib import Path

import pytest

from affinage.config.load import load_recipe
from affinage.hardware.chips import find_slice
from affinage.planning.plan import make_plan, planned_graph
from affinage.report import collect_facts, render
from affinage.report.facts import read_training
from affinage.results import TrainingResult

SMALL = Path(__file__).parents[1] / "planning" / "small.yaml"
SUMMARY = {
    "steps": 100,
    "tokens": 100 * 64 * 512,
    "seconds": {"compute": 2.0, "data": 0.5, "compile": 7.5, "total": 10.0},
    "memory": {"peak_bytes": 3 * 10**9},
    "devices": {"kind": "TPU v4", "count": 16, "mesh": {"fsdp": 16}},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of the small recipe on 16 chips, as its stages would have left it."""
    loaded, folder = load_recipe(SMALL), tmp_path / "small" / "pretrain"
    folder.mkdir(parents=True)
    (folder.parent / "recipe.json").write_text(json.dumps(loaded.recipe.model_dump(mode="json")))
    (folder / "model.json").write_text(json.dumps({"graph": planned_graph(loaded).to_dict(), "context": 512}))
    (folder / "result.json").write_text(json.dumps(SUMMARY))
    (folder / "manifest.json").write_text(json.dumps({"step": "pretrain", "key": "0" * 64}))
    return folder.parent


def test_it_is_the_plan_of_the_slice_beside_what_was_measured(run: Path):
    loaded = load_recipe(SMALL)
    plan = make_plan(loaded.recipe, planned_graph(loaded), find_slice("v4-32"))
    facts = collect_facts(run)
    predicted = facts.trainings[0].predicted
    expected = {"step_seconds": plan.time.seconds, "seconds": plan.seconds, "memory": plan.memory.total}
    expected["tokens_per_second"] = plan.tokens_per_second
    assert {name: predicted[name] for name in expected} == pytest.approx(expected)
    page = render(facts)
    assert "time of a step" in page and "25.0\u202fms" in page and "75.0%" in page  # the last: of compilation


@pytest.mark.parametrize(("name", "changed"), [("dpo", {}), ("pretrain", {"devices": {"kind": "TPU v4", "count": 7}})])
def test_what_the_planner_does_not_know_is_left_out(run: Path, name: str, changed: dict):
    recipe = json.loads((run / "recipe.json").read_text())
    result = TrainingResult.model_validate(SUMMARY | changed)
    for settings in (recipe, {"pretrain": "of another version"}):
        assert read_training(name, run / "pretrain", result, settings).predicted == {}
