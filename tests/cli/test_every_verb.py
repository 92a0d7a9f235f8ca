"""Every verb does its work on a finished run: it ends with 0, prints no control codes, and its JSON is one document."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command

from affinage.cli import app
from affinage.cli.watch import Watch
from affinage.results import DocumentsResult
from tiny_run import WORDS, copied


def commands(group: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        words = (*before, name)
        yield from commands(command, words) if hasattr(command, "commands") else [words]


@pytest.mark.parametrize("verb", commands(get_command(app)), ids=" ".join)
def test_the_help_of_each_verb_has_an_example(verb: tuple[str, ...], affinage):
    status, out, _ = affinage(*verb, "--help")
    assert status == 0 and f"affinage {' '.join(verb)}" in out and "Example" in out and "\x1b" not in out
    held = {("data", "run"): "data.sources='[my_folder/]'", ("serve",): "draws at 1"}  # brackets are kept
    assert held.get(verb, "") in out


@pytest.fixture(scope="module")
def copy(tiny_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the runs; what the verbs write stands beside what others write."""
    return copied(tiny_runs, tmp_path_factory.mktemp("verbs") / "runs").parent


@pytest.fixture
def here(copy: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(copy)
    return copy


# Words, and what their JSON tells.
JSON: list[tuple[list[str], Callable[[Any], bool]]] = [
    (["run", *WORDS], lambda told: told["ran"] == {} and len(told["complete"]) == 18),
    (["train", *WORDS, "--dry-run", "--set", "pretrain.steps=9"], lambda told: told[-1]["runs"]),
    (["sft", *WORDS, "--dry-run"], lambda told: told[-1]["step"] == "sft" and not told[-1]["runs"]),
    (["dpo", *WORDS, "--dry-run"], lambda told: told[-1]["step"] == "dpo" and not told[-1]["runs"]),
    (["train", *WORDS, "--show", "1"], lambda told: told["complete"][-1] == "tokenize"),
    (["data", *WORDS, "--dry-run"], lambda told: "tokenize" in {row["step"] for row in told}),
    (["data", "lineage", "tiny", "--step", "3"], lambda told: len(told["rows"]) == 8 and told["rows"][0]["documents"]),
    (["data", "search", "tiny", "the", "--limit", "2"], lambda told: len(told["documents"]) == 2),
    (["data", "head", "tiny", "--limit", "1"], lambda told: told[0]["source"] == "pocket-world"),
    (["data", "head", "tiny/filter"], lambda told: len(told) > 0),
    (["data", "stats", "tiny"], lambda told: told["removed, for example"][0]["id"].startswith("foreign-")),
    (["checkpoint", "ls", "tiny/pretrain"], lambda told: [each["step"] for each in told] == [18, 20]),
    (["checkpoint", "show", "tiny@4"], lambda told: told["step"] == 4 and told["arrays"]["step"] == "int32 []"),
    (["checkpoint", "diff", "tiny/dpo@2", "tiny/dpo@4"], lambda told: len(told["arrays"]["different"]) > 0),
    (["checkpoint", "verify", "tiny"], lambda told: [each["corruption"] for each in told] == [None, None]),
    (["eval", "tiny"], lambda told: [*told["evaluations"]] == ["evaluate-base", "evaluate-sft", "evaluate-dpo"]),
    (["eval", "tiny", "--limit", "1"], lambda told: all(task["items"] == 1 for task in told["tasks"].values())),
    (["compare", "tiny/evaluate-base", "tiny/evaluate-sft"], lambda told: len(told["differences"]) > 0),
    (["report", "tiny", "--lang", "fr", "--out", "rapport.html"], lambda told: told["language"] == "fr"),
    (["config", "show", "tiny", "pretrain.steps"], lambda told: told[0]["value"] == 20),
    (["plan", "tiny", "--on", "v4-8", "--set", "mesh.data=4"], lambda told: told["recipe"] == "tiny"),
    (["sweep", *WORDS, "--dry-run", "--set", "sweep={dpo.steps: [4, 6]}"], lambda told: len(told) == 2),
    (["recipes"], lambda told: "quickstart" in {each["name"] for each in told}),
    (["doctor"], lambda told: told["devices"][0]["platform"] == "cpu" and told["machine"]["disk_free_bytes"] > 0),
]  # fmt: skip


NAMES = [" ".join(word for word in words[:4] if word not in WORDS) for words, _ in JSON]


@pytest.mark.parametrize(("words", "tells"), JSON, ids=NAMES)
def test_json_is_one_document_on_standard_output(words: list[str], tells, here: Path, affinage, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nothing here needs a network
    status, out, said = affinage(*words, "--json")
    assert status == 0, said
    assert tells(json.loads(out)) and "\x1b" not in out + said


def test_the_line_of_a_step_names_a_last_reason_and_the_verb_that_shows_which(capsys: pytest.CaptureFixture[str]):
    for letters, end in (("abcd", "2 c, 1 d; see affinage data stats RUN"), ("abcde", "3 c and 2 more; see")):
        result = DocumentsResult(removed={letter: len(letters) - n for n, letter in enumerate(letters)})
        Watch().on_end(SimpleNamespace(name="ingest"), result, 1.0)
        assert end in capsys.readouterr().out
