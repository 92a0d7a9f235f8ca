"""What the line of a finished stage says: why documents were left out, what was found, what was scored."""

import pytest

from affinage.cli.watch import headline
from affinage.results import RESULTS, IngestResult, SplitResult

MANY = {"too short": 1200, "other language": 30, "binary": 7, "empty": 2, "too long": 1}
FEW = {"too short": 12, "other language": 3, "binary": 2, "empty": 1}
QUIZ, OTHER = {"items": 10_000, "found": 12}, {"items": 50, "found": 0}
SAVES = {"parameters": {"total": 1000}, "final_loss": 4.97}
ACC, NORM = {"value": 0.45, "stderr": 0.114}, {"value": 0.3, "stderr": 0.01}
JUDGED = {"arc_easy": {"metrics": {"acc": ACC}}, "hellaswag": {"metrics": {"acc": ACC, "acc_norm": NORM}}}
THEIRS = {"name": "gpt2_vocab.bpe", "languages": {"en": {"bytes_per_token": 4.041}, "fr": {"bytes_per_token": 2.7}}}


@pytest.mark.parametrize(
    ("step", "summary", "lines"),
    [
        ("filter", {"documents_in": 5, "documents_out": 5, "removed": {}, "formatted": 0}, ["5 documents"]),
        (
            "filter",
            {"documents_in": 5000, "documents_out": 3760, "removed": MANY, "formatted": 3},
            [
                "5,000 → 3,760 documents (1,200 too short, 30 other language, 7 binary, 3 for other reasons)",
                "3 texts changed by a formatter",
            ],
        ),
        (
            "filter",
            {"documents_in": 20, "documents_out": 8, "removed": FEW, "split": {"documents": 2, "parts": 8}},
            [
                "20 → 8 documents (12 too short, 3 other language, 2 binary, 1 empty)",
                "2 long documents split into 8 parts",
            ],
        ),
        (
            "decontaminate",
            {"documents_in": 10, "documents_out": 9, "benchmarks": {"quiz": QUIZ, "other": OTHER}},
            ["10 → 9 documents", "found 12 of 10,000 items of quiz; found no item of other"],
        ),
        (
            "sft",
            SAVES | {"saves": {"count": 3, "stall_mean": 0.00418, "stall_most": 1.26}},
            ["1,000 parameters", "loss 4.970", "3 saves stopped it for 4.2 ms each, 1.3 s at most"],
        ),
        (
            "compare-tokenizers",
            {"tokenizers": [{"name": "", "languages": {"en": {"bytes_per_token": 3.5}}}, THEIRS]},
            ["ours 3.50 en bytes a token", "gpt2_vocab.bpe 4.04 en 2.70 fr bytes a token"],
        ),
        ("tokenize", {"train": {"rows": 1}, "context": 64}, ["1 row of 64 tokens"]),
        ("evaluate-sft", {"tasks": JUDGED}, ["2 benchmarks: arc_easy 45.0 ± 11.4, hellaswag 30.0 ± 1.0"]),
    ],
)
def test_the_facts_that_a_person_wants_to_see_while_waiting(step: str, summary: dict, lines: list[str]):
    assert list(headline(RESULTS[step].model_validate(summary))) == lines


def test_too_few_documents_to_judge_by_are_told():
    few, enough = (" ".join(headline(SplitResult(documents_out=9, validation_documents=held))) for held in (1, 25))
    assert "few to judge by" in few and "few" not in enough
    assert "a, b, c and 1 more" in " ".join(headline(SplitResult(without_validation=["a", "b", "c", "d"])))
    assert "7 not in the sample" in " ".join(headline(IngestResult(not_sampled=7)))
