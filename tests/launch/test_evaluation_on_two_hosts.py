"""Two hosts whose devices share one model judge it as one device does: alone, in the loop, watched, and as a stage."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from affinage.evaluation.run import evaluate
from affinage.hub.card import CardFacts
from affinage.hub.export import export
from affinage.pipeline.models import open_model
from choice_task import sums, write_items, write_task
from tiny_models import CONTEXT, tiny_llama

pytestmark = pytest.mark.full
TINY = str(Path(__file__).parents[1] / "recipes" / "tiny.yaml")
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


def launched(*words: str) -> list[str]:
    """What two hosts with two devices each have said."""
    command = [sys.executable, "-m", "affinage", "launch", *words, "--hosts", "2", "--devices", "2", "--failures", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return (ended.stdout + ended.stderr).splitlines()


@pytest.fixture(scope="module")
def road(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, list[str]]:
    """The folder of runs after the road was walked by two hosts, the task, and what they said."""
    folder = tmp_path_factory.mktemp("two")
    task = str(write_task(folder / "task", "sums", sums(20)))
    settings = [
        "data.sources=[{path: pocket-world, max_bytes: 0.05MB}]",
        "mesh={data: 2, fsdp: 2}",
        "pretrain.steps=4",
        "runtime.profile=2",
        f"pretrain.monitor={{tasks: ['{task}'], every_steps: 2, limit: 12, batch_size: 4}}",
        "sft.steps=2",
        f"sft.monitor={{tasks: ['{task}'], every_steps: 1, limit: 12, batch_size: 4, on_regression: log}}",
        f"evaluate={{tasks: ['{task}', pocket-world], limit: 3, max_new_tokens: 4}}",
        "export=null",
    ]
    words = [word for setting in settings for word in ("--set", setting)]
    return folder / "runs", task, launched(TINY, "--runs", str(folder / "runs"), *words)


def test_scores_in_the_loop_and_looks_at_benchmarks_are_those_of_the_checkpoints(road: tuple[Path, str, list[str]]):
    runs, task, said = road
    rows = [json.loads(line) for line in (runs / "tiny" / "pretrain" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "evaluation" in row]
    looks = json.loads((runs / "tiny" / "sft" / "watch.json").read_text())["looks"]
    assert [row["step"] for row in rows] == [0, 2, 4] and [look["step"] for look in looks] == [0, 1, 2]
    scores = [
        evaluate(open_model(model, runs), [task], draw=0, limit=12)["tasks"]["sums"]["metrics"]["acc"]
        for model in ("tiny/pretrain", "tiny/sft@2")
    ]
    assert rows[-1]["evaluation"]["tasks"]["sums"]["acc"] == scores[0]
    assert set(rows[-1]["evaluation"]["bits_per_byte"]) == {"en", "fr"}
    assert looks[-1]["scores"]["sums"]["value"] == scores[1]["value"]
    kept = (runs / "tiny" / "pretrain" / "benchmarks.jsonl").read_text().splitlines()
    assert len(kept) == 1 + 24, "one host has written them, each once"
    assert len([line for line in said if "  benchmarks: sums " in line]) == 3, "one host says them, each once"
    assert len(list((runs / "tiny" / "pretrain" / "profile").glob("host-[01]/**/*.xplane.pb"))) == 2


@pytest.mark.parametrize(("stage", "model"), [("evaluate-base", "tiny/pretrain"), ("evaluate-sft", "tiny/sft")])
def test_the_stages_that_judge_give_what_one_device_gives(
    road: tuple[Path, str, list[str]], tmp_path: Path, stage: str, model: str
):
    runs, task, _ = road
    together = json.loads((runs / "tiny" / stage / "results.json").read_text())
    alone = evaluate(
        open_model(model, runs),
        [task, "pocket-world"],
        folder=tmp_path / stage,
        task_folders={"pocket-world": next((runs / "store").glob("world-*")) / "tasks"},
        chat=stage == "evaluate-sft",
        limit=3,
        max_new_tokens=4,
    )
    assert together["tasks"].keys() == alone["tasks"].keys() and len(together["tasks"]) > 5
    for name in alone["tasks"]:
        items = [folder / stage / "items" / f"{name}.jsonl" for folder in (runs / "tiny", tmp_path)]
        assert items[0].read_text() == items[1].read_text(), name
    assert not (runs / "tiny" / stage / "answers.jsonl").exists()


def test_a_model_is_judged_by_two_hosts_as_by_one_device(tmp_path: Path):
    model = tmp_path / "model"
    export(tiny_llama(scale=3.0), model, facts=CardFacts(licence="apache-2.0"))
    items = [{**item, "text": f"{item['question']} {n}; " * (1 + 3 * n)} for n, item in enumerate(sums(9))]
    assert len(tiny_llama().tokenizer.encode(items[-1]["text"])) > 2 * CONTEXT, "a text of several windows"
    write_items(tmp_path, items)
    data = {"dataset_kwargs": {"data_files": {"test": "items.jsonl"}}, "test_split": "test", "dataset_path": "json"}
    tasks = []
    for name, task in TASKS.items():
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump({"task": name} | data | task))
        tasks.append(str(file))
    words = [str(model), "--tasks", ",".join(tasks), "--batch-size", "4", "--mesh", "fsdp=2,tensor=2"]
    launcher = [sys.executable, "-c", LAUNCHES, "eval", *words, "--runs", str(tmp_path / "two")]
    said = subprocess.run(launcher, capture_output=True, text=True, timeout=500, check=True).stdout.splitlines()
    one = tmp_path / "one"
    alone = open_model(str(model), tmp_path, mesh={"data": 1})
    expected = evaluate(alone, tasks, folder=one, keep=one / "answers.jsonl", batch_size=4)
    [found] = tmp_path.glob("two/evaluations/*/results.json")
    scores = [numbers(results["tasks"]) for results in (json.loads(found.read_text()), expected)]
    assert len(scores[1]) == 9 and scores[0] == pytest.approx(scores[1], rel=ALIKE)
    assert answers(found.parent / "answers.jsonl") == pytest.approx(answers(one / "answers.jsonl"), abs=ALIKE)
    assert sum("bits_per_byte" in line for line in said) == 1, "the first host alone shows the table"


LAUNCHES = """
import sys
from affinage.launch import LocalLauncher, Restarts, supervise
sys.exit(supervise(LocalLauncher(2, devices=2), sys.argv[1:], Restarts(preemptions=0, failures=0)))
"""


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
