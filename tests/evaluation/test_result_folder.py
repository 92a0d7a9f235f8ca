"""A folder of results is of one model: of the next one nothing old stays, of the same one everything does."""

import json
import math
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


def test_the_same_model_adds_and_another_begins_anew(tasks, tmp_path):
    folder = tmp_path / "judged"
    first, second = (evaluate(tiny_llama(), [task], folder=folder) for task in tasks)
    assert set(second["tasks"]) == {"ends"} and items(folder) == ["ends", "sums"]
    kept = read_json(folder / RESULTS)
    assert kept["tasks"] == first["tasks"] | second["tasks"] and kept["samples"] == first["samples"] | second["samples"]
    # Of what the harness calls perplexity an item has the log-likelihood.
    lines = [json.loads(line) for line in (folder / "items/ends.jsonl").read_text().splitlines()]
    assert all(line["log_likelihood"] < 0 and line["filter"] == "none" and "perplexity" not in line for line in lines)
    mean = sum(line["log_likelihood"] for line in lines) / len(lines)
    assert second["tasks"]["ends"]["metrics"]["perplexity"]["value"] == pytest.approx(math.exp(-mean))
    other = evaluate(tiny_llama(seed=1), tasks[:1], folder=folder)
    assert other["fingerprint"] != first["fingerprint"] == second["fingerprint"]
    assert items(folder) == ["sums"] and read_json(folder / RESULTS) == other


def test_searches_are_kept_together_and_items_that_a_kill_left_without_their_results_go(tmp_path):
    def write(task):
        found = {"fingerprint": "of a", "tasks": {task: {"items": 0}}, "samples": {task: []}}
        write_results(found | {"contamination": {"texts": 7, "tasks": {task: {"found": []}}}}, {task: []}, tmp_path)
        return read_json(tmp_path / RESULTS)

    assert set([write(task) for task in "aba"][-1]["contamination"]["tasks"]) == {"a", "b"}
    (tmp_path / RESULTS).unlink()
    assert set(write("c")["tasks"]) == {"c"} and items(tmp_path) == ["c"]


def test_a_model_that_reads_or_is_told_otherwise_is_another():
    model = tiny_llama()
    told, trained = replace(model, system_prompt="Be brief."), tiny_llama(seed=1)
    assert fingerprint(model) == fingerprint(replace(model, name="b"))
    assert len({fingerprint(model), fingerprint(trained), fingerprint(told)}) == 3
