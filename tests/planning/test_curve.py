"""Weak and strong scaling on paper."""

import json
from pathlib import Path

import pytest

from affinage.cli import main
from affinage.errors import UserError
from affinage.hardware.slices import find_slice
from affinage.planning.curve import Point, curve
from affinage.planning.plan import make_plan, planned_graph
from affinage.recipe.load import load_recipe

SMALL = str(Path(__file__).with_name("small.yaml"))


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Slices that a test has time for."""
    monkeypatch.setattr("affinage.planning.curve.MOST_CHIPS", 16)
    monkeypatch.setattr("affinage.planning.curve._CONTEXT", (1,))


def test_weak_scaling_keeps_the_rows_of_a_device_and_strong_scaling_the_batch():
    loaded = load_recipe(SMALL)
    graph = planned_graph(loaded)
    weak, strong = (curve(loaded.recipe, graph, kind, find_slice("v4-8")) for kind in ("weak", "strong"))
    assert [point.plan.where.name for point in weak] == ["v4-8", "v4-16", "v4-32"]
    assert [point.plan.split.rows for point in weak] == [64, 128, 256]
    assert {point.plan.split.rows for point in strong} == {64}
    assert weak[0].efficiency == strong[0].efficiency == 1.0
    assert weak[-1].efficiency > strong[-1].efficiency
    times = [point.plan.time.seconds for point in strong]
    assert times == sorted(times, reverse=True)
    for point in (*weak, *strong):
        assert sum(int(part.split()[1][:-1]) for part in point.why.split(", ")) == pytest.approx(100, abs=2)


@pytest.mark.parametrize(
    ("settings", "said"),
    [("parallel.remat=dots", "whatever `dots` would keep"), ("pretrain.micro_batches=2", "micro_batches is 2")],
    ids=["remat", "micro-batches"],
)
def test_settings_that_go_with_no_mesh_are_said_and_not_that_nothing_fits(settings, said):
    loaded = load_recipe(SMALL, ["pretrain.update=layerwise", settings])
    with pytest.raises(UserError, match=said):
        curve(loaded.recipe, planned_graph(loaded), "weak", find_slice("v4-8"))


def test_a_curve_of_gpus_goes_on_over_boxes():
    loaded = load_recipe(SMALL)
    points = curve(loaded.recipe, planned_graph(loaded), "weak", find_slice("h100x4"))
    assert [point.plan.where.name for point in points] == ["h100x4", "h100x8", "h100x16"]


def test_what_a_step_is_counts_the_stages_that_wait():
    loaded = load_recipe(SMALL, ["mesh={pipeline: 2, fsdp: 2}"])
    made = make_plan(loaded.recipe, planned_graph(loaded), find_slice("v4-8"))
    shares = dict(part.split() for part in Point(made, 1.0).why.split(", "))
    assert shares["bubble"] == f"{made.time.bubble / made.time.seconds:.0%}" != "0%"
    assert sum(int(share[:-1]) for share in shares.values()) == pytest.approx(100, abs=2)


def test_the_verb_prints_a_line_for_each_slice(capsys):
    with pytest.raises(SystemExit):
        main(["plan", SMALL, "--on", "v4-8", "--curve", "strong"])
    assert "v4-32" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["plan", SMALL, "--on", "v4-8", "--curve", "strong", "--json"])
    assert len(json.loads(capsys.readouterr().out)["curve"]) == 3


def test_a_curve_that_begins_later_than_asked_says_so(capsys):
    with pytest.raises(SystemExit):
        main(["plan", SMALL, "--on", "v4-8", "--curve", "strong", "--set", "pretrain.batch=1024"])
    printed = capsys.readouterr().out
    assert "The curve begins at" not in printed
    with pytest.raises(SystemExit):
        main(["plan", SMALL, "--on", "v4-8", "--curve", "strong", "--set", "pretrain.batch=2048"])
    printed = capsys.readouterr().out
    assert "The curve begins at v4-16: on v4-8" in printed
