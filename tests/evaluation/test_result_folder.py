"""A folder of results is of one model: of the next one nothing old stays, of the same one everything does."""

import json
import math
import shutil
from dataclasses import replace

import pytest

from affinage.evaluation.results import identity, read_results, write_results
from affinage.evaluation.run import evaluate
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
    """The folder of a model that was judged twice, what each evaluation gave, and what was said."""
    folder, told = tmp_path_factory.mktemp("judged"), []
    first, second = (evaluate(tiny_llama(), [task], folder=folder, log=told.append) for task in tasks)
    return folder, first, second, told


def test_the_same_model_adds_and_another_begins_anew(tasks, judged, tmp_path):
    folder, first, second, told = judged
    assert set(second["tasks"]) == {"ends"} and items(folder) == ["ends", "sums"] and not told
    kept = read_results(folder)
    assert kept["tasks"] == first["tasks"] | second["tasks"] and kept["samples"] == first["samples"] | second["samples"]
    retrained = shutil.copytree(folder, tmp_path / "retrained")
    other = evaluate(tiny_llama(seed=1), tasks[:1], folder=retrained, log=told.append)
    assert other["fingerprint"] != first["fingerprint"] == second["fingerprint"]
    assert items(retrained) == ["sums"] and read_results(retrained) == other
    assert len(told) == 1 and "ends, sums" in told.pop()
    assert items(folder) == ["ends", "sums"]


def test_of_what_the_harness_calls_perplexity_an_item_has_the_log_likelihood(judged):
    folder, _, found, _ = judged
    lines = [json.loads(line) for line in (folder / "items/ends.jsonl").read_text().splitlines()]
    assert all(line["log_likelihood"] < 0 and line["filter"] == "none" and "perplexity" not in line for line in lines)
    mean = sum(line["log_likelihood"] for line in lines) / len(lines)
    assert found["tasks"]["ends"]["metrics"]["perplexity"]["value"] == pytest.approx(math.exp(-mean))


def results(task, fingerprint="of a", **versions):
    found = {"fingerprint": fingerprint, "tasks": {task: {"items": 0}}, "samples": {task: []}, "versions": versions}
    return found | {"contamination": {"texts": 7, "tasks": {task: {"found": []}}}}


def test_each_task_has_the_versions_that_judged_it(tmp_path):
    for task, version in (("a", 1), ("b", 2), ("c", 2), ("b", 3)):
        write_results(results(task, lm_eval=version), {task: []}, tmp_path, print)
    merged = read_results(tmp_path)
    versions = {task: entry.get("versions") for task, entry in merged["tasks"].items()}
    assert versions == {"a": {"lm_eval": 1}, "b": None, "c": {"lm_eval": 2}} and merged["versions"] == {"lm_eval": 3}
    assert set(merged["contamination"]["tasks"]) == set("abc")


def test_items_that_a_kill_left_without_their_results_are_nobody_s(tmp_path):
    told = []
    write_results(results("a"), {"a": []}, tmp_path, told.append)
    (tmp_path / "results.json").unlink()
    write_results(results("b"), {"b": []}, tmp_path, told.append)
    assert items(tmp_path) == ["b"] and len(told) == 1 and set(read_results(tmp_path)["tasks"]) == {"b"}


def test_a_model_that_reads_or_is_told_otherwise_is_another():
    model = tiny_llama()
    told = replace(model, system_prompt="Be brief.")
    assert identity(model, "w") == identity(replace(model, name="b"), "w")
    assert len({identity(model, "w"), identity(model, "v"), identity(told, "w")}) == 3
