"""Named benchmarks over local files: the requests are those that lm-evaluation-harness makes of the hub's rows."""

import gzip
import json

import datasets
import pytest
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml

from affinage.errors import UserError
from affinage.evaluation.benchmarks import BENCHMARKS, FRENCH, GROUPS, JULIAN, files_of
from affinage.evaluation.harness import tamed_harness, task_manager
from affinage.evaluation.item_files import DEFINITIONS
from affinage.evaluation.published import headline_metrics
from affinage.evaluation.run import evaluate
from affinage.evaluation.tasks import find_tasks
from benchmark_fixtures import ITEMS, write_items
from tiny_models import tiny_llama


def requests_of(task):
    task.build_all_requests(limit=None, rank=0, world_size=1)
    return [request.args for request in task.instances], [task.doc_to_target(doc) for doc in task.eval_docs]


def as_the_harness_has_it(name):
    """Its own definition, told nothing but where the hub's row comes from."""
    rows = datasets.Dataset.from_list([ITEMS[name][0]])
    config = load_yaml(DEFINITIONS / BENCHMARKS[name].definition)
    config.pop("tag", None)
    splits = {config.get(f"{kind}_split") for kind in ("training", "validation", "test", "fewshot")}
    splits |= {"train"}
    config["custom_dataset"] = lambda **_: {split: rows for split in splits if split}
    return ConfigurableTask(config=config)


@pytest.mark.parametrize("name", sorted(BENCHMARKS))
def test_local_items_are_put_as_the_harness_puts_the_hub_s(name, tmp_path):
    with tamed_harness():
        expected = requests_of(as_the_harness_has_it(name))
        assert expected[0], "an item makes requests"
        for form, item in zip(("hub", "other"), ITEMS[name]):
            if item is None:
                continue
            folder = tmp_path / form
            folder.mkdir()
            stem = (name, *BENCHMARKS[name].files)[-1]
            (folder / f"{stem}.jsonl.gz").write_bytes(gzip.compress(json.dumps(item).encode()))
            (config,) = find_tasks([name], {}, folder).local
            (task,) = task_manager([]).load([config])["tasks"].values()
            assert requests_of(task) == expected, form
            assert task.config.metric_list == as_the_harness_has_it(name).config.metric_list


def test_every_benchmark_has_a_fixture_and_a_definition():
    assert set(ITEMS) == set(BENCHMARKS)
    for name, benchmark in BENCHMARKS.items():
        assert load_yaml(DEFINITIONS / benchmark.definition)["task"] == name


def test_the_hub_s_definitions_are_found_without_reading_all_of_them():
    manager = task_manager([*JULIAN, *FRENCH])
    assert {*JULIAN, *FRENCH} <= set(manager.all_tasks) and len(manager.all_tasks) < 1000


def test_groups_take_what_the_folder_has_and_say_what_it_has_not(tmp_path):
    folder = write_items(tmp_path / "items", ["piqa", "boolq", "xnli_fr"])
    found = find_tasks(["julian"], {}, folder)
    assert [task["task"] for task in found.local] == ["piqa", "boolq"] and not found.named
    assert set(found.missing) == set(GROUPS["julian"]) - {"piqa", "boolq"}
    assert [file.name for file in files_of(["french", "piqa"], folder)] == ["xnli_fr.jsonl", "piqa.jsonl"]
    assert find_tasks(["julian"], {}).named == JULIAN


def test_the_group_julian_gives_its_seven_headline_metrics(tmp_path):
    folder = write_items(tmp_path / "items", JULIAN, copies=2)
    scored = evaluate(tiny_llama(), ["julian"], data_dir=folder, batch=8)["tasks"]
    headline = {
        "hellaswag": "acc_norm",
        "piqa": "acc",
        "lambada_openai": "acc",
        "arc_easy": "acc",
        "arc_challenge": "acc_norm",
        "winogrande": "acc",
        "boolq": "acc",
    }
    assert set(scored) == set(headline) and headline_metrics() == headline
    for task, metric in headline.items():
        entry = scored[task]
        assert entry["items"] == 2 and entry["metrics"][metric]["value"] in (0, 1), task  # two copies of one item
        assert entry["metrics"][metric]["stderr"] == 0, task
    assert scored["lambada_openai"]["metrics"]["perplexity"]["value"] > 1


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (["arc_easy"], "no items of `arc_easy`"),
        (["french"], "no items of `french`"),
        (["quickstart"], "pocket world"),
        (["piqa"], "holds no items"),
    ],
)
def test_what_is_not_there_is_said(tasks, message, tmp_path):
    (tmp_path / "piqa.jsonl").write_text("\n")
    with pytest.raises(UserError, match=message):
        find_tasks(tasks, {}, tmp_path)


def test_a_row_of_another_form_is_named(tmp_path):
    (tmp_path / "arc_fr.jsonl").write_text('{"question": "Où ?"}\n')
    (config,) = find_tasks(["arc_fr"], {}, tmp_path).local
    with pytest.raises(UserError, match="row 1 is not an item of arc_fr"):
        task_manager([]).load([config])


def test_a_missing_network_is_told_once_and_soon(monkeypatch, tmp_path):
    import huggingface_hub

    from affinage.evaluation.items import benchmark_items

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(UserError, match=r"cannot be fetched from http://127\.0\.0\.1:9"):
        list(benchmark_items(["piqa"]))
