"""What a run left behind is read, whatever is missing from it or broken in it."""

from pathlib import Path

import pytest
from synthetic_run import write_json

from affinage.report import collect_facts, render
from affinage.report.card import card_facts


def of_one_stage(folder: Path, stage: str, result: dict, recipe: dict | None = None) -> Path:
    write_json(folder / stage / "manifest.json", {"step": stage})
    write_json(folder / stage / "result.json", result)
    write_json(folder / "recipe.json", {"name": "x", **(recipe or {})})
    return folder


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


def test_the_card_has_a_licence_for_each_source_and_the_languages_of_the_text(tmp_path: Path):
    sources = [
        {"path": "books/novels.jsonl", "license": "cc0-1.0"},
        {"path": "other/novels.txt", "license": "cc-by-4.0"},
        {"path": "web/", "name": "pages", "license": "odc-by"},
        {"path": "of another version", "unknown": 1, "name": "old", "license": "mit"},
    ]
    recipe = {"data": {"sources": sources, "languages": ["en", "fr"]}}
    by_source = {name: {"documents": 1, "bytes": 9} for name in ("novels", "novels-2", "pages", "old")}
    told = card_facts(collect_facts(of_one_stage(tmp_path, "split", {"by_source": by_source}, recipe)), "mit")
    assert [one["licence"] for one in told.sources] == ["cc0-1.0", "cc-by-4.0", "mit", "odc-by"]
    assert told.languages == ("en", "fr"), "until somebody has looked"
    shares = {"fr": 5000, "de": 900, "code": 3000, "und": 700, "en": 3}
    summary = {"by_language": {name: {"documents": 1, "bytes": size} for name, size in shares.items()}}
    told = card_facts(collect_facts(of_one_stage(tmp_path, "split", summary, recipe)), "mit")
    assert told.languages == ("de", "fr"), "3 of 9,603 bytes are a mistake"
