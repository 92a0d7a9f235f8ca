"""Runs beside each other: what is said of them is in their folders, and only that."""

import json
import re
from pathlib import Path

import pytest
from synthetic_run import build_run, write_json
from test_page import Page

from affinage.cli import main
from affinage.errors import UserError
from affinage.recipe.yaml_text import brief
from affinage.report.comparison import comparison, differing_settings, entrant
from affinage.report.comparison_page import render_comparison, setting_values


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for number, (name, steps) in enumerate((("small", 300), ("wide", 600), ("bare", 300))):
        run = build_run(folder, steps=steps, name=name)
        settings = json.loads((run / "recipe.json").read_text())
        settings["pretrain"] = {"steps": steps, "optimizer": {"name": "adamw"}}
        settings["description"] = f"number {number}"
        write_json(run / "recipe.json", settings)
        for item in range(40 if name != "bare" else 0):
            right = float(item % 4 != 0) if name == "wide" else float(item % 4 == 0)
            (run / "evaluate-sft" / "items").mkdir(exist_ok=True)
            with (run / "evaluate-sft" / "items" / "quiz.jsonl").open("a") as file:
                file.write(json.dumps({"id": item, "hash": f"h{item}", "acc": right}) + "\n")
    return folder


def _compared(runs: Path, *names: str):
    judged = [runs / name / "evaluate-sft" for name in names]
    places = zip(names, judged, strict=True)
    return comparison([entrant(name, runs / name, place) for name, place in places if (place / "items").is_dir()])


def test_only_what_differs_is_listed_by_its_key():
    ours = {"name": "a", "x": {"y": 1, "z": [1, 2]}, "report": {"language": "en"}, "none": None}
    theirs = {"name": "b", "x": {"y": 2, "z": [1, 2]}, "report": {"language": "fr"}, "more": {}, "none": None}
    assert [(one.key, one.values) for one in differing_settings([ours, theirs])] == [
        ("x.y", (1, 2)),
        ("more", (None, {})),
    ]


def test_of_lists_and_sections_only_what_differs_is_told_in_short():
    common = {"kind": "text", "name": "", "where": {}, "split": "train", "megabytes": None}
    ours = {"data": {"sources": [{"path": "a", **common}, {"path": "b", **common}]}, "sft": {"steps": 9, "root": ""}}
    theirs = {"data": {"sources": [{"path": "c", **common}]}, "sft": None}
    found = differing_settings([ours, theirs])
    assert [(one.key, *setting_values(one)) for one in found] == [
        ("data.sources.0.path", "a", "c"),
        ("data.sources.1", "{path: b, kind: text, split: train}", "–"),
        ("sft", "{steps: 9}", "–"),
    ]
    assert len(brief({"tasks": ["a long name of a task"] * 9})) == 60


def test_the_page_says_what_the_runs_say(runs):
    page = Page(text := render_comparison(_compared(runs, "small", "wide")))
    shown = " ".join("".join(page.texts).replace("\u202f", " ").replace("\xa0", " ").split())
    for expected in ("pretrain.steps", "300", "600", "quiz", "25.0%", "75.0%", "+50.0 pts", "1,443,968", "Loss in"):
        assert expected in shown, expected
    assert "number 1" not in shown, "a description is no setting that matters"
    assert {link["href"] for link in page.all("a")} == {
        "#runs", "#differing", "#losses", "#judged", "#differences"
    }  # fmt: skip
    assert len(page.all("script")) == 1 and not page.all("img") and "{{" not in re.sub(r"<script>.*", "", text)


def test_the_page_in_french(runs):
    page = Page(render_comparison(_compared(runs, "small", "wide"), "fr"))
    shown = "".join(page.texts)
    assert page.all("html")[0]["lang"] == "fr"
    assert "Réglages qui diffèrent" in shown and "75,0\u202f%" in shown and "Settings" not in shown


def test_three_runs_of_which_one_has_no_answers(runs, tmp_path, capsys):
    words = ["compare", *("small", "wide", "bare"), "--runs", str(runs), "--html", str(tmp_path / "c.html"), "--json"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    told = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0
    assert [run["name"] for run in told["runs"]] == ["small", "wide", "bare"]
    assert told["settings"] == [{"key": "pretrain.steps", "values": [300, 600, 300]}]
    assert [(one["from"], one["to"], one["difference"]) for one in told["differences"]] == [("small", "wide", 0.5)]
    assert (tmp_path / "c.html").read_text().startswith("<!doctype html>")


def test_however_many_are_compared_each_file_of_answers_is_read_once(runs: Path, monkeypatch: pytest.MonkeyPatch):
    read: list[Path] = []
    text_of = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, *a, **k: read.append(self) or text_of(self, *a, **k))
    found = _compared(runs, "small", "wide", "wide")
    assert len(found.paired) == 2
    files = [path for path in read if path.suffix == ".jsonl" and path.parent.name == "items"]
    assert len(files) == 3 and len({*files}) == 2  # of each that is named, once


@pytest.mark.parametrize("html", [False, True])
def test_what_was_not_asked_alike_and_what_a_metric_is_are_said(tmp_path, capsys, html):
    for name, prompt, score in (("a", "p", -5.2), ("b", "q", -4.9)):
        (tmp_path / name / "items").mkdir(parents=True)
        line = {"id": 0, "filter": "none", "prompt_hash": prompt, "perplexity": score}
        lines = "".join(json.dumps({**line, "hash": str(n)}) + "\n" for n in range(3))
        (tmp_path / name / "items" / "lambada_openai.jsonl").write_text(lines)
    words = ["compare", str(tmp_path / "a"), str(tmp_path / "b"), *(["--html", str(tmp_path / "c")] if html else [])]
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = (tmp_path / "c").read_text() if html else " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0 and "perplexity " not in said.replace("higher is better; perplexity is", "")
    assert "higher is better" in said and "log_likelihood" in said
    assert "Not asked alike" in said and "lambada_openai (items with another prompt or right answer: 3)" in said


def test_results_of_no_run_must_have_items_in_common(runs, tmp_path):
    (tmp_path / "items").mkdir()
    (tmp_path / "items" / "other.jsonl").write_text('{"id": 0, "hash": "x", "acc": 1}\n')
    alone = entrant("mine", None, tmp_path)
    with pytest.raises(UserError, match="no item of a benchmark in common"):
        comparison([alone, entrant("small", runs / "small", runs / "small" / "evaluate-sft")])
