"""Two processes whose devices share one model score it as one device does: in the loop, monitored, and as a step."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sqlitedict import SqliteDict

import tiny
from affinage.evaluation.run import evaluate
from affinage.pipeline.opening import open_model
from choice_task import sums, write_task
from run_affinage import set_words

pytestmark = pytest.mark.full
TINY = str(Path(__file__).parents[1] / "recipes" / "tiny.yaml")


@pytest.fixture(scope="module")
def road(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, list[str]]:
    """The folder of runs after the road was run by two processes, the task, and what they said."""
    folder = tmp_path_factory.mktemp("two")
    task = str(write_task(folder / "task", "sums", sums(20)))
    settings = [
        "data.sources=[{path: pocket-world, max_bytes: 0.05MB}]",
        "mesh={data: 2, fsdp: 2}",
        "pretrain.steps=4",
        "runtime.profile=[2, 2]",
        f"pretrain.monitor={{tasks: ['{task}'], every_steps: 2, limit: 12}}",
        "sft.steps=2",
        f"sft.monitor={{tasks: ['{task}'], every_steps: 1, limit: 12, on_regression: log}}",
        f"evaluate={{tasks: ['{task}', pocket-world], limit: 3}}",
        "export=null",
    ]
    words = ["launch", TINY, "--runs", str(folder / "runs"), *set_words(*settings)]
    words += ["--processes", "2", "--devices", "2", "--max-failures", "0"]
    ended = subprocess.run([sys.executable, "-m", "affinage", *words], capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder / "runs", task, (ended.stdout + ended.stderr).splitlines()


def test_scores_in_the_loop_and_looks_at_benchmarks_are_those_of_the_checkpoints(road: tuple[Path, str, list[str]]):
    runs, task, said = road
    rows = [row for row in tiny.lines(runs / "tiny" / "pretrain") if "evaluation" in row]
    looks = json.loads((runs / "tiny" / "sft" / "monitor.json").read_text())["points"]
    assert [row["step"] for row in rows] == [0, 2, 4] and [look["step"] for look in looks] == [0, 1, 2]
    models = (open_model(name, runs) for name in ("tiny/pretrain", "tiny/sft@2"))
    found = [evaluate(model, [task], sample_seed=0, limit=12)["tasks"]["sums"] for model in models]
    scores = [each["metrics"]["acc"] for each in found]
    assert rows[-1]["evaluation"]["tasks"]["sums"]["acc"] == scores[0]
    assert looks[-1]["scores"]["sums"]["value"] == scores[1]["value"]
    kept = SqliteDict(str(runs / "tiny" / "pretrain" / "benchmarks.db"), flag="r", decode=json.loads)
    assert len(kept) == 1 + 24, "one process has written them, each once"
    printed = [line for line in said if "  monitor: sums " in line]
    assert len(printed) == len(rows) + len(looks), "one process prints them, each once"
    assert len(list((runs / "tiny" / "pretrain" / "profile").glob("process-[01]/**/*.xplane.pb"))) == 2


@pytest.mark.parametrize(("stage", "model"), [("evaluate-base", "tiny/pretrain"), ("evaluate-sft", "tiny/sft")])
def test_the_stages_that_judge_give_what_one_device_gives(road, tmp_path: Path, stage: str, model: str):
    runs, task, _ = road
    together = json.loads((runs / "tiny" / stage / "results.json").read_text())
    how = {"folder": tmp_path / stage, "world": next((runs / "store").glob("synthesize-*")), "limit": 3}
    alone = evaluate(open_model(model, runs), [task, "pocket-world"], **how)
    assert together["tasks"].keys() == alone["tasks"].keys() and len(together["tasks"]) > 5
    for name in alone["tasks"]:
        items = [folder / stage / "items" / f"{name}.jsonl" for folder in (runs / "tiny", tmp_path)]
        assert items[0].read_text() == items[1].read_text(), name
    assert not (runs / "tiny" / stage / "answers.db").exists()
