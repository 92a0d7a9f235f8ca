# ruff: noqa: E402 -- devices are prepared before JAX is imported
"""What the training loop adds to the bare step: feed, metrics, health checks, progress, signals.

    python benchmarks/loop_overhead.py [--quick]

The bare step takes about 5 ms: the batch has as many rows as take that long here. It runs on one batch that is on the
device, and waits at the end of its turn. The loop is `affinage.training.train` on packed rows of a feed, without saves
and validation. They take turns of some hundred steps within one training: the loop stands still while the bare step
runs. The ratio is of the medians; the goal is 1.03. On a machine with other work, compare the CPU milliseconds, which
count all threads.
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
from measuring import finish, options_of, result, trainer_of
from twins import Size, graph_of

from affinage.config.recipe import CheckpointSettings, RuntimeSettings
from affinage.config.training import PretrainSettings
from affinage.data.dataloader import DataLoader
from affinage.data.special_tokens import BOS
from affinage.model import parse
from affinage.training import TrainJob, train
from token_rows import write_tokens

SIZE = Size(width=64, ffn=256, heads=4, layers=1, vocabulary=512, context=64, batch=4)
STEP = 5e-3  # seconds
WARM = 100  # steps that are not timed


def clocks() -> np.ndarray:
    """Return seconds of the wall clock, and of the process on all cores."""
    return np.array([time.perf_counter(), time.process_time()])


class Turns:
    """A hook of the loop that times its steps, and gives the bare step a turn after each turn of the loop."""

    def __init__(self, settings: PretrainSettings, rows: Path, batch: int, steps: int) -> None:
        arrays = next(DataLoader(rows, seed=0, batch=batch).iterate(0))
        trainer = trainer_of(parse(graph_of("llama", SIZE)), settings, {"data": 1}, arrays)
        self._step, self._steps = trainer.compile_training(), steps
        self._state, self._batch = trainer.begin(), trainer.put(arrays)
        self._begun = clocks()
        self.loop: list[np.ndarray] = []  # seconds a step of every turn, by both clocks
        self.bare: list[np.ndarray] = []

    def __call__(self, step: int, state: object) -> None:
        """Follow a step of the loop."""
        if step < WARM or (step - WARM) % self._steps:
            return
        jax.block_until_ready(state)
        loop, bare = (clocks() - self._begun) / self._steps, self.bare_turn()
        if step > WARM:
            self.loop.append(loop)
            self.bare.append(bare)
        self._begun = clocks()

    def bare_turn(self) -> np.ndarray:
        """Return seconds a step."""
        begun = clocks()
        for _ in range(self._steps):
            self._state, _ = self._step(self._state, self._batch)
        jax.block_until_ready(self._state)
        return (clocks() - begun) / self._steps


def main() -> None:
    turns, steps = (5, 100) if options_of(__doc__).parse_args().quick else (30, 200)
    total, batch = WARM + turns * steps, SIZE.batch
    with tempfile.TemporaryDirectory(prefix="affinage-bench-") as name:
        rows = Path(name) / "rows"
        rows.mkdir()
        draw = np.random.default_rng(0)
        tokens = draw.integers(10, SIZE.vocabulary, (4096, SIZE.context)).astype(np.uint16)
        tokens[draw.random(tokens.shape) < 1 / 40] = BOS
        write_tokens(rows, tokens, shards=2)

        def settings_of(batch: int) -> PretrainSettings:
            schedule = {"name": "cosine", "peak_lr": 1e-3, "min_lr": 1e-4}
            settings = {"steps": total, "batch_size": batch, "schedule": schedule, "eval_every": total, "log_every": 10}
            return PretrainSettings.model_validate(settings)

        for _ in range(3):  # more rows take less time each
            trial = Turns(settings_of(batch), rows, batch, WARM)
            trial.bare_turn()
            batch = max(1, round(batch * STEP / trial.bare_turn()[0]))
        taken = Turns(settings_of(batch), rows, batch, steps)
        train(
            TrainJob(
                graph=parse(graph_of("llama", SIZE)),
                settings=settings_of(batch),
                runtime=RuntimeSettings(checkpoint=CheckpointSettings(every_steps=total)),
                mesh={"data": 1},
                seed=0,
                feed=DataLoader(rows, seed=0, batch=batch),
                folder=Path(name) / "loop",
                on_step=(taken,),
            )
        )
    medians = 1e3 * np.median([taken.loop, taken.bare], axis=1)  # [loop or bare, clock]
    pairs = zip(("wall", "CPU"), medians.T.tolist(), strict=True)
    results = [result(f"loop against bare step, {clock}", ours, "ms/step", peer) for clock, (ours, peer) in pairs]
    finish("loop_overhead", results, rows=batch)


if __name__ == "__main__":
    main()
