"""What a run left behind is read, whatever is missing from it or broken in it."""

from pathlib import Path

import pytest
from html_page import plain
from synthetic_run import change, write_duplicates, write_json

from affinage.config.load import load_recipe
from affinage.hardware.chips import find_slice
from affinage.planning.plan import make_plan, planned_graph
from affinage.report import collect_facts, render
from affinage.report.facts import read_training
from affinage.report.page import card_facts, summary
from affinage.results import TrainingResult


def test_a_whole_run_is_read_and_its_card_says_the_same_as_the_page_without_the_clock(facts):
    assert [pair.similarity for pair in facts.near_duplicates] == [0.81, 0.86]
    pretrain = facts.training("pretrain")
    assert len(pretrain.curves["loss"]) > 290 and pretrain.analysis is not None
    assert [score.metric for score in facts.evaluations[0].headlines] == ["acc"] * 6
    assert facts.seconds == pytest.approx(sum(step.seconds or 0 for step in facts.steps))
    told = card_facts(facts, "apache-2.0")
    assert told.summary == summary(facts, "en", timed=False) and " in " not in told.summary
    assert told.results["sft"]["lambada_openai"]["perplexity"]["value"] == pytest.approx(52.4)
    assert told.sources[0]["documents"] == 10_690 and told.training["Pretraining: steps"] == 600


def test_what_an_excerpt_of_a_near_duplicate_only_cuts_is_no_difference(run: Path):
    tail = " and so on to the end of both texts" * 30
    write_duplicates(run, "brief" + tail, "much longer, with some more words" + tail)
    pair = {pair.removed_id: pair for pair in collect_facts(run).near_duplicates}["world/000007"]
    for side, own in (pair.kept, "brief"), (pair.removed, "much longer, with some more words"):
        assert {word for text, differs in side if differs for word in text.split()} == {*own.split()}
        assert side[-1] == (" …", False) and 400 < sum(len(text) for text, _ in side) <= 470


def test_the_time_in_which_a_training_stood_still_is_told_apart(run: Path, facts):
    with change(run / "pretrain" / "result.json") as result:
        result["seconds"] |= {"paused": 7200.0, "total": result["seconds"]["total"] + 7200.0}
    with change(run / "pretrain" / "manifest.json") as manifest:
        manifest["seconds"] = 5.0  # of the last start
    stopped = collect_facts(run)
    assert stopped.training("pretrain").result.worked == pytest.approx(94.2) == facts.training("pretrain").result.worked
    assert {step.step: step.seconds for step in stopped.steps}["pretrain"] == pytest.approx(94.2)
    assert summary(stopped, "en") == summary(facts, "en") and "in 3 min 08 s" in plain(summary(facts, "en"))
    assert "stopped 2 h 00 min" in plain(render(stopped))


def test_any_stage_may_be_absent_and_a_validation_without_a_finite_loss_is_no_point(run: Path):
    before = collect_facts(run).training("pretrain").validation
    with (run / "pretrain" / "metrics.jsonl").open("a") as lines:
        for odd in ("null", "[]", '{"a": 3.2}', '{"a": {"loss": NaN}}'):
            lines.write(f'{{"step": 299, "validation": {odd}}}\n')
    facts = collect_facts(run)
    assert facts.training("pretrain").validation == before
    write_json(run / "report" / "manifest.json", {"step": "report", "seconds": 3.0, "started": 1})
    assert collect_facts(run) == facts, "a run takes as long before as after its report"
    for stage in "evaluate-sft sft sft-data evaluate-base pretrain tokenize train-tokenizer dedup".split():
        (run / stage / "manifest.json").unlink()  # as if the stage had not finished
        assert stage not in {one.step for one in collect_facts(run).steps}
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
    write_json(tmp_path / "recipe.json", {"name": "x", **recipe})
    write_json(tmp_path / "split" / "manifest.json", {"step": "split"})
    by_source = {name: {"documents": 1, "bytes": 9} for name in ("novels", "novels-2", "pages", "old")}
    write_json(tmp_path / "split" / "result.json", {"by_source": by_source})
    told = card_facts(collect_facts(tmp_path), "mit")
    assert [one["licence"] for one in told.sources] == ["cc0-1.0", "cc-by-4.0", "mit", "odc-by"]
    assert told.languages == ("en", "fr"), "until somebody has looked"
    shares = {"fr": 5000, "de": 900, "code": 3000, "und": 700, "en": 3}
    by_language = {name: {"documents": 1, "bytes": size} for name, size in shares.items()}
    write_json(tmp_path / "split" / "result.json", {"by_language": by_language})
    assert card_facts(collect_facts(tmp_path), "mit").languages == ("de", "fr"), "3 of 9,603 bytes are a mistake"


SMALL = Path(__file__).parents[1] / "planning" / "small.yaml"
SUMMARY = {
    "steps": 100,
    "tokens": 100 * 64 * 512,
    "seconds": {"compute": 2.0, "data": 0.5, "compile": 7.5, "total": 10.0},
    "memory": {"peak_bytes": 3 * 10**9},
    "devices": {"kind": "TPU v4", "count": 16, "mesh": {"fsdp": 16}},
}


def test_it_is_the_plan_of_the_slice_beside_what_was_measured_as_far_as_the_planner_knows_it(tmp_path: Path):
    """Of a run of the small recipe on 16 chips, as its stages would have left it."""
    loaded, folder = load_recipe(SMALL), tmp_path / "small" / "pretrain"
    graph, recipe = planned_graph(loaded), loaded.recipe.model_dump(mode="json")
    write_json(folder.parent / "recipe.json", recipe)
    write_json(folder / "model.json", {"graph": graph.to_dict(), "context": 512})
    write_json(folder / "result.json", SUMMARY)
    write_json(folder / "manifest.json", {"step": "pretrain", "key": "0" * 64})
    plan, facts = make_plan(loaded.recipe, graph, find_slice("v4-32")), collect_facts(folder.parent)
    predicted = facts.trainings[0].predicted
    expected = {"step_seconds": plan.time.seconds, "seconds": plan.seconds, "memory": plan.memory.total}
    expected["tokens_per_second"] = plan.tokens_per_second
    assert {name: predicted[name] for name in expected} == pytest.approx(expected)
    page = render(facts)
    assert "seconds of a step" in page and "0.0250" in page and "75.0%" in page  # the last: of compilation
    for name, changed in (("dpo", {}), ("pretrain", {"devices": {"kind": "TPU v4", "count": 7}})):
        result = TrainingResult.model_validate(SUMMARY | changed)
        for saved in (recipe, {"pretrain": "of another version"}):
            assert read_training(name, folder, result, saved).predicted == {}
