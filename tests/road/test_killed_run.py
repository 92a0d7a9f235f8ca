"""The whole road in its real processes: killed ten times at random moments, it ends with the same bytes."""

import hashlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

KILLS = 10
RECIPE = Path(__file__).parent.parent / "recipes" / "tiny.yaml"
PROGRAM = ["-c", "from affinage.cli import main; main()"]
QUICK = "--xla_backend_optimization_level=0"  # much is compiled, and little computed


def start(python: list[str], runs: Path) -> subprocess.Popen:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK}
    return subprocess.Popen(
        [*python, *PROGRAM, "run", str(RECIPE), "--runs", str(runs), "--set", "pretrain.checkpoint.every_steps=2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def finished(python: list[str], runs: Path) -> str:
    process = start(python, runs)
    said, _ = process.communicate(timeout=550)
    assert process.returncode == 0, said
    return said


def digest(runs: Path, path: str) -> str:
    return hashlib.sha256((runs / "tiny" / path).read_bytes()).hexdigest()


@pytest.mark.full
def test_ten_kills_change_nothing_and_a_finished_run_does_nothing(tmp_path, warm_python):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    finished([sys.executable], undisturbed)  # with hashes of its own, which order sets

    draw = random.Random(0)
    died_at_work = 0
    for _ in range(KILLS):
        process = start(warm_python, killed)
        # So many lines of progress and a moment more: random places in the work, however fast the machine is.
        for _ in range(draw.randint(0, 4)):
            process.stdout.readline()
        time.sleep(draw.uniform(0, 0.5))
        died_at_work += process.poll() is None
        process.kill()
        process.communicate()
    assert died_at_work >= 5  # the others had come to the end of the road
    finished(warm_python, killed)

    for path in ("export/model/model.safetensors", "export/model/tokenizer.json"):
        assert digest(killed, path) == digest(undisturbed, path), path
    files = {p: p.stat().st_mtime_ns for p in (killed / "store").rglob("*") if p.is_file()}
    again = finished(warm_python, killed)
    assert "nothing" in again.lower()
    assert {p: p.stat().st_mtime_ns for p in (killed / "store").rglob("*") if p.is_file()} == files
