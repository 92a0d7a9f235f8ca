"""The benchmarks of the pocket world: one true choice each, and loaded by the lm-evaluation-harness itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from affinage.data.world import french, write_world
from affinage.data.world.english import sentence
from affinage.data.world.templates import OBJECT_SLOTS, STATEMENTS
from affinage.errors import UserError
from affinage.evaluation.benchmarks import POCKET_TASKS
from affinage.evaluation.tasks import find_tasks
from affinage.recipe.data import POCKET_WORLD

FACT_TASKS = [f"pocket_{kind}_{language}" for kind in ("facts", "facts_unseen", "cross") for language in ("en", "fr")]
SIZES = {"facts": 300, "facts_unseen": 300, "cross": 100, "arithmetic": 90, "agreement": 200, "chat": 150}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_world(folder, megabytes=0.1, seed=0)
    return folder


def read_items(folder: Path, task: str) -> list[dict[str, Any]]:
    text = (folder / "tasks" / f"{task}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_all_tasks_are_there(folder: Path) -> None:
    for kind, size in SIZES.items():
        for language in ("en", "fr"):
            assert len(read_items(folder, f"pocket_{kind}_{language}")) >= size


@pytest.mark.parametrize("task", FACT_TASKS)
def test_exactly_one_choice_is_true(folder: Path, task: str) -> None:
    language = task[-2:]
    facts = {fact["id"]: fact for fact in json.loads((folder / "facts.json").read_text(encoding="utf-8"))}
    for item in read_items(folder, task):
        fact = facts[item["fact"]]
        truth = {fact["object"], *fact["also_true"]}
        assert [object_ in truth for object_ in item["objects"]].count(True) == 1
        assert item["objects"][item["answer"]] == fact["object"]
        assert len(set(item["choices"])) == len(set(item["objects"])) == 4
        told = french.agree(STATEMENTS[fact["relation"]][language][item["form"]], fact["plural"])
        right = item["choices"][item["answer"]]
        assert f"{item['context']} {right}." == sentence(told.format(**fact["forms"][language]))
        assert (language in fact["stated"]) == ("cross" not in task)
        if "cross" not in task:
            assert item["form"] in fact["held_out" if "unseen" in task else "used"][language]
        words = [fact["forms"][language][slot] for slot in OBJECT_SLOTS if slot in fact["forms"][language]]
        assert [choice in words for choice in item["choices"]].count(True) == 1


@pytest.mark.parametrize("language", ["en", "fr"])
def test_seen_and_unseen_ask_the_same_facts(folder: Path, language: str) -> None:
    seen = [item["fact"] for item in read_items(folder, f"pocket_facts_{language}")]
    assert seen == [item["fact"] for item in read_items(folder, f"pocket_facts_unseen_{language}")]


@pytest.mark.parametrize("language", ["en", "fr"])
def test_arithmetic(folder: Path, language: str) -> None:
    for item in read_items(folder, f"pocket_arithmetic_{language}"):
        a, b = item["a"], item["b"]
        result = {"+": a + b, "-": a - b, "*": a * b}[item["operation"]]
        assert [object_ == str(result) for object_ in item["objects"]].count(True) == 1
        assert item["objects"][item["answer"]] == str(result)
        assert len(set(item["choices"])) == 4


@pytest.mark.parametrize("language", ["en", "fr"])
def test_agreement_pairs_differ_by_little(folder: Path, language: str) -> None:
    for item in read_items(folder, f"pocket_agreement_{language}"):
        good, bad = item["choices"][item["answer"]].split(), item["choices"][1 - item["answer"]].split()
        if len(good) == len(bad):
            assert sum(a != b for a, b in zip(good, bad, strict=True)) == 1
        else:  # "l'âne": "les âne" has a word more
            assert "determiner" in item["phenomenon"]
            assert good[2:] == bad[1:] or good[1:] == bad[2:]


def test_answers_are_not_in_one_place(folder: Path) -> None:
    for task in FACT_TASKS:
        answers = [item["answer"] for item in read_items(folder, task)]
        assert all(0.15 < answers.count(place) / len(answers) < 0.35 for place in range(4))


def test_each_can_be_asked_for_by_its_name(folder: Path) -> None:
    world = {POCKET_WORLD: folder / "tasks"}
    assert {task["task"] for task in find_tasks([POCKET_WORLD], world).local} == set(POCKET_TASKS)
    found = find_tasks(["pocket_chat_fr", "piqa", "pocket_agreement_en"], world)
    assert [task["task"] for task in found.local] == ["pocket_chat_fr", "pocket_agreement_en"]
    assert found.named == ("piqa",) and [task["task"] for task in found.chat()] == ["pocket_chat_fr"]
    with pytest.raises(UserError, match="only a model of that world knows"):
        find_tasks(["pocket_agreement_en"], {})


def test_the_harness_runs_them(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    tasks = []
    for name in ("facts_en", "agreement_fr", "arithmetic_en", "chat_fr"):
        path = folder / "tasks" / f"pocket_{name}.yaml"
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert settings["task"] == path.stem
        files = settings["dataset_kwargs"]["data_files"]
        settings["dataset_kwargs"]["data_files"] = {split: str(path.parent / name) for split, name in files.items()}
        tasks.append(settings)
    manager = TaskManager(include_defaults=False)
    results = simple_evaluate(
        model="dummy", tasks=tasks, task_manager=manager, limit=4, bootstrap_iters=0, log_samples=True
    )
    assert set(results["results"]) == {settings["task"] for settings in tasks}
    sample = results["samples"]["pocket_facts_en"][0]
    context, continuation = sample["arguments"][0]
    assert continuation == " " + sample["doc"]["choices"][0]
    assert context == sample["doc"]["context"]
    assert results["samples"]["pocket_agreement_fr"][0]["arguments"][0][0] == ""
    assert "exact_match,none" in results["results"]["pocket_chat_fr"]
