"""Looking up tasks: where their data is, what their items are, which of them can be scored, and what is refused."""

import errno
import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import huggingface_hub
import jinja2.sandbox
import pytest
import yaml
from lm_eval import utils
from lm_eval.tasks import TaskManager

from affinage.errors import UserError
from affinage.evaluation.harness import DEFINITIONS, load_tasks, quiet
from affinage.evaluation.tasks import BENCHMARKS, GROUPS, check_names, files_of, find_tasks, is_chat, items_of
from affinage.evaluation.tasks import read_json_lines as rows_in
from benchmark_fixtures import ITEMS, write_items
from choice_task import write_task
from run_affinage import refused

TASK = {"task": "one", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "one.jsonl"}}}


def test_data_files_and_templates_are_found_beside_the_task_file(tmp_path, monkeypatch):
    (tmp_path / "tasks").mkdir()
    for name, content in (
        ("one.yaml", yaml.safe_dump(TASK)), ("one.jsonl", '{"a": "x\u2028y"}\n'),
        ("chat.yaml", "include: shared\ntask: two"), ("shared", "dataset_path: hub/two\noutput_type: generate_until"),
    ):  # fmt: skip
        (tmp_path / "tasks" / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    chat, one, named = find_tasks(["pocket-world", "tasks/one.yaml", "hellaswag"], world=tmp_path)[0]
    assert [is_chat(task) for task in (chat, one, named)] == [True, False, False] and named == {"task": "hellaswag"}
    assert chat.items() >= {"dataset_path": "hub/two", "output_type": "generate_until", "task": "two"}.items()
    (path,) = one["dataset_kwargs"]["data_files"]["test"]
    assert path == str(tmp_path / "tasks/one.jsonl")
    assert one["custom_dataset"](**one["dataset_kwargs"], version=1)["test"][0] == {"a": "x\u2028y"}
    (tmp_path / "tasks/zwei.yaml").write_text("task: two\ndataset_path: hub/zwei")
    assert refused(find_tasks, ["tasks"], match="name `two`").where == "tasks/chat.yaml and tasks/zwei.yaml"


def test_compressed_lines_are_read_and_a_broken_one_is_named(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"n": 1}).encode() + b"\n\n"))
    assert rows_in(data_files={"test": [str(path)]})["test"]["n"] == [1]
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n\n{"a" 2}\n')
    mistake = refused(rows_in, data_files={"test": [str(tmp_path / "bad.jsonl")]}, match="delimiter")
    assert mistake.where == f"{tmp_path / 'bad.jsonl'}:3"


@pytest.mark.parametrize(("content", "named"), [
    ("task: one\ndoc_to_text: !function code.f", "one.yaml:2: "), ("- a list\n-\ta tab", "one.yaml:2: "),
    ("output_type: generate_until", ""), ("task: bogus", "bogus"), (yaml.safe_dump(TASK), "one.jsonl"),
    *[(f"task: one\ndataset_path: json\ndataset_kwargs: {{data_files: {it}}}", "data_files") for it in ("3", "", "{}")],
    ("task: one\ninclude: 3", ""), (None, "one.yaml"),
])  # fmt: skip
def test_a_task_file_that_cannot_be_used_is_refused_at_its_place(tmp_path, content, named):
    if content is not None:
        (tmp_path / "one.yaml").write_text(content)
    mistake = refused(find_tasks, [str(tmp_path / "one.yaml")])
    assert "one.yaml" in f"{mistake.where} {mistake.what}" and named in str(mistake) and "\n" not in mistake.what


def test_a_task_file_reaches_no_object_of_python_and_fetches_no_program(tmp_path: Path):
    (tmp_path / "evil.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'sprung')!r}).touch()")
    (tmp_path / "t.yaml").write_text("task: t\ndataset_path: json\nprocess_docs: !function evil.run\n")
    refused(find_tasks, [str(tmp_path / "t.yaml")])
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(jinja2.sandbox.SecurityError):
        utils.apply_template(escape, {})
    evil: list[dict] = [{key: escape} for key in ("doc_to_text", "doc_to_choice", "doc_to_target", "description")]
    foreign = {"metric": str(tmp_path / "evil")}, {"metric": "acc", "hf_evaluate": True}, "acc"
    evil += [{"metric_list": [metric]} for metric in foreign]
    evil.append({"fewshot_config": {"doc_to_text": escape}, "num_fewshot": 1})
    for number, settings in enumerate(evil):
        refused_with(tmp_path / str(number), SUMS, **settings)
    write_task(tmp_path / "fine", "fine", SUMS, doc_to_text="{{ question | regex_replace('one', 'two') }}")
    assert not (tmp_path / "sprung").exists()


GENERATES = {"output_type": "generate_until", "doc_to_choice": None, "metric_list": [{"metric": "exact_match"}]}
TWICE = {"dataset_kwargs": {"data_files": dict.fromkeys(("test", "more"), "items.jsonl")}}  # a leak of answers
SUMS = [{"question": f"one {n}", "choices": ["a", "b"], "right": n % 2} for n in range(6)]


def refused_with(folder, items, num_fewshot=None, **settings) -> UserError:
    """The message for a task of these items and settings."""
    task = write_task(folder, "mine", items, **settings)
    with quiet():
        mistake = refused(lambda: load_tasks(find_tasks([str(task)])[0], num_fewshot))
    assert mistake.what and mistake.where and mistake.fix
    return mistake


WRONG_SETTINGS: tuple[tuple[str, Any, str], ...] = (
    ("doc_to_text", "{{no_such}}", "no_such"), ("doc_to_text", "{{ question", "mine"), ("num_fewshot", 6, "6 examples"),
    ("doc_to_choice", "{{ question }}", "mine"), ("doc_to_choice", None, "needs `doc_to_ch"), ("group", "x", "group"),
    ("metric_list", ["acc"], "acc"), ("metric_list", [], "metric_list"), ("output_type", None, "generate_until"),
    ("metric_list", [{"metric": "acc", "aggregation": "no_such"}], "acc"), ("num_fewshot", 2.0, "num_fewshot"),
    ("num_fewshot", -1, "num_fewshot"), ("task", "../up", "../up"), ("no_such_key", 1, "no_such_key"),
    ("test_split", "absent", "absent"), ("output_type", "no_such", "no_such"),
    ("dataset_kwargs", {"data_files": {"test": []}}, "test"), ("dataset_kwargs", ["items.jsonl"], "dataset_kwargs"),
    ("filter_list", [{"name": "x", "filter": [{"function": "no_such"}]}], "mine"),
)  # fmt: skip


@pytest.mark.parametrize(("changed", "settings", "named"), [
    *[({"right": wrong}, {}, "item 3") for wrong in (2, -1, None)],
    *[({"choices": wrong}, {}, "item 3") for wrong in ([], ["a", ""])],
    ({"question": None}, {}, "item 3"),
    ({"choices": "a"}, {}, "mine"),
    *[({}, {key: wrong}, named) for key, wrong, named in WRONG_SETTINGS],
    *[({}, {"metric_list": [{"metric": name}]}, name) for name in ("accc", "perplexity", "bleu", "likelihood")],
    ({}, GENERATES | {"generation_kwargs": {"until": 3}}, "generation_kwargs"),
    ({}, GENERATES | {"filter_list": [{"name": "x", "filter": [{"function": "take_first_k"}]}]}, "filter_list"),
    ({}, TWICE | {"fewshot_split": "more", "num_fewshot": 2}, "item 1"),
], ids=str)  # fmt: skip
def test_a_mistake_in_a_task_file_or_an_item_is_one_message(tmp_path, changed, settings, named):
    assert named in str(refused_with(tmp_path, [*SUMS[:2], SUMS[2] | changed, *SUMS[3:]], **settings))


@pytest.mark.parametrize("examples", [{}, {"fewshot_split": "test"}], ids=str)
@pytest.mark.parametrize("splits", [{"test_split": "test"}, {"test_split": None, "validation_split": "test"}], ids=str)
def test_no_example_before_a_question_is_the_item_asked(tmp_path, splits, examples):
    write_task(tmp_path, "mine", SUMS, **splits, **examples)
    with quiet():
        (task,) = load_tasks(find_tasks([str(tmp_path / "mine.yaml")])[0], 5).values()
        task.build_all_requests(limit=None, rank=0, world_size=1)
    for request in task.instances:
        questions = [line.split()[1] for line in request.args[0].split("\n\n")]
        assert len(questions) == 6 == len(set(questions))


def test_texts_of_an_item_are_every_one_it_has_and_the_question_with_its_right_answer(tmp_path):
    """What decontamination looks for."""
    places = ("in France", "in Spain")
    items = [
        {"question": f"Where is {city}?", "options": {"text": places, "n": n}, "right": n}
        for n, city in enumerate(("Paris", "Madrid"))
    ]
    asked = {"doc_to_text": "Q: {{question}}\nA:", "doc_to_choice": "{{options.text}}"}
    write_task(tmp_path, "capitals", items, **asked)
    write_task(tmp_path, "chat", items, **asked | GENERATES | {"doc_to_target": "{{options.text[right]}}"})
    with quiet():
        found = list(items_of(load_tasks(find_tasks([str(tmp_path)])[0])))
    assert [(item.benchmark, item.id) for item in found] == [(t, i) for t in ("capitals", "chat") for i in "01"]
    for item in found:
        question, answer = items[int(item.id)]["question"], places[int(item.id)]
        assert set(item.texts) == {question, *places, f"Q: {question}\nA: {answer}"}


@pytest.mark.full  # each reads 13,000 files
@pytest.mark.parametrize(("name", "nearest"), [("hellaswagg", "`hellaswag"), ("JULIAN", "")])
def test_an_unknown_name_is_refused_with_the_nearest(name, nearest):
    check_names(["julian", "hellaswag"], where="--tasks")
    mistake = refused(check_names, [name], where="--tasks")
    assert nearest in mistake.fix and mistake.fix and mistake.where == "--tasks"


# ---- named benchmarks over local files


def requests_of(task):
    task.build_all_requests(limit=None, rank=0, world_size=1)
    return [request.args for request in task.instances], [task.doc_to_target(doc) for doc in task.eval_docs]


def as_the_harness_has_it(name):
    """Its own definition, told nothing but where the hub's row comes from."""
    rows = datasets.Dataset.from_list([ITEMS[name][0]])
    splits = defaultdict(lambda: rows, test=rows)
    folder = str((DEFINITIONS / BENCHMARKS[name]["definition"]).parent)
    manager = TaskManager(include_path=folder, include_defaults=False)
    own = {"task": name, "custom_dataset": lambda **_: splits}
    return manager.load([{"group": "of one", "task": [own]}])["tasks"][name]


@pytest.mark.parametrize("name", sorted(BENCHMARKS.keys() & ITEMS.keys()))
def test_local_items_are_put_as_the_harness_puts_the_hub_s(name, tmp_path):
    with quiet():
        expected = requests_of(as_the_harness_has_it(name))
        assert expected[0], "an item makes requests"
        for form, item in zip(("hub", "other"), ITEMS[name]):
            if item is None:
                continue
            file = tmp_path / form / f"{(name, *BENCHMARKS[name].get('files', ()))[-1]}.jsonl.gz"
            file.parent.mkdir()
            file.write_bytes(gzip.compress(json.dumps(item).encode()))
            (config,) = find_tasks([name], file.parent)[0]
            (task,) = load_tasks([config]).values()
            assert requests_of(task) == expected, form
            assert task.config.metric_list == as_the_harness_has_it(name).config.metric_list


def test_groups_take_what_the_folder_has_and_a_folder_without_the_items_or_of_another_form_is_refused(tmp_path):
    folder = write_items(tmp_path / "items", ["piqa", "boolq", "xnli_fr"])
    found, left_out = find_tasks(["julian"], folder)
    assert [task["task"] for task in found] == ["piqa", "boolq"] and all("where" in task for task in found)
    assert set(left_out) == set(GROUPS["julian"]) - {"piqa", "boolq"}
    assert [file.name for file in files_of(["french", "piqa"], folder)] == ["xnli_fr.jsonl", "piqa.jsonl"]
    assert find_tasks(["julian"]) == ([{"task": name} for name in GROUPS["julian"]], [])
    named = {"arc_easy": "arc_easy", "french": "french", "quickstart": "world", f"{folder}/piqa.jsonl": "bits_per_byte"}
    for task in named:
        mistake = refused(find_tasks, [task], tmp_path, match=named[task])
        assert mistake.fix or mistake.where
    (broken := tmp_path / "belebele_fra_Latn.jsonl").write_text('{"question": "Où ?"}\n')
    assert refused(load_tasks, find_tasks(["belebele_fra_Latn"], tmp_path)[0]).where == f"{broken}:1"


def test_a_missing_network_is_told_once_and_soon_and_a_full_disk_is_another_thing(monkeypatch, tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch, quiet(), pytest.raises(OSError, match="No space"):  # the verb says: make room
        patch.setattr(TaskManager, "load", Mock(side_effect=full))
        load_tasks([{"task": "piqa"}])
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    assert "--data-dir" in refused(load_tasks, [{"task": "piqa"}], match=r"http://127\.0\.0\.1:9").fix
