"""A folder of results is of one model: of the next one nothing old stays, of the same one everything does."""

import json
import math
import shutil
from dataclasses import replace

import pytest

from affinage.evaluation.results import RESULTS, fingerprint, write_results
from affinage.evaluation.run import evaluate
from affinage.results import read_json
from choice_task import sums, write_task
from tiny_models import tiny_llama

ENDS = {
    "output_type": "loglikelihood",
    "doc_to_choice": None,
    "doc_to_target": "two",
    "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    return [str(write_task(folder, name, sums(5), **told)) for name, told in (("sums", {}), ("ends", ENDS))]


def items(folder):
    return sorted(file.stem for file in (folder / "items").iterdir())


@pytest.fixture(scope="module")
def judged(tasks, tmp_path_factory):
    """The folder of a model that was judged twice, what each evaluation gave, ."""
    folder = tmp_path_factory.mktemp("judged")
    first, second = (evaluate(tiny_llama(), [task], folder=folder) for task in tasks)
    return folder, first, second


def test_the_same_model_adds_and_another_begins_anew(tasks, judged, tmp_path):
    folder, first, second = judged
    assert set(second["tasks"]) == {"ends"} and items(folder) == ["ends", "sums"]
    kept = read_json(folder / RESULTS)
    assert kept["tasks"] == first["tasks"] | second["tasks"] and kept["samples"] == first["samples"] | second["samples"]
    retrained = shutil.copytree(folder, tmp_path / "retrained")
    other = evaluate(tiny_llama(seed=1), tasks[:1], folder=retrained)
    assert other["fingerprint"] != first["fingerprint"] == second["fingerprint"]
    assert items(retrained) == ["sums"] and read_json(retrained / RESULTS) == other
    assert items(folder) == ["ends", "sums"]


def test_of_what_the_harness_calls_perplexity_an_item_has_the_log_likelihood(judged):
    folder, _, found = judged
    lines = [json.loads(line) for line in (folder / "items/ends.jsonl").read_text().splitlines()]
    assert all(line["log_likelihood"] < 0 and line["filter"] == "none" and "perplexity" not in line for line in lines)
    mean = sum(line["log_likelihood"] for line in lines) / len(lines)
    assert found["tasks"]["ends"]["metrics"]["perplexity"]["value"] == pytest.approx(math.exp(-mean))


def results(task):
    found = {"fingerprint": "of a", "tasks": {task: {"items": 0}}, "samples": {task: []}}
    return found | {"contamination": {"texts": 7, "tasks": {task: {"found": []}}}}


def test_the_searches_of_several_tasks_are_kept_together(tmp_path):
    for task in "aba":
        write_results(results(task), {task: []}, tmp_path)
    assert set(read_json(tmp_path / RESULTS)["contamination"]["tasks"]) == {"a", "b"}


def test_items_that_a_kill_left_without_their_results_are_nobody_s(tmp_path):
    write_results(results("a"), {"a": []}, tmp_path)
    (tmp_path / "results.json").unlink()
    write_results(results("b"), {"b": []}, tmp_path)
    assert items(tmp_path) == ["b"] and set(read_json(tmp_path / RESULTS)["tasks"]) == {"b"}


def test_a_model_that_reads_or_is_told_otherwise_is_another():
    model = tiny_llama()
    told, trained = replace(model, system_prompt="Be brief."), tiny_llama(seed=1)
    assert fingerprint(model) == fingerprint(replace(model, name="b"))
    assert len({fingerprint(model), fingerprint(trained), fingerprint(told)}) == 3
