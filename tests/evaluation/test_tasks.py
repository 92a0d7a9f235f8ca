"""Looking up tasks: where their data is, what their items are, which of them can be scored, and what is refused."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from lm_eval import utils
from lm_eval.api import registry
from lm_eval.tasks import TaskManager
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.scoring import BootstrapAggregator

from affinage.errors import UserError
from affinage.evaluation import metric_library
from affinage.evaluation.harness import tamed_harness
from affinage.evaluation.item_files import DEFINITIONS, read_json_lines
from affinage.evaluation.items import benchmark_items
from affinage.evaluation.known import harness_names
from affinage.evaluation.scorable import refuse_unscorable
from affinage.evaluation.tasks import check_names, find_tasks
from choice_task import write_task

TASK = {"task": "one", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "one.jsonl"}}}


def write(folder, name, content):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(content if isinstance(content, str) else yaml.safe_dump(content))


def test_data_files_and_templates_are_found_beside_the_task_file(tmp_path, monkeypatch):
    write(tmp_path / "tasks", "one.yaml", TASK)
    write(tmp_path / "tasks", "one.jsonl", '{"a": "x\u2028y"}\n')
    write(tmp_path / "tasks", "chat.yaml", {"include": "shared", "task": "two"})
    write(tmp_path / "tasks", "shared", {"dataset_path": "hub/two", "output_type": "generate_until"})  # is no task
    monkeypatch.chdir(tmp_path)
    found = find_tasks(["world", "tasks/one.yaml", "hellaswag"], {"world": tmp_path / "tasks"})
    assert [task["task"] for task in found.local] == ["two", "one"] and found.named == ("hellaswag",)
    assert found.chat() == [{"dataset_path": "hub/two", "output_type": "generate_until", "task": "two"}]
    assert found.plain()[-1] == "hellaswag"
    one = found.local[1]
    (path,) = one["dataset_kwargs"]["data_files"]["test"]
    assert path == str(tmp_path / "tasks/one.jsonl")
    assert one["custom_dataset"](**one["dataset_kwargs"], version=1)["test"][0] == {"a": "x\u2028y"}


def test_compressed_lines_are_read_and_a_broken_one_is_named(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"n": 1}).encode() + b"\n\n"))
    assert read_json_lines(data_files={"test": [str(path)]})["test"]["n"] == [1]
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n\n{"a" 2}\n')
    with pytest.raises(UserError, match="character 6") as refused:
        read_json_lines(data_files={"test": [str(tmp_path / "bad.jsonl")]})
    assert refused.value.where == f"{tmp_path / 'bad.jsonl'}:3"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("task: one\ndoc_to_text: !function code.f", "!function"),
        ("- a list", ""),
        ("output_type: generate_until", ""),
        ("task: bogus", "bogus"),
        (yaml.safe_dump(TASK), "one.jsonl"),
        (None, "one.yaml"),
    ],
    ids=["a function", "a list", "a template alone", "no items", "a missing file of items", "a missing task file"],
)
def test_a_task_file_that_cannot_be_used_is_refused_at_its_place(tmp_path, content, named):
    if content is not None:
        write(tmp_path, "one.yaml", content)
    with pytest.raises(UserError) as refused:
        find_tasks([str(tmp_path / "one.yaml")], {})
    assert "one.yaml" in f"{refused.value.where} {refused.value.what}" and named in str(refused.value)


def test_a_task_file_reaches_no_object_of_python_and_fetches_no_program(tmp_path: Path):
    (tmp_path / "evil.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'sprung')!r}).touch()")
    (tmp_path / "t.yaml").write_text("task: t\ndataset_path: json\nprocess_docs: !function evil.run\n")
    with pytest.raises(UserError):
        find_tasks([str(tmp_path / "t.yaml")], {}, None)
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    assert "class" in utils.apply_template(escape, {})  # the harness by itself
    with tamed_harness():
        with pytest.raises(Exception, match="unsafe"):
            utils.apply_template(escape, {})
        assert utils.apply_template("{{ a | regex_replace('x', 'y') }}", {"a": "x"}) == "y"
        assert registry.get_metric(str(tmp_path / "evil"), hf_evaluate_metric=True) is None
    assert not (tmp_path / "sprung").exists()


def test_texts_of_an_item_are_every_one_it_has_and_the_question_with_its_right_answer(tmp_path):
    """What decontamination looks for."""
    items = [
        {"question": "Where is Paris?", "options": {"text": ["in France", "in Spain"], "n": 1}, "right": 0},
        {"question": "Where is Madrid?", "options": {"text": ["in France", "in Spain"], "n": 2}, "right": 1},
    ]
    asked = {"doc_to_text": "Q: {{question}}\nA:", "doc_to_choice": "{{options.text}}"}
    write_task(tmp_path, "capitals", items, **asked)
    answered = {"doc_to_choice": None, "doc_to_target": "{{options.text[right]}}", "output_type": "generate_until"}
    write_task(tmp_path, "chat", items, **asked | answered)
    found = list(benchmark_items([str(tmp_path)]))
    assert [(item.benchmark, item.id) for item in found] == [(t, i) for t in ("capitals", "chat") for i in "01"]
    for item in found:
        question, answer = items[int(item.id)]["question"], ("in France", "in Spain")[int(item.id)]
        assert set(item.texts) == {question, "in France", "in Spain", f"Q: {question}\nA: {answer}"}


@pytest.mark.full  # reads 13,000 files
def test_every_name_of_the_harness_is_known():
    assert set(TaskManager().all_tasks) <= harness_names()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("hellaswagg", "`hellaswag`"), ("JULIAN", "`julian`"), ("pocket_fact_en", "`pocket_facts_en`"), ("no such", "")],
)
def test_an_unknown_name_is_refused_with_the_nearest(name, nearest):
    check_names(["mmlu", "gsm8k", "glue", "julian", "hellaswag"], {}, where="--tasks")
    with pytest.raises(UserError) as refused:
        check_names([name], {}, where="--tasks")
    assert nearest in refused.value.fix and refused.value.fix and refused.value.where == "--tasks"


FOLDERS = "french_bench squadv2 humaneval kobest gsm8k meqsum tinyBenchmarks".split()


@pytest.fixture(scope="module")
def manager() -> TaskManager:
    with tamed_harness():
        return TaskManager(include_path=[str(DEFINITIONS / name) for name in FOLDERS], include_defaults=False)


UNKNOWN_METRIC = {"task": "mine", "output_type": "generate_until", "metric_list": [{"metric": "no_such"}]}


@pytest.mark.parametrize(
    ("tasks", "named"),
    [
        (["meqsum"], "meqsum"),  # on import, which its module tells in an error of its own
        (["french_bench_extra", "squadv2", "gsm8k", "humaneval"], "squadv2, humaneval"),  # in a function; on import
        ([UNKNOWN_METRIC], "mine"),
        (["tinyArc"], "tinyArc"),  # a package that is missing
        (["french_bench_trivia", "french_bench_extra", "french_bench_fquadv2", "kobest_boolq", "gsm8k"], None),
    ],
    ids=str,
)
def test_tasks_that_cannot_be_scored_here_are_named(tasks, named, manager):
    with tamed_harness():
        if named is None:
            return refuse_unscorable(tasks, manager)
        with pytest.raises(UserError) as caught:
            refuse_unscorable(tasks, manager)
    assert caught.value.what.startswith(named) and caught.value.fix


TEXTS = ["le chat dort sur le pont", "un pont", "Paris est la capitale de la France.", "rien"]
REFERENCES = ["le chat dort", "Un pont, vieux", "La capitale ? Paris.", "tout"]


def test_rouge_is_that_of_the_package():
    np.random.seed(1234)  # the harness's, and what is drawn goes by the state in which the metric is loaded
    metric = metric_library.load("rouge")
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"])
    scores = [scorer.score(*pair) for pair in zip(REFERENCES, TEXTS, strict=True)]
    parts = metric.compute(predictions=TEXTS, references=REFERENCES, use_aggregator=False)
    assert parts == {kind: [score[kind].fmeasure for score in scores] for kind in scores[0]}
    together = metric.compute(predictions=tuple(TEXTS), references=tuple(REFERENCES))
    np.random.seed(1234)
    expected = BootstrapAggregator()
    for score in scores:
        expected.add_scores(score)
    assert together == {kind: found.mid.fmeasure for kind, found in expected.aggregate().items()}


def test_classes_are_scored_as_scikit_learn_scores_them():
    told = {"predictions": ["0", 1, 2, 2], "references": [0, 1, 1, 2]}
    assert metric_library.load("accuracy").compute(**told) == {"accuracy": 0.75}
    assert metric_library.load("f1").compute(**told, average="micro") == {"f1": 0.75}
    assert metric_library.load("f1").compute(**told, average=None)["f1"].tolist() == pytest.approx([1, 2 / 3, 2 / 3])
