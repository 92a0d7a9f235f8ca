"""Looking up tasks: where their data is, what is refused."""

import gzip
import json
from pathlib import Path

import pytest
import yaml
from lm_eval import utils
from lm_eval.api import registry

from affinage.errors import UserError
from affinage.evaluation.harness import tamed_harness
from affinage.evaluation.item_files import read_json_lines
from affinage.evaluation.tasks import find_tasks

TASK = {"task": "one", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "one.jsonl"}}}


def write(folder, name, content):
    folder.mkdir(exist_ok=True, parents=True)
    (folder / name).write_text(content if isinstance(content, str) else yaml.safe_dump(content))


def test_data_files_are_found_beside_the_task_file(tmp_path, monkeypatch):
    write(tmp_path / "tasks", "one.yaml", TASK)
    write(tmp_path / "tasks", "one.jsonl", '{"a": "x\u2028y"}\n')
    write(tmp_path / "tasks", "chat.yaml", {"task": "two", "dataset_path": "hub/two", "output_type": "generate_until"})
    monkeypatch.chdir(tmp_path)
    found = find_tasks(["world", "tasks/one.yaml", "hellaswag"], {"world": tmp_path / "tasks"})
    assert [task["task"] for task in found.local] == ["two", "one"] and found.named == ("hellaswag",)
    assert [task["task"] for task in found.chat()] == ["two"]
    assert found.plain()[-1] == "hellaswag"
    one = found.local[1]
    (path,) = one["dataset_kwargs"]["data_files"]["test"]
    assert path == str(tmp_path / "tasks/one.jsonl")
    assert one["custom_dataset"](**one["dataset_kwargs"], version=1)["test"][0] == {"a": "x\u2028y"}


def test_templates_are_included_and_are_no_tasks_themselves(tmp_path):
    write(tmp_path, "shared.yaml", {"dataset_path": "hub/one", "output_type": "multiple_choice", "tag": ["chat"]})
    write(tmp_path, "one.yaml", {"include": "shared.yaml", "task": "one"})
    (task,) = find_tasks([str(tmp_path)], {}).chat()
    assert task == {"dataset_path": "hub/one", "output_type": "multiple_choice", "tag": ["chat"], "task": "one"}


def test_compressed_lines_are_read(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"n": 1}).encode() + b"\n\n"))
    assert read_json_lines(data_files={"test": [str(path)]})["test"]["n"] == [1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("task: one\ndoc_to_text: !function code.f", "cannot be read"),
        ("- a list", "not a task"),
        ("output_type: generate_until", "holds no task"),
        ("task: bogus", "`bogus` says nothing of its items"),
        (yaml.safe_dump(TASK), "is missing"),
    ],
)
def test_what_cannot_be_used_is_said(tmp_path, content, message):
    write(tmp_path, "one.yaml", content)
    with pytest.raises(UserError, match=message):
        find_tasks([str(tmp_path / "one.yaml")], {})


def test_a_missing_path_is_not_taken_for_a_name(tmp_path):
    with pytest.raises(UserError, match="no such task file"):
        find_tasks([str(tmp_path / "absent.yaml")], {})


def test_a_broken_line_of_items_is_named(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n\n{"a" 2}\n')
    with pytest.raises(UserError, match="not JSON Lines: Expecting ':' delimiter at character 6") as refused:
        read_json_lines(data_files={"test": [str(tmp_path / "bad.jsonl")]})
    assert refused.value.where == f"{tmp_path / 'bad.jsonl'}:3"


def test_a_task_file_reaches_no_object_of_python_and_fetches_no_program(tmp_path: Path):
    (tmp_path / "evil.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'sprung')!r}).touch()")
    (tmp_path / "t.yaml").write_text("task: t\ndataset_path: json\nprocess_docs: !function evil.run\n")
    with pytest.raises(UserError, match="cannot be read as a task"):
        find_tasks([str(tmp_path / "t.yaml")], {}, None)
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    assert "class" in utils.apply_template(escape, {})  # the harness by itself
    with tamed_harness():
        with pytest.raises(Exception, match="unsafe"):
            utils.apply_template(escape, {})
        assert utils.apply_template("{{ a | regex_replace('x', 'y') }}", {"a": "x"}) == "y"
        assert registry.get_metric(str(tmp_path / "evil"), hf_evaluate_metric=True) is None
    assert not (tmp_path / "sprung").exists()
