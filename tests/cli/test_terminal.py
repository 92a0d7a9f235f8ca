"""What people and programs meet at the terminal: statuses, pipes, JSON, completion, things broken on purpose."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from affinage.cli import completion
from affinage.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_USER_ERROR

PROGRAM = [sys.executable, "-c", "from affinage.cli import main; main()"]
TINY = str(Path(__file__).parents[1] / "recipes" / "tiny.yaml")
DOCS = Path(__file__).parents[2] / "docs" / "terminal.md"


@pytest.fixture
def affinage(affinage, tmp_path, monkeypatch):
    """The program, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return affinage


def test_every_status_is_in_the_docs():
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", DOCS.read_text(), re.MULTILINE)}
    assert documented == {0, 1, EXIT_USER_ERROR, EXIT_PREEMPTED, EXIT_INTERRUPTED}


def _write_recipes(folder: Path) -> None:
    (folder / "empty.yaml").touch()
    (folder / "folder.yaml").mkdir()
    (folder / "latin.yaml").write_bytes(b"name: \xff\xfe\n")
    (folder / "nul.yaml").write_bytes(b"name: x\x00y\n")
    (folder / "list.yaml").write_text("- 1\n")
    (folder / "cut.json").write_text('{"name": ')
    (folder / "loop.yaml").symlink_to(folder / "loop.yaml")
    (folder / "itself.yaml").write_text("base: itself.yaml\n")
    (folder / "file").touch()
    damaged = folder / "runs" / "damaged"
    damaged.mkdir(parents=True)
    (damaged / "recipe.json").write_text("{")
    (folder / "runs" / "bare").mkdir()
    for name, content in (("cut", "{"), ("bytes", "\udcff"), ("other", '{"id": 1}')):
        items = folder / name / "items"
        items.mkdir(parents=True)
        (items / "quiz.jsonl").write_bytes(content.encode(errors="surrogateescape"))
    (folder / "imported" / "tokenizer").mkdir(parents=True)
    (folder / "imported" / "model.json").write_text("{")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "empty.yaml"], "empty.yaml: a recipe is a mapping of settings"),
        (["run", "folder.yaml"], "folder.yaml: this is a folder, not a recipe"),
        (["run", "latin.yaml"], "latin.yaml: this is not a text file in UTF-8"),
        (["run", "nul.yaml"], "nul.yaml: this is not valid YAML"),
        (["run", "list.yaml"], "list.yaml: a recipe is a mapping of settings"),
        (["run", "cut.json"], "this is not valid YAML: while parsing a flow"),
        (["run", "loop.yaml"], "loop.yaml: there is no such recipe file"),
        (["run", "itself.yaml"], "this recipe is its own base"),
        (["run", "a" * 300 + ".yaml"], "there is no such recipe file"),
        (["data", TINY, "--runs", "file"], "not a directory"),
        (["report", "damaged"], "recipe.json: this file of the run is damaged"),
        (["report", TINY, "--lang", "de"], "'de' is not one of 'en', 'fr'"),
        (["compare", "damaged"], "one alone cannot be compared"),
        (["compare", "damaged", "damaged"], "there is nothing to compare"),
        (["compare", "damaged", "bare"], "there are no results of `bare`"),
        (["compare", "cut", "cut"], "quiz.jsonl: these answers are damaged"),
        (["compare", "bytes", "bytes"], "quiz.jsonl: these answers are damaged"),
        (["compare", "other", "other"], "quiz.jsonl: these answers are damaged"),
        (["generate", "imported", "hello"], "model.json: this file of the model is damaged"),
        (["chat", "bare", "hello"], "there is no model in this folder"),
        (["world", "file"], "this is not an empty folder"),
        (["new", "a/b"], "a run cannot be called `a/b`"),
    ],
)
def test_what_is_broken_is_told_in_one_message(affinage, tmp_path, arguments, message):
    _write_recipes(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    status, out, said = affinage(*arguments)
    assert (status, out) == (2, "")
    assert message in " ".join(said.split()) and "Traceback" not in said
    assert said.startswith("Error: ") or "Error" in said
    assert sorted(tmp_path.rglob("*")) == before, "nothing is left behind"


def test_a_full_disk_is_told_and_named():
    with open("/dev/full", "w") as full:
        ended = subprocess.run([*PROGRAM, "schema"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert ended.returncode == 2 and "no space left on device" in ended.stderr and "Make room" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_interrupted_world_leaves_nothing_behind(tmp_path):
    started = subprocess.Popen(
        [*PROGRAM, "world", "mine", "--megabytes", "200"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 300
    while not (tmp_path / ".mine.part").is_dir():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    started.send_signal(signal.SIGINT)
    _, said = started.communicate(timeout=300)
    assert started.returncode == EXIT_INTERRUPTED and said.strip().endswith("Interrupted.")
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_gets_whole_lines_without_codes(affinage, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    _, told, _ = affinage("recipes", "--json")
    _, shown, _ = affinage("recipes")
    for recipe in json.loads(told):
        assert re.search(rf"^{re.escape(recipe['name'])} +{re.escape(recipe['description'])} *$", shown, re.MULTILINE)
    assert "\x1b" not in shown
    folded = subprocess.run([*PROGRAM, "recipes"], capture_output=True, text=True, env=os.environ | {"COLUMNS": "60"})
    assert 40 < max(map(len, folded.stdout.splitlines())) <= 60


@pytest.mark.parametrize(
    "arguments",
    [
        ["recipes"],
        ["explain", "quickstart", "pretrain"],
        ["graph", "quickstart"],
        ["run", TINY, "--dry-run"],
        ["sweep", TINY, "--dry-run", "--set", "sweep={pretrain.steps: [20, 30]}"],
        ["plan", "quickstart", "--on", "cpu"],
    ],
    ids=lambda words: " ".join(words[:2]).replace(TINY, "tiny"),
)
def test_json_is_one_document_on_standard_output(affinage, arguments):
    status, out, said = affinage(*arguments, "--json")
    assert status == 0, said
    assert json.loads(out)


def test_names_are_completed(tmp_path, monkeypatch):
    for name in ("runs/first", "runs/first/pretrain", "runs/second"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    for name in ("first", "second"):
        (tmp_path / "runs" / name / "recipe.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    asked = {"_AFFINAGE_COMPLETE": "complete_bash", "COMP_CWORD": "2"}
    for words, expected in (
        ("affinage run novels", ["novels", "novels-chat"]),
        ("affinage chat ", ["first", "second"]),
        ("affinage chat first/", ["first/pretrain"]),
    ):
        env = os.environ | asked | {"COMP_WORDS": words}
        shown = subprocess.run(PROGRAM, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=300)
        assert sorted(shown.stdout.split()) == expected
    assert {"v4-8", "v4-32"} <= set(completion.slices("v4"))
