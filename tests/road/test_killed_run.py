"""The program in its real processes: killed at any moment, it ends with the bytes of an undisturbed run."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

import tiny_run
from affinage.checkpoint import CheckpointStore
from waiting import until

LONGEST = 550  # seconds


def start(*words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "affinage", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(*words: str) -> str:
    process = start(*words)
    told, _ = process.communicate(timeout=LONGEST)
    assert process.returncode == 0, told
    return told


def kill(process: subprocess.Popen, when: Callable[[], object]) -> None:
    """Once something is so, which must be before its end."""
    until(lambda: when() or process.poll() is not None, LONGEST)
    process.kill()
    told, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, told


def weights(runs: Path, training: str, step: int) -> list[np.ndarray]:
    """Weights and moments."""
    store = CheckpointStore(runs / "tiny" / training / "checkpoints")
    saved = store.restore(step, store.abstract(step))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(saved)]


def assert_same(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


def done(runs: Path) -> dict[str, str]:
    """What each complete result says of itself, and so when it was made."""
    return {path.parent.name: path.read_text() for path in (runs / "store").glob("*/manifest.json")}


def test_killed_while_it_trains_it_ends_with_the_same_bits(tiny_runs: Path, own_runs: Path):
    """Among the preferences, of the run that all tests share; what was made before is not made again."""
    for stage in ("ref-logprobs", "dpo"):
        shutil.rmtree((own_runs / "tiny" / stage).resolve())
    words = ["run", *tiny_run.WORDS, "--runs", str(own_runs), "--until", "dpo"]
    kill(start(*words), lambda: list(own_runs.glob("store/dpo-*/checkpoints/2/commit_success.txt")))
    before = done(own_runs)
    finish(*words)
    assert before.items() <= done(own_runs).items() and not any(name.startswith("dpo") for name in before)
    assert json.loads((own_runs / "tiny/dpo/summary.json").read_text())["resumed_at"]
    assert_same(weights(own_runs, "dpo", 4), weights(tiny_runs, "dpo", 4))


@pytest.mark.full
def test_ten_kills_at_random_moments_change_nothing(tiny_runs: Path, tmp_path: Path):
    killed, draw, died_at_work = tmp_path / "runs", random.Random(0), 0
    words = ["run", *tiny_run.WORDS, "--runs", str(killed)]
    for _ in range(10):
        process = start(*words)
        # A few lines of progress and a moment more: random places in the work, however fast the machine is.
        for _ in range(draw.randint(0, 4)):
            process.stdout.readline()
        time.sleep(draw.uniform(0, 0.5))
        died_at_work += process.poll() is None
        process.kill()
        process.communicate()
    assert died_at_work >= 5  # the others had come to the end
    finish(*words)
    for name in ("model.safetensors", "tokenizer.json"):
        ours, theirs = (runs / "tiny/export/model" / name for runs in (killed, tiny_runs))
        assert ours.read_bytes() == theirs.read_bytes(), name
    assert_same(weights(killed, "dpo", 4), weights(tiny_runs, "dpo", 4))
