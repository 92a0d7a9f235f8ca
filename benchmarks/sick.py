"""NaN, Inf and spikes in any layer and at any step of small trainings: each is left out, or gone back from.

python benchmarks/sick.py [--quick] [--injections 300]
"""

import argparse
import json
import math
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "training"))

import tiny
from sick_layers import INJECTIONS, SITES, SPIKE, graph, sick_kind

from affinage.checkpoint import CheckpointStore
from affinage.config.runtime import CheckpointSettings, RuntimeSettings
from affinage.training import TrainJob, train
from affinage.training.health import Health

STEPS = 300  # of a run; what is not finite comes at any of them, a spike from the second on, as the first is like none
EARLY = 20  # steps in which wrong values beneath the last norm may leave the loss where an untrained model has it
UNTRAINED = 1.02 * math.log(tiny.VOCABULARY)  # that loss and a little more, which is no spike in those steps
EACH = {"skip": 30, "rollback": 10}  # injections of a run: after ten rewinds it goes back no more
DONE = {"skip": "skipped", "rollback": "rewound"}  # how health.jsonl begins to tell of it
POLICIES = tuple(EACH)
KINDS = ("NaN", "Inf", "spike")


class Feed(tiny.RandomFeed):
    """Rows of a token or two each, soon learned, so that a spike stands out; sick in the steps that are named."""

    def __init__(self, sick: dict[int, int], row: int) -> None:
        super().__init__()
        self._sick, self._row = sick, row

    def batch(self, step: int) -> dict[str, np.ndarray]:
        batch = super().batch(step)
        batch["tokens"] = 7 * batch["rows"][:, None] + batch["segment_ids"]
        sick = np.zeros(self.rows, np.int32)
        sick[(step + self._row) % self.rows] = self._sick.get(step + 1, 0)
        return {**batch, "sick": sick}

    def iterate(self, start_step: int) -> Iterator[dict[str, np.ndarray]]:
        step = start_step
        while True:
            yield self.batch(step)
            step += 1


def _job(folder: Path, feed: Feed, policy: str) -> TrainJob:
    never = {"max_consecutive_skips": STEPS, "max_skips": STEPS}  # the breaker has its own tests
    health = {"on_nonfinite": policy, "on_spike": policy, **never}
    settings = tiny.settings(STEPS, health=health, eval_every=STEPS)
    runtime = RuntimeSettings(checkpoint=CheckpointSettings(every_steps=5, keep_last=3))
    return TrainJob(graph(), settings, mesh={"data": 1}, seed=1, feed=feed, folder=folder, runtime=runtime)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _no_spikes(folder: Path, kept: dict[int, int]) -> dict[int, int]:
    """Those of the injections that were trained on whose loss is that of a model that has learned nothing yet.

    Whatever a layer gives to the last norm, an untrained unembedding makes much the same loss of it, and in the first
    steps that is no more than the losses before. The batch is one like others, for the policy and for the comparison.
    """
    losses = {line["step"]: line["loss"] for line in _lines(folder / "metrics.jsonl") if "loss" in line}
    early = {step: code for step, code in kept.items() if code >= SPIKE and step < EARLY}
    return {step: code for step, code in early.items() if losses[step] <= UNTRAINED}


def _state(folder: Path) -> list[bytes]:
    store = CheckpointStore(folder / "checkpoints")
    state = store.restore(store.steps()[-1], {"params": None, "opt_state": None})
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def _without(job: TrainJob, steps: set[int]) -> None:
    """Train as if these batches had never been there; nothing is sick, and nothing has to be found."""
    begin = Health.__init__

    def knowing(health: Health, *given: object, **named: object) -> None:
        begin(health, *given, **named)  # type: ignore[arg-type]
        health.left_out = sorted(steps)

    Health.__init__ = knowing  # type: ignore[method-assign, assignment]
    try:
        train(job)
    finally:
        Health.__init__ = begin  # type: ignore[method-assign]


def inject(folder: Path, injections: int) -> dict[str, float]:
    """As many in all, half of them under each policy, in runs that are compared with one that lacks these batches."""
    draw, number = random.Random(0), 0
    found: Counter[str] = Counter()
    with sick_kind():
        for policy in POLICIES:
            left = injections // len(POLICIES)
            while left > 0:
                steps = _steps(draw, min(left, EACH[policy]))
                sick = {step: _drawn(draw, found, policy, step) for step in steps}
                left, number = left - len(steps), number + 1
                hurt, well = folder / f"hurt-{number}", folder / f"well-{number}"
                train(_job(hurt, Feed(sick, number), policy))
                events = _lines(hurt / "health.jsonl")
                done = {event["step"] for event in events if str(event["done"]).startswith(DONE[policy])}
                plain = _no_spikes(hurt, {step: sick[step] for step in set(sick) - done})
                _without(_job(well, Feed(plain, number), policy), set(sick) - set(plain))
                found[f"{policy}: done as the policy says"] += len(done & set(sick))
                found[f"{policy}: no spike, the loss an untrained model's"] += len(plain)
                found["clean steps left out"] += len({event["step"] for event in events} - set(sick))
                found["runs"] += 1
                found["runs that ended with other bits"] += _state(hurt) != _state(well)
                print(f"sick: {number} runs, {dict(found)}", flush=True)
    told = ["runs that ended with other bits", "clean steps left out"]
    return {"injections": injections} | {name: found[name] for name in sorted({*found, *told})}


def _steps(draw: random.Random, number: int) -> list[int]:
    """Every third of them is among the first."""
    early = draw.sample(range(1, EARLY), number // 3)
    return early + draw.sample(range(EARLY, STEPS), number - len(early))


def _drawn(draw: random.Random, found: Counter[str], policy: str, step: int) -> int:
    """The code of an injection."""
    kind = draw.choice(KINDS if step > 1 else KINDS[:2])
    found[f"{policy}: {kind}"] += 1
    found[f"{policy}: before step {EARLY}"] += step < EARLY
    if kind == "spike":
        return SPIKE + draw.randrange(SITES)
    return 1 + draw.choice([number for number, (_, _, name) in enumerate(INJECTIONS) if kind in name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 injections")
    parser.add_argument("--injections", type=int, default=300)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="affinage-bench-") as folder:
        found = inject(Path(folder), 20 if asked.quick else asked.injections)
    print(json.dumps({"benchmark": "sick", "results": found}))


if __name__ == "__main__":
    main()
