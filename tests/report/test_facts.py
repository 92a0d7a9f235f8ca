"""What a run left behind is read, whatever is missing from it."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from synthetic_run import build_run, write_json

from affinage.report import collect_facts, render
from affinage.report.cleaning import ThresholdCost, Thresholds
from affinage.report.comparison import Entrant, comparison
from affinage.report.differences import differences
from affinage.report.sections import epochs, funnel
from affinage.report.summary import verdict

anything = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
SUMMARY_KEYS = (
    *(
        "documents_in",
        "bytes_out",
        "removed",
        "samples",
        "thresholds",
        "benchmarks",
        "matches",
        "by_language",
        "languages",
        "round_trip",
        "train",
        "validation",
    ),
    *("parameters", "tokens", "seconds", "devices", "resumed_at", "predicted", "tasks", "bits_per_byte"),
    *("generation", "flops_per_step", "validation_documents", "saves"),
)


def test_a_whole_run_is_read(tmp_path: Path) -> None:
    facts = collect_facts(build_run(tmp_path))
    assert [flow.stage for flow in facts.flows] == ["collect", "clean", "deduplicate", "decontaminate", "split"]
    assert facts.flows[1].removals[0].reason == "too short" and facts.flows[1].removals[0].count == 412
    assert [pair.similarity for pair in facts.near_duplicates] == [0.81, 0.86]
    assert facts.near_duplicates[1].kept_text.startswith("Japan is")
    assert facts.thresholds and facts.thresholds.shown == (0, 1)
    assert facts.thresholds.costs[0].documents_kept == (799 / 800, 0.8)
    assert (
        facts.contamination and facts.contamination.benchmarks[0].found == 1 and facts.contamination.boilerplate == 42
    )
    assert facts.tokenizer and facts.tokenizer.vocabulary == 3072
    assert [(row.name, row.bytes_per_token) for row in facts.tokenizer.sources] == [("pocket-world", 4.26)]
    assert [(each.name, each.round_trip_exact) for each in facts.compared_tokenizers] == [("gpt2_vocab.bpe", 10_689)]
    pretrain = facts.training("pretrain")
    assert pretrain and pretrain.parameters == 1_443_968 and pretrain.broken_steps == (900,)
    assert [point[0] for point in pretrain.curves["loss"]] == sorted(point[0] for point in pretrain.curves["loss"])
    assert {one.quantity for one in pretrain.compared} >= {"parameters", "flops", "seconds", "flops_per_second"}
    assert [evaluation.model for evaluation in facts.evaluations] == ["base", "sft"]
    headline = [score.metric for score in facts.evaluations[0].scores if score.headline]
    assert headline == ["acc"] * 6
    assert facts.finished and facts.finished.year == 2026
    assert facts.seconds == pytest.approx(sum(stage.seconds or 0 for stage in facts.stages))


def test_what_was_judged_by_hand_is_read_of_the_models_that_the_run_has(tmp_path: Path) -> None:
    run = build_run(tmp_path)
    keys = {"pretrain": "aa", "sft": "bb"}
    for stage, key in keys.items():
        write_json(run / stage / "request.json", {"key": key})

    def judged(name: str, training: object, **tasks: float) -> None:
        found = {task: {"metrics": {"acc": {"value": value}}, "items": 9} for task, value in tasks.items()}
        write_json(tmp_path / "evaluations" / name / "results.json", {"training": training, "tasks": found})
        times[name] = len(times) + 1
        os.utime(tmp_path / "evaluations" / name / "results.json", (times[name], times[name]))

    times: dict[str, int] = {}
    judged("of-another-run", {"key": "cc"}, piqa=0.1)
    judged("tuned", {"key": "bb"}, piqa=0.2)
    judged("checkpoint", {"key": "aa", "step": 900}, piqa=0.3)
    judged("base", {"key": "aa"}, piqa=0.4, boolq=0.5)
    judged("base-again-as-its-last-checkpoint", {"key": "aa", "step": 1800}, piqa=0.6)
    judged("older", None, piqa=0.7)
    judged("broken", {"key": ["aa"], "step": "x"}, piqa=0.8)
    (tmp_path / "evaluations" / "cut").mkdir()
    (tmp_path / "evaluations" / "cut" / "results.json").write_text('{"training": {"key": "aa"')
    found = [
        (one.model, one.step, {score.task: score.value for score in one.scores}) for one in collect_facts(run).by_hand
    ]
    assert found == [
        ("base", 900, {"piqa": 0.3}),
        ("base", None, {"piqa": 0.6, "boolq": 0.5}),
        ("sft", None, {"piqa": 0.2}),
    ]
    page = render(collect_facts(run))
    assert "Judged by affinage eval" in page and "Base, step 900" in page
    assert "Pythia-410M (published)" in page, "PIQA, of which the recipe says nothing"


def test_the_time_in_which_a_training_was_stopped_is_told_apart(tmp_path: Path) -> None:
    run = build_run(tmp_path)
    undisturbed = collect_facts(run)
    for name in ("summary.json", "manifest.json"):
        told = json.loads((run / "pretrain" / name).read_text())
        accounts = (told if name == "summary.json" else told["summary"])["seconds"]
        accounts |= {"paused": 7200.0, "total": accounts["total"] + 7200.0}
        if name == "manifest.json":
            told["seconds"] = 5.0  # of the last start
        write_json(run / "pretrain" / name, told)
    facts = collect_facts(run)
    pretrain, before = facts.training("pretrain"), undisturbed.training("pretrain")
    assert pretrain and before and pretrain.worked == pytest.approx(94.2) == before.worked
    assert next(stage.seconds for stage in facts.stages if stage.name == "pretrain") == pytest.approx(94.2)
    assert verdict(facts, "en") == verdict(undisturbed, "en") and "in 3 min 08 s" in _spaced(verdict(facts, "en"))
    found = comparison([Entrant(each.name, each) for each in (undisturbed, facts)])
    assert found.quantities["training_seconds"] == pytest.approx((188.4, 188.4))
    assert "stopped 2 h 00 min" in _spaced(render(facts))


def _spaced(text: str) -> str:
    return text.replace("\u202f", " ").replace("\xa0", " ")


def test_a_run_takes_as_long_whoever_asks_before_or_after_its_report(tmp_path: Path) -> None:
    run = build_run(tmp_path)
    before = collect_facts(run)
    write_json(run / "report" / "manifest.json", {"stage": "report", "seconds": 3.0, "started": 1})
    assert collect_facts(run) == before


def test_any_stage_may_be_absent(tmp_path: Path) -> None:
    run = build_run(tmp_path, steps=60)
    for stage in (
        "evaluate-sft",
        "sft",
        "conversations",
        "evaluate-base",
        "pretrain",
        "rows",
        "tokenizer",
        "deduplicate",
    ):
        (run / stage / "manifest.json").unlink()  # as if the stage had not finished
        facts = collect_facts(run)
        assert stage not in {one.name for one in facts.stages}
        assert render(facts)


def test_an_empty_folder_has_a_page(tmp_path: Path) -> None:
    assert "<h1>" in render(collect_facts(tmp_path / "nothing-here"))


@settings(max_examples=25, phases=[Phase.explicit, Phase.generate])  # a page is large to shrink with
@given(summary=st.dictionaries(st.sampled_from(SUMMARY_KEYS), anything, max_size=8), other=anything)
def test_no_summary_can_break_the_page(tmp_path_factory: pytest.TempPathFactory, summary: dict, other: object) -> None:
    run = tmp_path_factory.mktemp("run")
    for stage in (
        "collect",
        "clean",
        "deduplicate",
        "decontaminate",
        "tokenizer",
        "rows",
        "pretrain",
        "evaluate-base",
        "conversations",
    ):
        write_json(
            run / stage / "manifest.json", {"stage": stage, "summary": summary, "started": other, "seconds": other}
        )
    write_json(run / "pretrain" / "model.json", {"graph": other, "context": 64})
    (run / "pretrain" / "metrics.jsonl").write_text(
        json.dumps(other) + "\n" + json.dumps({"step": 1, "loss": other}) + "\n{"
    )
    write_json(run / "evaluate-base" / "results.json", summary)
    write_json(run / "recipe.json", {"report": other, "model": other, "name": other})
    assert render(collect_facts(run)).encode("utf-8")


def test_scores_of_published_tasks_know_their_chance(tmp_path: Path) -> None:
    metrics = {"acc": {"value": 0.3, "stderr": 0.01}, "acc_norm": {"value": 0.35, "stderr": 0.01}}
    write_json(tmp_path / "evaluate-base" / "manifest.json", {"stage": "evaluate-base"})
    write_json(
        tmp_path / "evaluate-base" / "results.json", {"tasks": {"hellaswag": {"metrics": metrics, "items": 10_042}}}
    )
    (evaluation,) = collect_facts(tmp_path).evaluations
    assert {score.metric: score.headline for score in evaluation.scores} == {"acc": False, "acc_norm": True}
    assert evaluation.scores[0].chance == 0.25


@given(left=st.text(max_size=40), right=st.text(max_size=40))
def test_marked_differences_lose_no_text(left: str, right: str) -> None:
    pieces = differences(left, right)
    assert tuple("".join(text for text, _ in side) for side in pieces) == (left, right)
    shared = ["".join(text for text, differs in side if not differs) for side in pieces]
    assert shared[0] == shared[1]


def test_of_the_thresholds_those_near_the_ones_in_use_are_shown():
    grid = (0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)

    def shown(*asked: float) -> list[float]:
        costs = tuple(ThresholdCost("web", "fr", 1, grid, grid, one) for one in asked)
        return [grid[k] for k in Thresholds(grid, costs).shown]

    assert shown(0.8) == [0.7, 0.75, 0.8, 0.85, 0.9]
    assert {0.5, 0.9} <= set(shown(0.5, 0.9)) and len(shown(0.5, 0.9)) == 5
    assert shown(0.95) == [0.75, 0.8, 0.85, 0.9, 0.95]


@pytest.mark.parametrize(
    "summary",
    [
        {
            "documents_in": 10,
            "documents_out": 10,
            "validation_documents": 10,
            "bytes_in": 90,
            "bytes_out": 81,
            "validation_bytes": 9,
        },
        {"documents_in": 10, "documents_out": 12, "removed": {"too short": 8}, "bytes_in": 90, "bytes_out": 80},
    ],
    ids=["tails are held out", "long documents are split"],
)
def test_no_bar_of_the_funnel_is_longer_than_its_place(tmp_path: Path, summary: dict) -> None:
    (tmp_path / "split").mkdir()
    write_json(tmp_path / "split" / "manifest.json", {"stage": "split", "summary": summary})
    (step,) = funnel(collect_facts(tmp_path).flows)
    lost = sum(width for _, width in step.documents_lost)
    assert step.documents_kept + step.documents_held_out + lost == pytest.approx(100)
    assert step.bytes_kept + step.bytes_held_out + step.bytes_lost == pytest.approx(100)


def test_rows_that_are_half_padding_are_read_once_in_an_epoch(tmp_path: Path) -> None:
    run = build_run(tmp_path)
    manifest = json.loads((run / "rows" / "manifest.json").read_text())
    train = manifest["summary"]["train"]
    before = epochs(collect_facts(run))
    train["tokens"] //= 2
    write_json(run / "rows" / "manifest.json", manifest)
    pretrain = collect_facts(run).training("pretrain")
    assert pretrain and pretrain.tokens
    assert epochs(collect_facts(run)) == before == pytest.approx(pretrain.tokens / (train["rows"] * 128))
