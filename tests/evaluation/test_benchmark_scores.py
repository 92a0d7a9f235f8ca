"""What the quickstart's benchmark prints for programs has the errors that its table has."""

import json
import sys
from pathlib import Path

import pytest

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
    monkeypatch.setattr(quickstart_scores, "run", lambda *_: tmp_path)
    monkeypatch.setattr(sys, "argv", ["quickstart_scores.py"])
    quickstart_scores.main()
    table, _, told = capsys.readouterr().out.rpartition("\n{")
    lines = {line["name"]: line for line in json.loads("{" + told)["results"]}
    facts = lines["facts, form seen, English, sft"]
    assert (facts["ours"], facts["stderr"], facts["unit"]) == (0.9, 0.01, "share of 300 items")
    assert facts["ratio"] == pytest.approx(3.6) and "90.0 ± 1.0" in table
    assert lines["answers that end with <|im_end|>, both, dpo"]["stderr"] == 0
    assert "stderr" not in lines["all stages"]
