"""What a line of progress says of a data stage: why documents were left out, and what was found."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from affinage.cli.watch import headline, show_plan, show_result


def test_the_reasons_that_count_most_are_named():
    removed = {"too short": 1200, "other language": 30, "binary": 7, "empty": 2, "too long": 1}
    summary = {"documents_in": 5000, "documents_out": 3760, "removed": removed, "masked": {"e-mail": 3}}
    assert list(headline(summary)) == [
        "5,000 → 3,760 documents (1,200 too short, 30 other language, 7 binary, 3 for other reasons)",
        "masked 3 e-mail",
    ]
    assert list(headline({"documents_in": 5, "documents_out": 5, "removed": {}, "masked": {}})) == ["5 documents"]


def test_one_more_reason_is_named_and_parts_are_counted():
    removed = {"too short": 12, "other language": 3, "binary": 2, "empty": 1}
    summary = {"documents_in": 20, "documents_out": 8, "removed": removed, "split": {"documents": 2, "parts": 8}}
    assert list(headline(summary)) == [
        "20 → 8 documents (12 too short, 3 other language, 2 binary, 1 empty)",
        "2 long documents split into 8 parts",
    ]


def test_benchmarks_found_in_the_text_are_named():
    quiz, other = {"items": 10_000, "found": 12}, {"items": 50, "found": 0}
    summary = {"documents_out": 9, "documents_in": 10, "removed": {"in a benchmark": 1}}
    said = list(headline(summary | {"benchmarks": {"quiz": quiz, "other": other}}))
    found = "found 12 of 10,000 items of quiz; found no item of other"
    assert said == ["10 → 9 documents (1 in a benchmark)", found]
    assert list(headline(summary | {"benchmarks": {"other": other}}))[1] == "found no item of other"


def test_how_long_saves_stalled_a_training_is_told():
    summary = {"parameters": {"total": 1000}, "final_loss": 4.97}
    several = {"count": 3, "stall_mean": 0.00418, "stall_most": 1.26}
    once = {"count": 1, "stall_mean": 0.0567, "stall_most": 0.0567}
    none = {"count": 0, "stall_mean": 0.0, "stall_most": 0.0}
    assert list(headline(summary | {"saves": several}))[2:] == ["3 saves stopped it for 4.2 ms each, 1.3 s at most"]
    assert list(headline(summary | {"saves": once}))[2:] == ["1 save stopped it for 56.7 ms"]
    assert len(list(headline(summary | {"saves": none}))) == 2


def test_compared_tokenizers_are_said_with_what_they_need_a_token():
    theirs = {"name": "gpt2_vocab.bpe", "languages": {"en": {"bytes_per_token": 4.041}, "fr": {"bytes_per_token": 2.7}}}
    ours = {"name": "", "languages": {"en": {"bytes_per_token": 3.5}}}
    said = list(headline({"tokenizers": [ours, theirs]}))
    assert said == ["ours 3.50 en bytes a token", "gpt2_vocab.bpe 4.04 en 2.70 fr bytes a token"]


def test_one_of_a_thing_is_in_the_singular():
    assert list(headline({"documents_in": 2, "documents_out": 1, "split": {"documents": 1, "parts": 2}})) == [
        "2 → 1 document",
        "1 long document split into 2 parts",
    ]
    assert list(headline({"train": {"rows": 1}, "context": 64, "tasks": {"sums": 0.5}})) == [
        "1 row of 64 tokens",
        "1 task",
    ]


def test_one_stage_is_in_the_singular(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = SimpleNamespace(name="small", plugins=())
    flow = SimpleNamespace(
        folder=tmp_path, runs=SimpleNamespace(folder=tmp_path), loaded=SimpleNamespace(recipe=recipe)
    )
    steps = [SimpleNamespace(stage=SimpleNamespace(name=name), complete=True, reason="") for name in ("clean", "split")]
    show_result(flow, steps[:1], {})  # type: ignore[arg-type]
    assert "Nothing to do: the stage of small is complete." in capsys.readouterr().out
    show_result(flow, steps, {"split": 1.0})  # type: ignore[arg-type]
    assert "\n1 stage was complete before." in capsys.readouterr().out
    show_plan([SimpleNamespace(**vars(steps[0]) | {"complete": False})])  # type: ignore[list-item]
    assert "1 of 1 stage would run." in capsys.readouterr().out
