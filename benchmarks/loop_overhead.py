# ruff: noqa: E402 -- the allocator is told before JAX is imported
"""What the training loop adds to the bare step: feed, metrics, health checks, progress, signals.

    python benchmarks/loop_overhead.py [--quick] [--rounds 5] [--steps 1500]

A step of about 5 ms on two CPU cores. The bare step runs on one batch that is on the device already, and waits as the
loop does: once at the end. The loop is `affinage.training.train` on packed rows of a feed, from its second hundred of
steps to its end, without saves and validation. They take turns; the ratio is of the medians, 1.03 is the goal. On a
machine with other work only the CPU milliseconds, of all threads, mean something.
"""

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from affinage.hardware.devices import acquire, prepare

prepare()

import jax
import numpy as np
from twins import Size, graph_of

from affinage.data.feed import RowFeed
from affinage.data.row_files import write_facts, write_rows
from affinage.data.special_tokens import BOS
from affinage.model import parse
from affinage.parallel import make_mesh
from affinage.recipe.training import PretrainSettings
from affinage.training import TrainJob, train
from affinage.training.program import Program

SIZE = Size(width=64, ffn=256, heads=4, layers=2, vocabulary=512, context=64, batch=8)
WARM = 100  # steps that are not timed


def write_text(folder: Path, rows: int) -> None:
    draw = np.random.default_rng(0)
    tokens = draw.integers(10, SIZE.vocabulary, (rows, SIZE.context)).astype(np.uint16)
    tokens[draw.random(tokens.shape) < 1 / 40] = BOS
    folder.mkdir(parents=True)
    files = write_rows(folder, [tokens], rows=rows, context=SIZE.context, shards=2, dtype=np.uint16)
    write_facts(folder, {"rows": rows, "context": SIZE.context, "files": files})


def job_of(folder: Path, rows: Path, steps: int, hook: object = None) -> TrainJob:
    settings = {
        "steps": steps,
        "batch": SIZE.batch,
        "schedule": {"name": "cosine", "peak": 1e-3, "floor": 1e-4},
        "validate_every": steps,
        "checkpoint": {"every_steps": steps},
        "log_every": 10,
    }
    return TrainJob(
        graph=parse(graph_of("llama", SIZE)),
        settings=PretrainSettings.model_validate(settings),
        mesh={"data": 1},
        seed=0,
        feed=RowFeed(rows, seed=0, batch=SIZE.batch),
        folder=folder,
        name="loop",
        on_step=() if hook is None else (hook,),
    )


def clocks() -> np.ndarray:
    """Seconds of the wall, and of the process on all cores."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return np.array([time.perf_counter(), used.ru_utime + used.ru_stime])


def bare(program: Program, step: object, steps: int) -> np.ndarray:
    """Seconds per step, of the wall and of CPU."""
    state, batch = program.begin(), program.put(program.batch)
    for _ in range(WARM):
        state, metrics = step(state, batch)
    jax.block_until_ready(metrics)
    began = clocks()
    for _ in range(steps - WARM):
        state, metrics = step(state, batch)
    jax.block_until_ready(metrics)
    return (clocks() - began) / (steps - WARM)


def looped(folder: Path, rows: Path, steps: int) -> np.ndarray:
    """Seconds per step, of the wall and of CPU, between two steps that the hook waits for."""
    times: dict[int, np.ndarray] = {}

    def hook(step: int, state: object) -> None:
        if step in (WARM, steps):
            jax.block_until_ready(state)
            times[step] = clocks()

    train(job_of(folder, rows, steps, hook))
    return (times[steps] - times[WARM]) / (steps - WARM)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps and rounds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1500)
    arguments = parser.parse_args()
    rounds, steps = (2, 300) if arguments.quick else (arguments.rounds, arguments.steps)
    with tempfile.TemporaryDirectory(prefix="affinage-bench-") as name:
        folder = Path(name)
        write_text(folder / "rows", 4096)
        job = job_of(folder / "bare", folder / "rows", steps)
        program = Program(job, make_mesh({"data": 1}, acquire()[:1]), next(job.feed.iterate(0)))
        step = program.compile_training()
        pairs = []
        for number in range(rounds):
            pairs.append((looped(folder / f"loop{number}", folder / "rows", steps), bare(program, step, steps)))
    results = []
    medians = 1e3 * np.median(np.array(pairs), axis=0)  # [loop or bare, wall or CPU]
    for clock, (ours, peer) in zip(("wall", "CPU"), medians.T.tolist(), strict=True):
        name = f"loop against bare step, {clock}"
        results.append({"name": name, "ours": ours, "peer": peer, "unit": "ms/step", "ratio": ours / peer})
        print(f"{clock}: loop {ours:.2f} ms a step, bare {peer:.2f} ms: {ours / peer:.3f}")
    print(json.dumps({"benchmark": "loop_overhead", "results": results}))


if __name__ == "__main__":
    main()
