"""Published results stand beside ours in the report, marked as published; a run without such benchmarks has none."""

import json

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
    assert "not checked against the originals" in page
    assert "lambada_openai" not in page, "only what this run was judged on"


def write(run, folder):
    write_report(run, folder / "report.html")
    return (folder / "report.html").read_text(encoding="utf-8")
