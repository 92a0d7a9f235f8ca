"""Scores of a user's file stand beside those of the run, marked as published."""

from pathlib import Path

import pytest

from affinage.errors import UserError
from affinage.report import collect_facts, render
from affinage.report.baselines import read_baselines

EXAMPLE = Path(__file__).parents[2] / "examples" / "baselines.yaml"


@pytest.mark.parametrize(("language", "mark"), [("en", "published"), ("fr", "publié")])
def test_published_scores_stand_beside_those_of_the_run(run: Path, change, language: str, mark: str):
    values = {"acc": {"value": 0.3, "stderr": 0.01}, "acc_norm": {"value": 0.3375, "stderr": 0.01}}
    with change(run / "evaluate-sft" / "results.json") as results:
        results["tasks"]["hellaswag"] = {"metrics": values, "items": 100, "shots": 0}
    page, point = render(collect_facts(run), language, read_baselines(EXAMPLE)), "." if language == "en" else ","
    assert f">{mark}<" in page and "Pythia-410M, 300" in page and f"33{point}3" in page, "Pythia-410M's HellaSwag"
    assert page.count(f"33{point}8\u202f±\u202f1") >= 2, "wide and narrow, and of acc_norm as published"
    assert "not checked against the originals" in page
    assert "piqa acc" not in page, "only what this run was evaluated on"


@pytest.mark.parametrize("text", ["a: {scores: {piqa: high}}", "a: {", "[]"])
def test_a_file_that_cannot_be_used_is_one_clear_message(tmp_path: Path, text: str):
    (tmp_path / "scores.yaml").write_text(text)
    for name in ("scores.yaml", "absent.yaml"):
        with pytest.raises(UserError, match=name) as error:
            read_baselines(tmp_path / name)
        assert error.value.fix
