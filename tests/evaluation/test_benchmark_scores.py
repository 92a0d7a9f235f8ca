"""What the benchmarks of a run print for programs has the errors, and the looks, that they print to be read."""

import json
import sys
from pathlib import Path

import pytest

from affinage.stages.watching import scores

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_every_score_that_is_printed_has_its_standard_error(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import quickstart_scores

    entry = {"metrics": {"acc": {"value": 0.9, "stderr": 0.01}}, "items": 300, "chance": 0.25}
    stopped = {"texts": 50, "stopped": {"value": 1.0, "stderr": 0.0}}
    for model in ("base", "sft", "dpo"):
        (tmp_path / f"evaluate-{model}").mkdir()
        found = {"tasks": {"pocket_facts_en": entry}, "generation": stopped}
        (tmp_path / f"evaluate-{model}" / "results.json").write_text(json.dumps(found))
    (tmp_path / "dpo").mkdir()
    (tmp_path / "dpo" / "summary.json").write_text('{"validation": {"pairs": {"rewards/accuracies": 0.9}}}')
    (tmp_path / "sft").mkdir()
    task = "pocket_agreement_en"
    right = {0: [1, 1, 1, 1, 0, 0], 500: [1, 1, 1, 1, 0, 0], 1000: [0, 0, 0, 0, 1, 0]}  # four lost, one won
    looks = [
        {"step": step, "scores": scores({task: items}), "worse": [], "right": {task: items}}
        for step, items in right.items()
    ]
    (tmp_path / "sft" / "watch.json").write_text(json.dumps({"threshold": 0.01 / 3, "looks": looks}))
    monkeypatch.setattr(quickstart_scores, "run", lambda *_: tmp_path)
    monkeypatch.setattr(sys, "argv", ["quickstart_scores.py"])
    quickstart_scores.main()
    shown, _, told = capsys.readouterr().out.rpartition("\n{")
    lines = {line["name"]: line for line in json.loads("{" + told)["results"]}
    facts = lines["facts, form seen, English, sft"]
    assert (facts["ours"], facts["stderr"], facts["unit"]) == (0.9, 0.01, "share of 300 items")
    assert facts["ratio"] == pytest.approx(3.6) and "90.0 ± 1.0" in shown
    assert lines["answers that end with <|im_end|>, both, dpo"]["stderr"] == 0
    assert "stderr" not in lines["all stages"]
    first, second, last = (lines[f"{task} watched in sft, step {step}"] for step in right)
    assert (first["ours"], last["ours"], last["task"], last["step"]) == (4 / 6, 1 / 6, task, 1000)
    assert last["stderr"] == pytest.approx((5 / 36 / 5) ** 0.5) and last["unit"] == "share of 6 items"
    assert "p" not in first and second["p"] == 1  # nothing changed
    assert last["p"] == lines["least p of a degradation in sft"]["ours"] == 6 / 32  # 4 or 5 of 5 by a coin
    assert "16.7 ± 16.7 at step 1000 (p = 0.19)" in shown


def test_the_last_word_of_lambada_has_its_perplexity_beside_its_accuracy(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import novels_chat
    from run_scores import cells

    metrics = {"acc": {"value": 0.25, "stderr": 0.03}, "perplexity": {"value": 1234.5, "stderr": 67.8}}
    for model in ("base", "sft", "dpo"):
        (tmp_path / f"evaluate-{model}").mkdir()
        found = {"tasks": {"lambada_openai": {"metrics": metrics, "items": 200}}}
        (tmp_path / f"evaluate-{model}" / "results.json").write_text(json.dumps(found))
    rows = [row for row in novels_chat.scores(tmp_path) if row["model"] == "sft"]
    assert [(row["metric"], row["value"]) for row in rows] == [("acc", 0.25), ("perplexity", 1234.5)]
    assert cells({"sft": rows[1]}, percent=False) == "– | 1,234 ± 68 | – | –"
