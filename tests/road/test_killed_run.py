"""The program in its real processes: killed or stopped at any moment, it ends with what it ends with undisturbed."""

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
from affinage.errors import EXIT_PREEMPTED
from choice_task import sums, write_task

LONGEST = 550  # seconds
SMALL = ["data.sources=[{path: pocket-world, megabytes: 0.05}]", "tokenizer.vocabulary=400"]


def sets(settings: list[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def start(*words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "affinage", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(*words: str) -> str:
    process = start(*words)
    told, _ = process.communicate(timeout=LONGEST)
    assert process.returncode == 0, told
    return told


def hurt(when: Callable[[], object], *words: str, by: signal.Signals = signal.SIGKILL) -> int:
    """The exit status of a process that gets a signal once something is so, which must be before its end."""
    process, until = start(*words), time.monotonic() + LONGEST
    while not when():
        assert process.poll() is None and time.monotonic() < until, process.communicate()[0]
        time.sleep(0.005)
    process.send_signal(by)
    process.communicate(timeout=LONGEST)
    return process.returncode


def weights(runs: Path, training: str, step: int) -> list[np.ndarray]:
    """Weights and moments."""
    saved = CheckpointStore(runs / "tiny" / training / "checkpoints").restore(step, {"params": None, "opt_state": None})
    return [np.asarray(leaf) for leaf in jax.tree.leaves(saved)]


def assert_same(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


def done(runs: Path) -> dict[str, int]:
    """When each result was complete."""
    return {path.parent.name: path.stat().st_mtime_ns for path in (runs / "store").glob("*/manifest.json")}


def test_killed_while_it_trains_it_ends_with_the_same_bits(tiny_runs: Path, own_runs: Path):
    """Once in fine-tuning and once among the preferences, of the run that all tests share."""
    for stage in ("sft", "reference", "dpo"):
        shutil.rmtree((own_runs / "tiny" / stage).resolve())
    before = done(own_runs)
    words = ["run", *tiny_run.WORDS, "--runs", str(own_runs), "--until", "dpo"]
    for stage in ("sft", "dpo"):
        saved = f"store/{stage}-*/checkpoints/2/SHA256SUMS"
        assert hurt(lambda saved=saved: list(own_runs.glob(saved)), *words) == -signal.SIGKILL
    finish(*words)
    assert before.items() <= done(own_runs).items(), "nothing is made twice"
    resumed = [json.loads((own_runs / "tiny" / stage / "summary.json").read_text()) for stage in ("sft", "dpo")]
    assert all(summary["resumed_at"] for summary in resumed)
    for stage, step in (("sft", 5), ("dpo", 4)):
        assert_same(weights(own_runs, stage, step), weights(tiny_runs, stage, step))


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


@pytest.mark.full
def test_a_kill_while_benchmarks_are_scored_changes_no_score_and_no_weight(tmp_path: Path):
    task = write_task(tmp_path, "sums", sums(60, unsure=" or so"))
    look = f"{{tasks: ['{task}'], every_steps: %d, items: 60}}"
    settings = [*SMALL, "pretrain.steps=8", "pretrain.checkpoint.every_steps=2", "sft.steps=4"]
    settings += [f"pretrain.evaluate={look % 4}", f"sft.watch={look % 2}", "sft.watch.when_worse=keep"]
    found, whole, killed = [], tmp_path / "whole", tmp_path / "killed"

    def asked(runs: Path) -> list[str]:
        return ["sft", tiny_run.WORDS[0], "--runs", str(runs), *sets(settings)]

    for training, name in (("pretrain", "benchmarks.jsonl"), ("sft", "benchmarks.jsonl")):
        pattern = f"store/{training}-*/{name}"
        assert hurt(lambda pattern=pattern: list(killed.glob(pattern)), *asked(killed)) == -signal.SIGKILL
    for runs in (whole, killed):
        finish(*asked(runs))
        rows = map(json.loads, (runs / "tiny/pretrain/metrics.jsonl").read_text().splitlines())
        scores = [(row["step"], row["evaluation"]) for row in rows if "evaluation" in row]
        found.append((scores, json.loads((runs / "tiny/sft/watch.json").read_text())))
    assert found[0] == found[1] and [step for step, _ in found[0][0]] == [0, 4, 8]
    for training, step in (("pretrain", 8), ("sft", 4)):
        assert_same(weights(killed, training, step), weights(whole, training, step))


@pytest.mark.full
def test_a_stopped_sweep_goes_on_to_the_same_table_and_repeats_no_finished_run(tmp_path: Path):
    task = write_task(tmp_path, "sums", sums(30, unsure=" or so"))
    training = "batch: 4, schedule: {peak: 1.0e-3, floor: 0}"
    settings = [*SMALL, "export=null", "report={prompts: [], questions: []}", f"evaluate={{tasks: ['{task}']}}"]
    settings += [f"pretrain={{steps: 8, {training}, checkpoint: {{every_steps: 2, keep_every: 4}}}}"]
    settings += [f"sweep={json.dumps({'sft.base_step': [4, 8], 'sft.steps': [4, 6]})}"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def asked(runs: Path) -> list[str]:
        return ["sweep", tiny_run.WORDS[0], "--runs", str(runs), *sets(settings)]

    def begun(stage: str, count: int) -> Callable[[], bool]:
        return lambda: len(list(killed.glob(f"store/{stage}-*/request.json"))) >= count

    before: dict[str, int] = {}
    for stage, count, by in (("sft", 2, signal.SIGTERM), ("evaluate-sft", 3, signal.SIGKILL)):
        status = hurt(begun(stage, count), *asked(killed), by=by)
        assert status == (-signal.SIGKILL if by == signal.SIGKILL else EXIT_PREEMPTED)
        assert done(killed).items() >= before.items() and not (killed / "tiny/sweep.json").exists()
        before = done(killed)
    for runs in (whole, killed):
        finish(*asked(runs))
    table = (killed / "tiny/sweep.json").read_text()
    assert table == (whole / "tiny/sweep.json").read_text() and len(json.loads(table)) == 4
    assert done(killed).items() >= before.items() and done(killed).keys() == done(whole).keys()
