"""What a run left behind is read, whatever is missing from it or broken in it."""

from pathlib import Path

import pytest
from synthetic_run import write_json

from affinage.report import collect_facts, render


def test_curves_pairs_and_the_analysis_of_a_whole_run_are_read(facts):
    assert [pair.similarity for pair in facts.near_duplicates] == [0.81, 0.86]
    pretrain = facts.training("pretrain")
    assert pretrain.nonfinite_steps == [300] and len(pretrain.curves["loss"]) > 290 and pretrain.analysis is not None
    assert [score.metric for score in facts.evaluations[0].scores if score.headline] == ["acc"] * 6
    assert facts.seconds == pytest.approx(sum(step.seconds or 0 for step in facts.steps))


def test_any_stage_may_be_absent(run: Path):
    facts = collect_facts(run)
    write_json(run / "report" / "manifest.json", {"step": "report", "seconds": 3.0, "started": 1})
    assert collect_facts(run) == facts, "a run takes as long before as after its report"
    absent = "evaluate-sft sft sft-data evaluate-base pretrain tokenize train-tokenizer dedup".split()
    for stage in absent:
        (run / stage / "manifest.json").unlink()  # as if the stage had not finished
        assert stage not in {one.name for one in collect_facts(run).steps}
        assert stage not in ("evaluate-base", "dedup") or render(collect_facts(run))
    assert "<h1>" in render(collect_facts(run / "nothing-here"))
