"""Training that is killed while benchmarks are scored goes on to the same scores and weights."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from affinage.checkpoint import CheckpointStore
from choice_task import sums, write_task

QUICK = "--xla_backend_optimization_level=0"  # much is compiled, and little computed
RECIPE = Path(__file__).parent.parent / "recipes" / "tiny.yaml"
# The program itself, with answers on disk as they come; it kills itself after the first batch of its look number DIE.
PROGRAM = """
import os, signal
from affinage.evaluation import ledger, scoring

score, looks = scoring.Scorer.score, 0
ledger._SECONDS = 0.0

def counted(self, pairs, progress):
    global looks
    looks += 1

    def told(more):
        progress(more)
        if more and looks == int(os.environ["DIE"]):
            os.kill(os.getpid(), signal.SIGKILL)

    return score(self, pairs, told)

scoring.Scorer.score = counted
from affinage.cli import main
main()
"""


def run(python: list[str], runs: Path, task: Path, die: int) -> int:
    settings = [
        "data.sources=[{path: pocket-world, megabytes: 0.05}]",
        "tokenizer.vocabulary=400",
        "model.nodes.blocks.repeat=1",
        "pretrain.steps=8",
        "pretrain.checkpoint.every_steps=2",
        f"pretrain.evaluate={{tasks: ['{task}'], every_steps: 4, items: 12, batch: 4}}",
        "sft.steps=4",
        "sft.schedule={peak: 1.0e-2, floor: 1.0e-3}",
        f"sft.watch={{tasks: ['{task}'], every_steps: 2, items: 12, batch: 4, when_worse: keep}}",
    ]
    words = [word for setting in settings for word in ("--set", setting)]
    command = [*python, "-c", PROGRAM, "sft", str(RECIPE), "--runs", str(runs), *words]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK, "DIE": str(die)}
    return subprocess.run(command, env=environment, capture_output=True, check=False, timeout=550).returncode


def found(runs: Path) -> tuple[list[dict], dict, list[np.ndarray]]:
    """Scores of the pretraining and of the fine-tuning, and the weights of both."""
    rows = [json.loads(line) for line in (runs / "tiny/pretrain/metrics.jsonl").read_text().splitlines()]
    looks = [{"step": row["step"], "evaluation": row["evaluation"]} for row in rows if "evaluation" in row]
    weights = [
        leaf
        for training, step in (("pretrain", 8), ("sft", 4))
        for leaf in jax.tree.leaves(
            CheckpointStore(runs / "tiny" / training / "checkpoints").restore(step, {"params": None})
        )
    ]
    return looks, json.loads((runs / "tiny/sft/watch.json").read_text()), weights


@pytest.mark.full
def test_a_kill_within_a_look_changes_no_score_and_no_weight(tmp_path: Path, warm_python: list[str]):
    task = write_task(tmp_path, "sums", sums(30, unsure=" or so"))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run([sys.executable], whole, task, die=0) == 0

    assert run(warm_python, killed, task, die=2) == -signal.SIGKILL  # while the model of step 4 is scored
    (answers,) = killed.glob("store/pretrain-*/benchmarks.jsonl")
    kept = answers.read_text()
    assert 0 < len(kept.splitlines()) - 1 < 24 and not list(killed.glob("store/sft-*"))
    assert run(warm_python, killed, task, die=4) == -signal.SIGKILL  # while fine-tuning is watched
    assert list(killed.glob("store/sft-*")) and not list(killed.glob("store/sft-*/manifest.json"))
    assert run(warm_python, killed, task, die=0) == 0

    (looks, watched, weights), (looks_killed, watched_killed, weights_killed) = found(whole), found(killed)
    assert [look["step"] for look in looks] == [0, 4, 8] and [look["step"] for look in watched["looks"]] == [0, 2, 4]
    assert looks_killed == looks and watched_killed == watched
    for ours, theirs in zip(weights_killed, weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
