"""`affinage eval MODEL` on two hosts, each with two devices of the four that hold the weights: as on one device."""

import json
from pathlib import Path

import pytest
import yaml

from affinage.evaluation.run import evaluate
from affinage.hub.card import CardFacts
from affinage.hub.export import export
from affinage.launch import LocalLauncher, Restarts, supervise
from affinage.stages.models import open_model
from choice_task import sums, write_items
from tiny_models import CONTEXT, tiny_llama

TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "right",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "last_word": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{' ' + choices[0]}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
}
ALIKE = 1e-5  # nats, and shares


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "model"
    export(tiny_llama(scale=3.0), folder, facts=CardFacts(licence="apache-2.0"))
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("tasks")
    items = [{**item, "text": f"{item['question']} {n}; " * (1 + 3 * n)} for n, item in enumerate(sums(9))]
    longest = tiny_llama().tokenizer.encode(items[-1]["text"])
    assert len(longest) > 2 * CONTEXT, "a text of several windows"
    write_items(folder, items)
    source = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "items.jsonl"}},
        "test_split": "test",
    }
    files = [folder / f"{name}.yaml" for name in TASKS]
    for file in files:
        file.write_text(yaml.safe_dump({"task": file.stem} | source | TASKS[file.stem]))
    return list(map(str, files))


def answers(file: Path) -> dict[str, float]:
    """What was asked of the model -> log-probability."""
    return {key: value for key, value, _ in map(json.loads, file.read_text().splitlines()[1:])}


def numbers(tasks: dict) -> dict[str, float]:
    """Every score and every standard error that there is."""
    return {
        f"{name} {metric} {part}": value
        for name, task in tasks.items()
        for metric, score in task["metrics"].items()
        for part, value in score.items()
        if value is not None
    }


def test_scores_and_log_probabilities_are_those_of_one_device(
    model: Path, tasks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("affinage.launch.process._LAST_WORDS", 60.0)  # whoever reads them may be late
    said: list[str] = []
    words = ["eval", str(model), "--tasks", ",".join(tasks), "--batch", "4", "--runs", str(tmp_path / "two")]
    launcher = LocalLauncher(2, devices=2, say=said.append)
    status = supervise(
        launcher, [*words, "--mesh", "fsdp=2,tensor=2"], Restarts(preemptions=0, failures=0), say=said.append
    )
    assert status == 0, "\n".join(said)

    alone = open_model(str(model), tmp_path, mesh={"data": 1})
    one = tmp_path / "one"
    expected = evaluate(alone, tasks, folder=one, keep=one / "answers.jsonl", batch=4)
    [found] = tmp_path.glob("two/evaluations/*/results.json")
    together = json.loads(found.read_text())
    assert together["tasks"].keys() == expected["tasks"].keys() == TASKS.keys()
    scores = [numbers(results["tasks"]) for results in (together, expected)]
    assert len(scores[1]) == 9 and scores[0] == pytest.approx(scores[1], rel=ALIKE)
    assert answers(found.parent / "answers.jsonl") == pytest.approx(answers(one / "answers.jsonl"), abs=ALIKE)
    # The table is told once, by the first host.
    assert sum("bits_per_byte" in line for line in said) == 1, "\n".join(said)
