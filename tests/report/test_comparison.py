"""Runs beside each other: what is said of them is in their folders, and only that; scores are compared in pairs."""

import json
from pathlib import Path

import pytest
from html_page import Page
from synthetic_run import build_run, write_json

from affinage.config.yaml import brief
from affinage.report import collect_facts
from affinage.report.page import Entrant, comparison, differing_settings, render_comparison


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs, of which `bare` has no answers; `wide` is right where `small` is wrong, and twice as often again."""
    folder = tmp_path_factory.mktemp("runs")
    for name, steps in (("small", 60), ("wide", 120), ("bare", 60)):
        run = build_run(folder, steps=steps, name=name)
        settings = json.loads((run / "recipe.json").read_text())
        settings |= {"pretrain": {"steps": steps, "optimizer": {"name": "adamw"}}, "description": f"this is {name}"}
        write_json(run / "recipe.json", settings)
        if name != "bare":
            right = [float((item % 4 == 0) == (name == "small")) for item in range(40)]
            lines = [{"id": item, "hash": f"h{item}", "acc": value} for item, value in enumerate(right)]
            (run / "evaluate-sft" / "items").mkdir()
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (run / "evaluate-sft" / "items" / "quiz.jsonl").write_text(text)
    return folder


def compared(runs: Path, *names: str):
    return comparison([Entrant(name, collect_facts(runs / name), runs / name / "evaluate-sft") for name in names])


def test_only_what_differs_is_listed_by_its_key_and_in_short():
    ours = {"name": "a", "x": {"y": 1, "z": [1, 2]}, "report": {"language": "en"}, "none": None}
    theirs = {"name": "b", "x": {"y": 2, "z": [1, 2]}, "report": {"language": "fr"}, "more": {}, "none": None}
    assert differing_settings([ours, theirs]) == {"x.y": (1, 2), "more": (None, {})}
    ours, theirs = {"data": [{"path": "a"}], "sft": {"steps": 9, "root": ""}}, {"data": [{"path": "c"}], "sft": None}
    assert differing_settings([ours, theirs]) == {"data.0.path": ("a", "c"), "sft": ({"steps": 9, "root": ""}, None)}
    assert len(brief({"tasks": ["a long name of a task"] * 9})) == 60


def test_the_page_says_what_the_runs_say_in_both_languages(runs: Path):
    found = compared(runs, "small", "wide")
    page = Page(render_comparison(found))
    for expected in ("pretrain.steps", "60", "120", "quiz", "25.0%", "75.0%", "+50.0 pts", "1,443,968", "Loss: Pre"):
        assert expected in page.shown, expected
    assert "this is wide" not in page.shown, "a description is no setting that matters"
    sections = {"#runs", "#differing", "#losses", "#judged", "#differences"}
    assert {link["href"] for link in page.all("a")} == sections
    french = Page(render_comparison(found, "fr"))
    assert "Réglages qui diffèrent" in french.shown and "75,0 %" in french.shown and "Settings" not in french.shown


def test_three_runs_of_which_one_has_no_answers(runs: Path, tmp_path: Path, affinage):
    words = ("compare", "small", "wide", "bare", "--runs", str(runs), "--html", str(tmp_path / "c.html"), "--json")
    status, out, _ = affinage(*words)
    told = json.loads(out)
    assert status == 0 and [run["name"] for run in told["runs"]] == ["small", "wide", "bare"]
    assert told["settings"] == [{"key": "pretrain.steps", "values": [60, 120, 60]}]
    results = json.loads((runs / "small" / "evaluate-sft" / "results.json").read_text())["tasks"]
    stated = {task: {name: one["value"] for name, one in found["metrics"].items()} for task, found in results.items()}
    scores = told["runs"][0]["scores"]
    assert {task: {name: one["value"] for name, one in found.items()} for task, found in scores.items()} == stated
    (difference,) = told["differences"]
    assert (difference["from"], difference["to"], difference["difference"]) == ("small", "wide", 0.5)
    assert difference["low"] > 0, "the paired test finds it real"
    assert (tmp_path / "c.html").read_text().startswith("<!doctype html>")
