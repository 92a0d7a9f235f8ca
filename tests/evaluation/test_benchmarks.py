"""Named benchmarks over local files: the requests are those that lm-evaluation-harness makes of the hub's rows."""

import gzip
import json
from collections import defaultdict

import datasets
import huggingface_hub
import pytest
from lm_eval.tasks import TaskManager

from affinage.errors import UserError
from affinage.evaluation.harness import DEFINITIONS, load_tasks, quiet
from affinage.evaluation.tasks import BENCHMARKS, GROUPS, benchmark_items, files_of, find_tasks
from benchmark_fixtures import ITEMS, write_items


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
            folder = tmp_path / form
            folder.mkdir()
            stem = (name, *BENCHMARKS[name].get("files", ()))[-1]
            (folder / f"{stem}.jsonl.gz").write_bytes(gzip.compress(json.dumps(item).encode()))
            (config,) = find_tasks([name], folder)[0]
            (task,) = load_tasks([config]).values()
            assert requests_of(task) == expected, form
            assert task.config.metric_list == as_the_harness_has_it(name).config.metric_list


def test_groups_take_what_the_folder_has_and_say_what_it_has_not(tmp_path):
    folder = write_items(tmp_path / "items", ["piqa", "boolq", "xnli_fr"])
    found, left_out = find_tasks(["julian"], folder)
    assert [task["task"] for task in found] == ["piqa", "boolq"] and all("where" in task for task in found)
    assert set(left_out) == set(GROUPS["julian"]) - {"piqa", "boolq"}
    assert [file.name for file in files_of(["french", "piqa"], folder)] == ["xnli_fr.jsonl", "piqa.jsonl"]
    assert find_tasks(["julian"]) == ([{"task": name} for name in GROUPS["julian"]], [])


@pytest.mark.parametrize(
    ("task", "named"),
    [("arc_easy", "arc_easy"), ("french", "french"), ("quickstart", "pocket world")],
)
def test_a_folder_without_the_items_is_refused(task, named, tmp_path):
    with pytest.raises(UserError, match=named) as refused:
        find_tasks([task], tmp_path)
    assert refused.value.fix or refused.value.where


def test_a_row_of_another_form_is_named(tmp_path):
    (tmp_path / "belebele_fra_Latn.jsonl").write_text('{"question": "Où ?"}\n')
    (config,) = find_tasks(["belebele_fra_Latn"], tmp_path)[0]
    with pytest.raises(UserError, match=r"row 1 .* belebele_fra_Latn"):
        load_tasks([config])


def test_a_missing_network_is_told_once_and_soon(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9") as refused:
        list(benchmark_items(["piqa"]))
    assert "--data-dir" in refused.value.fix
