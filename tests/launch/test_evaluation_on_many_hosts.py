"""Benchmarks on two hosts whose devices share one model: in the loop, watched, and as a stage, as on one device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from affinage.evaluation.run import evaluate
from affinage.stages.models import open_model
from choice_task import sums, write_task

pytestmark = pytest.mark.full
TINY = str(Path(__file__).parents[1] / "recipes" / "tiny.yaml")


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of runs after the road was walked by two hosts with two devices each, and the task."""
    folder = tmp_path_factory.mktemp("two")
    task = str(write_task(folder / "task", "sums", sums(20)))
    settings = [
        "data.sources=[{path: pocket-world, megabytes: 0.05}]",
        "mesh={data: 2, fsdp: 2}",
        "pretrain.steps=4",
        "pretrain.profile=2",
        f"pretrain.evaluate={{tasks: ['{task}'], every_steps: 2, items: 12, batch: 4}}",
        "sft.steps=2",
        f"sft.watch={{tasks: ['{task}'], every_steps: 1, items: 12, batch: 4, when_worse: tell}}",
        f"evaluate={{tasks: ['{task}', pocket-world], limit: 3, max_new_tokens: 4}}",
        "export=null",
    ]
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "affinage", "launch", TINY, "--hosts", "2", "--devices", "2"]
    ended = subprocess.run(
        [*command, "--runs", str(folder / "runs"), "--failures", "0", *words],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (folder / "said").write_text(ended.stdout + ended.stderr)
    return folder / "runs", task


def lines(training: Path, kind: str) -> list[dict]:
    rows = [json.loads(line) for line in (training / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if kind in row]


def test_scores_in_the_loop_are_those_of_the_checkpoint_on_one_device(two_hosts: tuple[Path, str]):
    runs, task = two_hosts
    told = lines(runs / "tiny" / "pretrain", "evaluation")
    assert [row["step"] for row in told] == [0, 2, 4]
    alone = evaluate(open_model("tiny/pretrain", runs), [task], draw=0, limit=12)
    assert told[-1]["evaluation"]["tasks"]["sums"]["acc"] == alone["tasks"]["sums"]["metrics"]["acc"]
    assert set(told[-1]["evaluation"]["bits_per_byte"]) == {"en", "fr"}
    kept = (runs / "tiny" / "pretrain" / "benchmarks.jsonl").read_text().splitlines()
    assert len(kept) == 1 + 24, "one host has written them, each once"
    said = (runs.parent / "said").read_text().splitlines()
    assert len([line for line in said if "  benchmarks: sums " in line]) == 3, "one host says them, each once"


def test_looks_at_benchmarks_are_taken_by_all_hosts_and_written_by_one(two_hosts: tuple[Path, str]):
    runs, task = two_hosts
    looks = json.loads((runs / "tiny" / "sft" / "watch.json").read_text())["looks"]
    assert [look["step"] for look in looks] == [0, 1, 2]
    alone = evaluate(open_model("tiny/sft@2", runs), [task], draw=0, limit=12)
    assert looks[-1]["scores"]["sums"]["value"] == alone["tasks"]["sums"]["metrics"]["acc"]["value"]


def test_the_stages_that_judge_give_what_one_device_gives(two_hosts: tuple[Path, str], tmp_path: Path):
    runs, task = two_hosts
    world = next((runs / "store").glob("world-*")) / "tasks"
    for stage, model in (("evaluate-base", "tiny/pretrain"), ("evaluate-sft", "tiny/sft")):
        together = json.loads((runs / "tiny" / stage / "results.json").read_text())
        alone = evaluate(
            open_model(model, runs),
            [task, "pocket-world"],
            folder=tmp_path / stage,
            task_folders={"pocket-world": world},
            chat=stage == "evaluate-sft",
            limit=3,
            max_new_tokens=4,
        )
        assert together["tasks"].keys() == alone["tasks"].keys() and len(together["tasks"]) > 5
        for name in alone["tasks"]:
            items = [
                (folder / "items" / f"{name}.jsonl").read_text() for folder in (runs / "tiny" / stage, tmp_path / stage)
            ]
            assert items[0] == items[1], name
        assert not (runs / "tiny" / stage / "answers.jsonl").exists()
        assert together["contamination"] is not None or stage == "evaluate-base"


def test_each_host_has_written_a_trace_of_its_own(two_hosts: tuple[Path, str]):
    folder = two_hosts[0] / "tiny" / "pretrain" / "profile"
    assert sorted(entry.name for entry in folder.iterdir()) == ["host-0", "host-1"]
    for host in ("host-0", "host-1"):
        assert len(list((folder / host).rglob("*.xplane.pb"))) == 1
