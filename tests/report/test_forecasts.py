"""What a report says was to be expected of a training, on the devices that it ran on."""

import json
from pathlib import Path

import pytest

from affinage.hardware.slices import find_slice, slice_of
from affinage.planning.plan import make_plan, planned_graph
from affinage.recipe.load import load_recipe
from affinage.report import collect_facts, render
from affinage.report.forecasts import predicted

SMALL = Path(__file__).parents[1] / "planning" / "small.yaml"


@pytest.fixture
def run(tmp_path):
    """A run of the small recipe on 16 chips, as its stages would have left it."""
    loaded = load_recipe(SMALL)
    summary = {
        "steps": 100,
        "tokens": 100 * 64 * 512,
        "seconds": {"compute": 2.0, "data": 0.5, "compile": 7.5, "total": 10.0},
        "memory": {"peak_bytes": 3 * 10**9},
        "devices": {"kind": "TPU v4", "count": 16, "mesh": {"fsdp": 16}},
    }
    folder = tmp_path / "small" / "pretrain"
    folder.mkdir(parents=True)
    (folder.parent / "recipe.json").write_text(json.dumps(loaded.recipe.model_dump(mode="json")))
    (folder / "model.json").write_text(json.dumps({"graph": planned_graph(loaded).to_dict(), "context": 512}))
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "manifest.json").write_text(json.dumps({"stage": "pretrain", "key": "0" * 64, "summary": summary}))
    return folder.parent


def test_it_is_the_plan_of_the_slice_beside_what_was_measured(run):
    loaded = load_recipe(SMALL)
    plan = make_plan(loaded.recipe, planned_graph(loaded), find_slice("v4-32"))
    facts = collect_facts(run)
    rows = {row.quantity: row for row in facts.trainings[0].compared}
    assert rows["step_seconds"].predicted == pytest.approx(plan.time.seconds)
    assert rows["step_seconds"].measured == pytest.approx(0.025)
    assert rows["seconds"].predicted == pytest.approx(plan.seconds)
    assert rows["tokens_per_second"].predicted == pytest.approx(plan.tokens_per_second)
    assert (rows["memory"].predicted, rows["memory"].measured) == (plan.memory.total, 3 * 10**9)
    page = render(facts)
    assert "time of a step" in page and "25.0\u202fms" in page
    assert "75.0%" in page  # of the training was compilation


def test_so_it_is_for_preferences(run):
    preferring = "{steps: 100, batch: 64, sources: [chats.jsonl], schedule: {peak: 1.0e-5, floor: 0}}"
    loaded = load_recipe(SMALL, ["pretrain=null", f"dpo={preferring}"])
    plan = make_plan(loaded.recipe, planned_graph(loaded), find_slice("v4-32"))
    summary = json.loads((run / "pretrain" / "summary.json").read_text())
    found = predicted("dpo", run / "pretrain", summary, loaded.recipe.model_dump(mode="json"))
    assert found["step_seconds"] == pytest.approx(plan.time.seconds) and found["memory"] == plan.memory.total


def test_a_processor_is_one_device_however_many_it_shows(run):
    summary = json.loads((run / "pretrain" / "summary.json").read_text())
    recipe = json.loads((run / "recipe.json").read_text())
    on = {"kind": "cpu", "count": 8, "mesh": {"fsdp": 8}}
    eight = predicted("pretrain", run / "pretrain", summary | {"devices": on}, recipe)
    one = predicted("pretrain", run / "pretrain", summary | {"devices": {"kind": "cpu", "count": 1}}, recipe)
    assert eight == one and eight["step_seconds"] > 0


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("dpo", {}),
        ("pretrain", {"tokens": None, "images": 900}),
        ("pretrain", {"devices": {"kind": "TPU v99", "count": 4}}),
        ("pretrain", {"devices": {"kind": "TPU v4", "count": 7}}),
        ("sft", {}),
    ],
)
def test_what_the_planner_does_not_know_is_left_out(run, name, changed):
    summary = json.loads((run / "pretrain" / "summary.json").read_text()) | changed
    assert predicted(name, run / "pretrain", summary, json.loads((run / "recipe.json").read_text())) == {}
    assert predicted(name, run / "pretrain", summary, {"pretrain": "of another version"}) == {}


@pytest.mark.parametrize(
    ("kind", "devices", "name"),
    [
        ("TPU v3", 8, "v3-8"),
        ("TPU v4", 16, "v4-32"),
        ("TPU v5 lite", 16, "v5e-16"),
        ("TPU v6 lite", 8, "v6e-8"),
        ("TPU7x", 8, "tpu7x-8"),
        ("NVIDIA H100 80GB HBM3", 16, "h100x16"),
        ("cpu", 8, "cpu"),
    ],
)
def test_devices_are_found_as_the_slice_they_make(kind, devices, name):
    found = slice_of(kind, devices)
    assert found is not None and found == find_slice(name)
    assert found.platform == "cpu" or found.devices == devices
