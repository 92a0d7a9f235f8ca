"""The line of a finished step: why documents were removed, what was found, the scores."""

import pytest

from affinage.cli.watch import headline
from affinage.results import RESULTS, IngestResult, SplitResult

MANY = {"too short": 1200, "other language": 30, "binary": 7, "empty": 2, "too long": 1}
QUIZ, OTHER = {"items": 10_000, "found": 12}, {"items": 50, "found": 0}
ACC, NORM = {"value": 0.45, "stderr": 0.114}, {"value": 0.3, "stderr": 0.01}
TASKS = {"arc_easy": {"metrics": {"acc": ACC}}, "hellaswag": {"metrics": {"acc": ACC, "acc_norm": NORM}}}
OWN, THEIRS = {"en": {"bytes_per_token": 3.5}}, {"en": {"bytes_per_token": 4.041}, "fr": {"bytes_per_token": 2.7}}


@pytest.mark.parametrize(
    ("step", "result", "lines"),
    [
        ("filter", {"documents_out": 5, "removed": {}}, ["5 documents"]),
        (
            "filter",
            {"documents_in": 5000, "documents_out": 3760, "removed": MANY},
            ["3,760 documents", "removed: 1,200 too short, 30 other language, 7 binary and 2 more"],
        ),
        (
            "decontaminate",
            {"documents_out": 9, "benchmarks": {"quiz": QUIZ, "other": OTHER}},
            ["9 documents", "benchmark items found: 12 of 10,000 of quiz"],
        ),
        ("sft", {"parameters": {"total": 1000}, "final_loss": 4.97}, ["1,000 parameters", "loss 4.970"]),
        (
            "compare-tokenizers",
            {"tokenizers": [{"name": "", "languages": OWN}, {"name": "gpt2_vocab.bpe", "languages": THEIRS}]},
            ["this run 3.50 en bytes per token", "gpt2_vocab.bpe 4.04 en 2.70 fr bytes per token"],
        ),
        ("tokenize", {"train": {"rows": 1000}, "context": 64}, ["1,000 rows"]),
        ("evaluate-sft", {"tasks": TASKS}, ["2 benchmarks", "arc_easy 45.0 ± 11.4", "hellaswag 30.0 ± 1.0"]),
    ],
)
def test_the_facts_that_a_person_wants_to_see_while_waiting(step: str, result: dict, lines: list[str]):
    assert list(headline(RESULTS[step].model_validate(result))) == lines


def test_too_few_documents_to_judge_by_are_named():
    few, enough = (" ".join(headline(SplitResult(documents_out=9, validation_documents=held))) for held in (1, 25))
    assert "few to judge by" in few and "few" not in enough
    assert "a, b, c and 1 more" in " ".join(headline(SplitResult(without_validation=["a", "b", "c", "d"])))
    assert "7 not in the sample" in " ".join(headline(IngestResult(not_sampled=7)))
