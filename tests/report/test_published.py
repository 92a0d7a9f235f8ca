"""Published results stand beside ours in the report, marked as published; a run without such benchmarks has none."""

import html
import json
import re

import pytest
from synthetic_run import build_run

from affinage.evaluation.benchmarks import JULIAN
from affinage.report.page import write_report
from affinage.report.strings import strings


@pytest.mark.parametrize(("language", "mark"), [("en", "published"), ("fr", "publié")])
def test_bars_and_curves_say_who_published(tmp_path, language, mark):
    run = build_run(tmp_path, language=language)
    for stage in ("evaluate-base", "evaluate-sft"):
        path = run / stage / "results.json"
        results = json.loads(path.read_text())
        results["tasks"] = {name: entry for name, entry in results["tasks"].items() if name not in JULIAN}
        path.write_text(json.dumps(results))
    assert "Pythia-410M" not in write(run, tmp_path)
    for stage, value in (("evaluate-base", 0.3125), ("evaluate-sft", 0.3375)):
        path = run / stage / "results.json"
        results = json.loads(path.read_text())
        scores = {"acc": {"value": 0.3, "stderr": 0.01}, "acc_norm": {"value": value, "stderr": 0.01}}
        results["tasks"]["hellaswag"] = {"metrics": scores, "items": 100, "shots": 0}
        path.write_text(json.dumps(results))
    page = write(run, tmp_path)
    assert page.count("Pythia-410M") >= 1 and f"Pythia ({mark})" in page
    assert f"33{'.' if language == 'en' else ','}3" in page, "Pythia-410M's HellaSwag"
    errors = 'class="spread"', f"33{'.' if language == 'en' else ','}8\u202f±\u202f1"
    assert all(page.count(error) >= 2 for error in errors), "wide and narrow"
    words = strings(language)
    curve = page[page.index(f"<h3>{words['published_tokens']}") : page.index(f"<h3>{words['published_tuned']}")]
    assert 'class="error s0"' in curve
    # 300 billion tokens beside ours, two million: an axis from 0 would crowd all others at its end.
    (frame, *_) = (json.loads(html.unescape(found)) for found in re.findall(r'data-frame="([^"]*)"', curve))
    low, high = frame["x"]
    assert frame["log"] and 0 < low < 1e7 and high > 2.9e11
    bars = page[page.index(f"<h3>{words['published']}") : page.index(f"<h3>{words['published_tokens']}")]
    assert f">Pythia-410M ({mark})<" in bars and ">Pythia-410M<" not in page
    assert "not checked against the originals" in page
    assert "lambada_openai" not in page, "only what this run was judged on"
    number = "10,042" if language == "en" else "10\u202f042"
    other = words["other_items_note"].format(tasks=f"hellaswag 100 ({mark} {number})")
    assert page.count(other) == 3, "under bars, curves and what tuning did"
    for stage in ("evaluate-base", "evaluate-sft"):
        path = run / stage / "results.json"
        results = json.loads(path.read_text())
        results["tasks"]["hellaswag"]["items"] = 10_042
        path.write_text(json.dumps(results))
    assert words["other_items_note"].partition(":")[0] not in write(run, tmp_path), "the benchmark itself"


def write(run, folder):
    write_report(run, folder / "report.html")
    return (folder / "report.html").read_text(encoding="utf-8")


def test_charts_mark_what_was_asked_in_the_chat_template(tmp_path):
    run, words = build_run(tmp_path), strings("en")
    assert words["in_chat_note"] not in write(run, tmp_path)
    scores = {"metrics": {"acc_norm": {"value": 0.3, "stderr": 0.01}}, "items": 100, "shots": 0}
    for stage, templated in (("evaluate-base", False), ("evaluate-sft", True)):
        path = run / stage / "results.json"
        results = json.loads(path.read_text())
        results["tasks"]["hellaswag"] = scores | {"chat_template": templated}
        results["tasks"]["pocket_arithmetic"]["chat_template"] = True
        path.write_text(json.dumps(results))
    page = write(run, tmp_path)
    tuned, ours = words["sft_model"], words["this_model"]
    charts = page[page.index(f"<h3>{words['published']}</h3>") :]
    assert f"{tuned} †" in charts and f"{words['base']} †" not in charts, "bars"
    assert f"{ours} †" in charts and f">{ours}<" in charts, "points of both"
    first = page[: page.index(f"<h3>{words['published']}</h3>")]
    assert f"hellaswag († {tuned})" in first and "pocket_arithmetic †" in first and "pocket_facts_en †" not in first
    assert charts.count(words["in_chat_note"]) == 3 and first.count(words["in_chat_note"]) == 1
    head = page[: page.index("<table")]
    assert f"1 {words['in_chat']}" in head or f"2 {words['in_chat']}" in head
