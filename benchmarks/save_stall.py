# ruff: noqa: E402 -- devices are prepared before JAX is imported
"""How long a save stops the training loop, beside Orbax used plainly.

    python benchmarks/save_stall.py [--quick]

The state of a Llama with AdamW, 500 MB, is trained by its own step, which donates it, on one device. Between two steps
it is saved, in turns by `CheckpointStore`, which computes checksums of all arrays, and by Orbax's `Checkpointer` with
its defaults; both keep the newest two. The stall lasts until the save lets the loop continue. On a CPU the step after
it first copies the state, which is in use, and runs beside the writing, so that both together are what a loop waits
for. Medians of all saves but the first of each; on a machine with other work compare the CPU milliseconds, which count
all threads.
"""

import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from affinage.hardware.devices import prepare

prepare()  # before JAX is imported

import jax
import numpy as np
from measuring import batch_of, finish, options_of, result, trainer_of
from orbax.checkpoint import v1 as ocp
from twins import Size, graph_of

from affinage.checkpoint import CheckpointStore
from affinage.config.training import PretrainSettings
from affinage.model import parse

FULL = Size(width=512, ffn=1408, heads=8, layers=11, vocabulary=8192, context=64, batch=2)
PARTS = ("stall", "step after", "stall and step after", "rest")
QUICK = Size(width=256, ffn=704, heads=8, layers=4, vocabulary=2048, context=64, batch=2)


def clocks() -> np.ndarray:
    """Return milliseconds of the wall clock, and of the process on all cores."""
    return 1e3 * np.array([time.perf_counter(), time.process_time()])


def main() -> None:
    quick = options_of(__doc__).parse_args().quick
    size, saves = (QUICK, 6) if quick else (FULL, 20)
    schedule = {"peak_lr": 1e-4, "min_lr": 1e-5}
    settings = PretrainSettings.model_validate({"steps": 1000, "batch_size": size.batch, "schedule": schedule})
    tokens = np.random.default_rng(0).integers(0, size.vocabulary, (size.batch, size.context), np.int32)
    arrays = batch_of(tokens)
    trainer = trainer_of(parse(graph_of("llama", size)), settings, {"data": 1}, arrays)
    train_step, state, batch = trainer.compile_training(), trainer.begin(), trainer.put(arrays)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state.named()))
    taken: dict[str, list[np.ndarray]] = {}  # part -> of every save what it took, by both clocks
    with tempfile.TemporaryDirectory(prefix="affinage-bench-") as name:
        store = CheckpointStore(Path(name) / "ours")
        newest_two = ocp.training.preservation_policies.LatestN(2)
        plain = ocp.training.Checkpointer(Path(name) / "plain", preservation_policy=newest_two)
        for number in range(2 * saves + 2):
            who = ("ours", "plain")[number % 2]
            for _ in range(3):
                state = jax.block_until_ready(train_step(state, batch)[0])
            at = [clocks()]
            if who == "ours":
                store.save(number, state.named(), {"step": number})
            else:
                saving = plain.save_checkpointables_async(number, state.named())
            at.append(clocks())
            state = jax.block_until_ready(train_step(state, batch)[0])
            at.append(clocks())
            store.wait() if who == "ours" else saving.result()
            at.append(clocks())
            stall, step_after, rest = np.diff(at, axis=0)
            for part, spent in zip(PARTS, (stall, step_after, stall + step_after, rest), strict=True):
                taken.setdefault(f"{part}, {who}", []).append(spent)
    medians = {part: np.median(each[1:], axis=0) for part, each in taken.items()}  # the first one imports
    results = [
        result(f"{part}, {clock}", medians[f"{part}, ours"][index], "ms", medians[f"{part}, plain"][index])
        for part in PARTS
        for index, clock in enumerate(("wall", "CPU"))
    ]
    finish("save_stall", results, state_bytes=held, saves=saves)


if __name__ == "__main__":
    main()
