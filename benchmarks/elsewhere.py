"""A run saved on eight devices goes on elsewhere: what stays the same, and what rounding makes of the rest.

    python benchmarks/elsewhere.py [--quick] [--seeds 5]

A llama-like model is trained for 50 steps on eight CPU devices (data 2, fsdp 2, tensor 2) and saved. From there each
mesh goes on by itself for 100 steps. Compared are the state as restored and the batches on the devices, bit for bit;
the training loss of each of the next 20 steps with that of the eight devices; and after 100 steps the held-out loss,
whose difference is given as a share of the standard deviation between seeds of the same run.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
from twins import Size, graph_of

from affinage.checkpoint import CheckpointStore
from affinage.config.runtime import CheckpointSettings, RuntimeSettings
from affinage.config.training import PretrainSettings
from affinage.hardware.devices import acquire
from affinage.model import parse
from affinage.parallel import make_mesh
from affinage.training import TrainJob, train
from affinage.training.program import Program
from affinage.training.state import TrainState

SIZE = Size(width=64, ffn=176, heads=4, layers=2, vocabulary=256, context=64, batch=8)
SAVED, CLOSE, STEPS = 50, 20, 150  # steps until the save, that are compared one by one, and in all
EIGHT = {"data": 2, "fsdp": 2, "tensor": 2}
MESHES = (
    {**EIGHT},
    {"data": 1},
    {"fsdp": 2},
    {"tensor": 2},
    {"fsdp": 4},
    {"data": 2, "tensor": 2},
    {"fsdp": 2, "tensor": 4},
    {"data": 4, "fsdp": 2},
)


class Chain:
    """Rows of a Markov chain with four likely successors of each token; a function of (seed, step) alone."""

    bytes = 1

    def __init__(self, seed: int) -> None:
        self._seed, self._next = seed, np.random.default_rng(7).integers(0, SIZE.vocabulary, (SIZE.vocabulary, 4))

    def batch(self, step: int) -> dict[str, np.ndarray]:
        draw = np.random.default_rng((self._seed, step))
        tokens = np.empty((SIZE.batch, SIZE.context), np.int32)
        tokens[:, 0] = draw.integers(0, SIZE.vocabulary, SIZE.batch)
        chosen = np.minimum(draw.geometric(0.5, tokens.shape) - 1, 3)
        for at in range(1, SIZE.context):
            tokens[:, at] = self._next[tokens[:, at - 1], chosen[:, at]]
        place = np.broadcast_to(np.arange(SIZE.context, dtype=np.int32), tokens.shape)
        rows, ones = np.arange(SIZE.batch, dtype=np.int32), np.ones(tokens.shape, np.float32)
        return {"tokens": tokens, "segment_ids": 0 * place, "positions": place, "loss_mask": ones, "rows": rows}

    def iterate(self, start_step: int) -> Iterator[dict[str, np.ndarray]]:
        while True:
            yield self.batch(start_step)
            start_step += 1

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return (self.batch(step) for step in range(8))


def job_of(folder: Path, mesh: dict[str, int], seed: int = 0) -> TrainJob:
    settings = {
        "steps": STEPS,
        "batch_size": SIZE.batch,
        "schedule": {"peak_lr": 3e-3, "min_lr": 3e-4, "warmup_steps": 10},
        "eval_every": STEPS,
        "log_every": 1,
    }
    return TrainJob(
        graph=parse(graph_of("llama", SIZE)),
        settings=PretrainSettings.model_validate(settings),
        runtime=RuntimeSettings(checkpoint=CheckpointSettings(every_steps=SAVED, keep_every=SAVED)),
        mesh=mesh,
        seed=seed,
        feed=Chain(seed),
        folder=folder,
        validation={"held out": Chain(10**6)},
    )


def finish(job: TrainJob) -> tuple[np.ndarray, float]:
    """(training losses after the save, held-out loss at the end)."""
    summary = train(job)
    lines = [json.loads(line) for line in (job.folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line and line["step"] > SAVED]
    return np.array(losses), summary["validation"]["held out"]["loss"]


def same_bits(job: TrainJob, saved: Path) -> bool:
    """Whether state and batches on the mesh are bit for bit what was saved, and what the feed gives."""
    program = Program(job, make_mesh(job.mesh, acquire()), job.feed.batch(0))
    state = TrainState(**CheckpointStore(job.folder / "checkpoints").restore(SAVED, program.abstract.named()))
    written = CheckpointStore(saved).restore(SAVED, dict.fromkeys(state.named()))
    pairs = list(zip(jax.tree.leaves(state.named()), jax.tree.leaves(written), strict=True))
    for step in range(SAVED, SAVED + 3):
        batch = job.feed.batch(step)
        pairs += [(array, batch[name]) for name, array in program.put(batch).items()]
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two meshes, two seeds")
    parser.add_argument("--seeds", type=int, default=5)
    asked = parser.parse_args()
    meshes, seeds = ((MESHES[0], MESHES[-2]), 2) if asked.quick else (MESHES, asked.seeds)
    results = []
    with tempfile.TemporaryDirectory(prefix="affinage-bench-") as root:
        expected, held_out = finish(job_of(Path(root) / "eight", EIGHT))
        saved = Path(root) / "eight" / "checkpoints"
        others = [finish(job_of(Path(root) / f"seed{n}", {"data": 1}, n))[1] for n in range(1, seeds)]
        noise = statistics.stdev([held_out, *others])
        results.append({"name": "held-out loss, standard deviation between seeds", "ours": noise, "unit": "nats"})
        for mesh in meshes:
            name = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
            job = job_of(Path(root) / name, mesh)
            shutil.copytree(saved / str(SAVED), job.folder / "checkpoints" / str(SAVED))
            same = same_bits(job, saved)
            losses, last = finish(job)
            apart = np.abs(losses / expected - 1)
            facts = (
                ("state and batches bit for bit", float(same), ""),
                (f"largest relative difference of the loss in {CLOSE} steps", float(apart[:CLOSE].max()), ""),
                ("the same over 100 steps", float(apart.max()), ""),
                ("held-out loss after 100 steps, difference", abs(last - held_out) / noise, "standard deviations"),
            )
            results += [{"name": f"{name}: {fact}", "ours": value, "unit": unit} for fact, value, unit in facts]
            print(name, [f"{fact}: {value:.3g}" for fact, value, _ in facts], flush=True)
    lines = [{**line, "peer": None, "ratio": None} for line in results]
    print(json.dumps({"benchmark": "elsewhere", "results": lines}))


if __name__ == "__main__":
    main()
