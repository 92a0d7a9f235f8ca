"""A sweep that is killed, or told to stop, goes on to the table of an undisturbed one, and makes nothing twice."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from affinage.errors import EXIT_PREEMPTED
from choice_task import sums, write_task

QUICK = "--xla_backend_optimization_level=0"  # much is compiled, and little computed
TESTS = Path(__file__).parents[1]
# The program itself, which gets a signal in the run of the point POINT: in a phase of its training, or between two
# batches of its evaluation.
PROGRAM = """
import os, signal
from affinage.cli import main, sweep
from affinage.evaluation import ledger, scoring
from phases import in_phase

PHASE, SIGNAL = os.environ["PHASE"], signal.Signals[os.environ["SIGNAL"]]
run, ledger._SECONDS = sweep._run, 0.0

def act():
    os.kill(os.getpid(), SIGNAL)

def hurt(point, runs):
    if point.number == int(os.environ["POINT"]):
        if PHASE == "scores":
            score = scoring.Scorer.score
            scoring.Scorer.score = lambda self, pairs, _: score(self, pairs, lambda more: more and act())
        else:
            in_phase(PHASE, act)
    run(point, runs)

sweep._run = hurt
main()
"""
GRID = {"sft.base_step": [4, 8], "sft.steps": [4, 6]}


def sweep(
    python: list[str], runs: Path, task: Path, point: int = 0, phase: str = "step", number: str = "SIGKILL"
) -> int:
    training = "batch: 4, schedule: {peak: 1.0e-3, floor: 0}"
    settings = [
        "data.sources=[{path: pocket-world, megabytes: 0.05}]",
        "tokenizer.vocabulary=400",
        "model.nodes.blocks.repeat=1",
        f"pretrain={{steps: 8, {training}, checkpoint: {{every_steps: 2, keep_every: 4}}}}",
        "export=null",
        "report={prompts: [], questions: []}",
        f"evaluate={{tasks: ['{task}'], batch: 4}}",
        f"sweep={json.dumps(GRID)}",
    ]
    words = [word for setting in settings for word in ("--set", setting)]
    recipe = TESTS / "recipes" / "tiny.yaml"
    paths = os.pathsep.join([str(TESTS / "training"), *filter(None, [os.environ.get("PYTHONPATH")])])
    told = {"PYTHONPATH": paths, "POINT": str(point), "PHASE": phase, "SIGNAL": number}
    ended = subprocess.run(
        [*python, "-c", PROGRAM, "sweep", str(recipe), "--runs", str(runs), *words],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK, **told},
        capture_output=True,
        check=False,
        timeout=550,
    )
    return ended.returncode


def results(runs: Path) -> dict[str, int]:
    """When each result was complete."""
    return {path.parent.name: path.stat().st_mtime_ns for path in (runs / "store").glob("*/manifest.json")}


def of(stage: str, found: dict[str, int]) -> int:
    return sum(name.rpartition("-")[0] == stage for name in found)


@pytest.mark.full
def test_a_stopped_sweep_goes_on_to_the_same_table_and_repeats_no_finished_run(tmp_path: Path, warm_python: list[str]):
    task = write_task(tmp_path, "sums", sums(30, unsure=" or so"))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert sweep([sys.executable], whole, task) == 0

    moments = [
        (2, "step", "SIGTERM", 1),
        (3, "scores", "SIGKILL", 2),
        (4, "scores", "SIGTERM", 3),
    ]
    before: dict[str, int] = {}
    for point, phase, number, tuned in moments:
        status = sweep(warm_python, killed, task, point, phase, number)
        assert status == (-signal.SIGKILL if number == "SIGKILL" else EXIT_PREEMPTED), (point, phase)
        now = results(killed)
        assert of("evaluate-sft", now) == tuned and now.items() >= before.items(), (point, phase)
        assert not (killed / "tiny" / "sweep.json").exists()
        before = now
    assert sweep(warm_python, killed, task) == 0

    table = (killed / "tiny" / "sweep.json").read_text()
    assert table == (whole / "tiny" / "sweep.json").read_text() and len(json.loads(table)) == 4
    after = results(killed)
    assert after.items() >= before.items() and after.keys() == results(whole).keys()
    summary = json.loads((killed / "tiny-002" / "sft" / "summary.json").read_text())
    # Told to stop in its first step, it has saved that or, where a thread heard of it late, the next one.
    assert summary["resumed_at"] in ([1], [2])
