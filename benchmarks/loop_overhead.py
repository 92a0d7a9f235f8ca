# ruff: noqa: E402 -- the allocator is told before JAX is imported
"""What the training loop adds to the bare step: feed, metrics, health checks, progress, signals.

    python benchmarks/loop_overhead.py [--quick] [--turns 30] [--steps 200]

A step of about 5 ms: the batch has as many rows as take that long here. The bare step runs on one batch that is on the
device already, and waits as the loop does: at the end of its turn. The loop is `affinage.training.train` on packed rows
of a feed, without saves and validation. They take turns of some hundred steps, within one training: the loop stands
while the bare step runs. The ratio is of the medians, 1.03 is the goal. On a machine with other work only the CPU
milliseconds, of all threads, mean something.
"""

import argparse
import json
import os
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from affinage.hardware.devices import acquire, prepare

prepare()

import jax
import numpy as np
from twins import Size, graph_of

from affinage.config.runtime import CheckpointSettings, RuntimeSettings
from affinage.config.training import PretrainSettings
from affinage.data.dataloader import DataLoader
from affinage.data.special_tokens import BOS
from affinage.data.token_shards import write_tokens
from affinage.model import parse
from affinage.parallel import make_mesh
from affinage.training import TrainJob, train
from affinage.training.trainer import Trainer

SIZE = Size(width=64, ffn=256, heads=4, layers=1, vocabulary=512, context=64, batch=4)
STEP = 5e-3  # seconds
WARM = 100  # steps that are not timed


def write_text(folder: Path, rows: int) -> None:
    draw = np.random.default_rng(0)
    tokens = draw.integers(10, SIZE.vocabulary, (rows, SIZE.context)).astype(np.uint16)
    tokens[draw.random(tokens.shape) < 1 / 40] = BOS
    folder.mkdir(parents=True)
    write_tokens(folder, tokens, shards=2)


def job_of(folder: Path, rows: Path, steps: int, batch: int) -> TrainJob:
    settings = {
        "steps": steps,
        "batch_size": batch,
        "schedule": {"name": "cosine", "peak_lr": 1e-3, "min_lr": 1e-4},
        "eval_every": steps,
        "log_every": 10,
    }
    return TrainJob(
        graph=parse(graph_of("llama", SIZE)),
        settings=PretrainSettings.model_validate(settings),
        runtime=RuntimeSettings(checkpoint=CheckpointSettings(every_steps=steps)),
        mesh={"data": 1},
        seed=0,
        feed=DataLoader(rows, seed=0, batch=batch),
        folder=folder,
        name="loop",
    )


def clocks() -> np.ndarray:
    """Seconds of the wall, and of the process on all cores."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return np.array([time.perf_counter(), used.ru_utime + used.ru_stime])


def program_of(job: TrainJob) -> Trainer:
    return Trainer(job, make_mesh({"data": 1}, acquire()[:1]), next(job.feed.iterate(0)))


def rows_of_a_step(folder: Path, rows: Path) -> int:
    """How many rows a step of 5 ms has, found in three goes: more rows take less time each."""
    batch = SIZE.batch
    for _ in range(3):
        turns = Turns(program_of(job_of(folder, rows, 1, batch)), WARM)
        turns.bare_turn()
        batch = max(1, round(batch * STEP / turns.bare_turn()[0]))
    return batch


class Turns:
    """A hook of the loop: times its steps, `steps` at a time, and lets the bare step have its turn after each."""

    def __init__(self, program: Trainer, steps: int) -> None:
        self._step, self._steps = program.compile_training(), steps
        self._state, self._batch = program.begin(), program.put(program.batch)
        self._begun = clocks()
        self.looped: list[np.ndarray] = []  # seconds per step, of the wall and of CPU, of each turn
        self.bare: list[np.ndarray] = []

    def __call__(self, step: int, state: object) -> None:
        if step < WARM or (step - WARM) % self._steps:
            return
        jax.block_until_ready(state)
        if step > WARM:
            self.looped.append((clocks() - self._begun) / self._steps)
            self.bare.append(self.bare_turn())
        else:
            self.bare_turn()
        self._begun = clocks()

    def bare_turn(self) -> np.ndarray:
        """Seconds per step, of the wall and of CPU."""
        begun = clocks()
        for _ in range(self._steps):
            self._state, _ = self._step(self._state, self._batch)
        jax.block_until_ready(self._state)
        return (clocks() - begun) / self._steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="five turns of 100 steps")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--steps", type=int, default=200, help="of a turn")
    arguments = parser.parse_args()
    turns, steps = (5, 100) if arguments.quick else (arguments.turns, arguments.steps)
    with tempfile.TemporaryDirectory(prefix="affinage-bench-") as name:
        folder = Path(name)
        write_text(folder / "rows", 4096)
        batch = rows_of_a_step(folder / "loop", folder / "rows")
        job = job_of(folder / "loop", folder / "rows", WARM + turns * steps, batch)
        taken = Turns(program_of(job), steps)
        train(replace(job, on_step=(taken,)))
    results = []
    medians = 1e3 * np.median([taken.looped, taken.bare], axis=1)  # [loop or bare, wall or CPU]
    for clock, (ours, peer) in zip(("wall", "CPU"), medians.T.tolist(), strict=True):
        name = f"loop against bare step, {clock}"
        results.append({"name": name, "ours": ours, "peer": peer, "unit": "ms/step", "ratio": ours / peer})
        print(f"{clock}: loop {ours:.2f} ms a step of {batch} rows, bare {peer:.2f} ms: {ours / peer:.3f}")
    print(json.dumps({"benchmark": "loop_overhead", "results": results}))


if __name__ == "__main__":
    main()
