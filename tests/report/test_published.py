"""Published results stand beside ours in the report, marked as published; a run without such benchmarks has none."""

import html
import itertools
import json
import re
from pathlib import Path

import pytest

from affinage.report import collect_facts, render
from affinage.report.strings import strings

STAGES = ("evaluate-base", "evaluate-sft")


def score(value: float, items: int = 100, **more: object) -> dict:
    scores = {"acc": {"value": 0.3, "stderr": 0.01}, "acc_norm": {"value": value, "stderr": 0.01}}
    return {"metrics": scores, "items": items, "num_fewshot": 0, **more}


@pytest.mark.parametrize(("language", "mark"), [("en", "published"), ("fr", "publié")])
def test_bars_and_curves_say_who_published(run: Path, change, language: str, mark: str):
    def page(values: tuple[float, ...], items: int = 100) -> str:
        for stage, value in zip(STAGES, values):
            with change(run / stage / "results.json") as results:
                results["tasks"]["hellaswag"] = score(value, items)
        return render(collect_facts(run), language)

    for stage in STAGES:
        with change(run / stage / "results.json") as results:
            del results["tasks"]["lambada_openai"]
    assert "Pythia-410M" not in page(())
    shown, words = page((0.3125, 0.3375)), strings(language)
    point = "." if language == "en" else ","
    assert f"Pythia ({mark})" in shown and f"33{point}3" in shown, "Pythia-410M's HellaSwag"
    assert shown.count(f"33{point}8\u202f±\u202f1") >= 2, "wide and narrow"
    starts = [shown.index(f"<h3>{words[name]}") for name in ("published", "published_tokens", "published_tuned")]
    bars, curve = (shown[start:end] for start, end in itertools.pairwise(starts))
    assert 'stroke="var(--s0)" stroke-width="2"' in curve
    # 300 billion tokens beside ours, half a million: an axis from 0 would crowd all others at its end.
    frame = json.loads(html.unescape(re.findall(r'data-frame="([^"]*)"', curve)[0]))
    assert frame["log"] and 0 < frame["x"][0] < 1e7 and frame["x"][1] > 2.9e11
    assert f">Pythia-410M ({mark})<" in bars and ">Pythia-410M<" not in shown
    assert "not checked against the originals" in shown
    assert "lambada_openai" not in shown, "only what this run was judged on"
    number = "10,042" if language == "en" else "10\u202f042"
    other = words["other_items_note"].format(tasks=f"hellaswag 100 ({mark} {number})")
    assert shown.count(other) == 3, "under bars, curves and what tuning did"
    assert words["other_items_note"].partition(":")[0] not in page((0.3, 0.3), 10_042), "the benchmark itself"
