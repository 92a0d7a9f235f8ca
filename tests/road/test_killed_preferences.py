"""Learning from preferences in its real process: killed at random steps, it ends with the same bits."""

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from affinage.checkpoint import CheckpointStore

STEPS, KILLS = 60, 2
RECIPE = Path(__file__).parent.parent / "recipes" / "tiny.yaml"
PROGRAM = ["-c", "from affinage.cli import main; main()"]
QUICK = "--xla_backend_optimization_level=0"  # much is compiled, and little computed
SETTINGS = [
    "data.sources=[{path: pocket-world, megabytes: 0.05}]",
    "pretrain.steps=2",
    "sft=null",
    "rows.context=96",
    f"dpo={{sources: [pocket-world], steps: {STEPS}, batch: 8, schedule: {{peak: 1.0e-3, floor: 1.0e-4}}}}",
    'dpo.system_prompt=""',
    "dpo.log_every=1",
    "dpo.checkpoint={every_steps: 4}",
]


def start(python: list[str], runs: Path, until: str) -> subprocess.Popen:
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK}
    command = [*python, *PROGRAM, "run", str(RECIPE), "--runs", str(runs), "--until", until, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def finished(python: list[str], runs: Path, until: str) -> None:
    process = start(python, runs, until)
    said, _ = process.communicate(timeout=550)
    assert process.returncode == 0, said


def steps_done(runs: Path) -> int:
    """Lines of metrics that a training which is not finished has written."""
    found = [len(path.read_text().splitlines()) for path in runs.glob("store/dpo-*/metrics.jsonl")]
    return max(found, default=0)


def last(runs: Path) -> dict:
    return CheckpointStore(runs / "tiny/dpo/checkpoints").restore(STEPS, {"params": None, "opt_state": None})


@pytest.mark.full
def test_kills_at_random_steps_change_no_bit(tmp_path: Path, warm_python: list[str]):
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    finished(warm_python, killed, "reference")
    shutil.copytree(killed, undisturbed, symlinks=True)
    finished([sys.executable], undisturbed, "dpo")  # with hashes of its own, which order sets

    draw, died_at_work = random.Random(0), 0
    for _ in range(KILLS):
        process = start(warm_python, killed, "dpo")
        wanted = steps_done(killed) + draw.randint(1, STEPS // (2 * KILLS))
        while steps_done(killed) < wanted and process.poll() is None:
            time.sleep(0.005)
        died_at_work += process.poll() is None
        process.kill()
        process.communicate()
    assert died_at_work
    finished(warm_python, killed, "dpo")
    for ours, theirs in zip(jax.tree.leaves(last(killed)), jax.tree.leaves(last(undisturbed)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
