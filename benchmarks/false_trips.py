"""How often a clean training of 100,000 steps is taken for a sick one, and which spikes in it are seen.

    python benchmarks/false_trips.py [--quick] [--steps 100000]

A real training: one block of width 32 with AdamW on the letters of this repository's own documentation, its steps as
`train` compiles them, with `on_spike: skip` and the default limits. Every update that is left out counts towards the
breaker (3 in a row, 5 in 100), and each time it opens is a false trip. A thousand starts with other batches tell of
the first steps, in which the window holds few losses and noise grows; 300 falls, on a line of 16, 40 or 100 letters
over and over, of a loss that goes from 4.9 to nearly 0.

Then each of the recorded losses but the first of a run is scored again where it is and moved up, with those before it
as they are: by 6, 8, 12 and 24 standard deviations of the noise around the trend. That is taken from how far a loss is
from the mean of its neighbours: at the same step of all runs of a kind, and in the long run within 500 steps. The
peer's column has what is seen above the window's median alone, which was all that was looked at until 2026-11-24.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from affinage.config.training import HealthSettings, PretrainSettings
from affinage.model import parse
from affinage.training import TrainJob
from affinage.training.health import Health, Incurable
from affinage.training.program import Program, step_of
from affinage.training.spikes import LossWindow

ROOT = Path(__file__).parent.parent
ROWS, CONTEXT, LETTERS, CHUNK = 8, 16, 128, 1000
STARTS, START = 1000, 128
LINES, FALLS = (16, 40, 100), 100  # letters of a line, and runs on each
MOVED = (0, 6, 8, 12, 24)  # standard deviations

Metrics = dict[str, np.ndarray]


def model() -> dict:
    block = {"kind": "transformer_block", "in": "embed", "attention": {"heads": 2, "rope": {"theta": 10000}}}
    return {
        "inputs": ["tokens"],
        "nodes": {
            "embed": {"kind": "embedding", "in": "tokens", "vocab": LETTERS, "width": 32},
            "block": {**block, "ffn": {"kind": "swiglu", "width": 64}, "norm": {"kind": "rms", "eps": 1e-6}},
            "norm": {"kind": "rms_norm", "in": "block"},
            "logits": {"kind": "unembed", "in": "norm", "vocab": LETTERS, "tied": False},
            "loss": {"kind": "next_token_loss", "in": ["logits", "tokens"]},
        },
    }


def batch_of(tokens: jax.Array) -> dict[str, jax.Array]:
    place = jnp.broadcast_to(jnp.arange(CONTEXT, dtype=jnp.int32), tokens.shape)
    whole = {"segment_ids": 0 * place, "loss_mask": jnp.ones(tokens.shape, jnp.float32)}
    return {"tokens": tokens, "positions": place, "rows": jnp.arange(ROWS, dtype=jnp.int32), **whole}


def documentation() -> jax.Array:
    text = "".join(path.read_text() for path in sorted(ROOT.glob("docs/*.md"))).encode("ascii", "replace")
    return jnp.asarray(np.frombuffer(text, np.uint8).astype(np.int32))


def recorder(steps: int, peak: float, warmup: int) -> Callable[[jax.Array, int, int], Metrics]:
    """What gives the metrics of the first steps of a training of `steps` on letters, whose batches a number draws."""
    from affinage.parallel import make_mesh

    settings = PretrainSettings.model_validate(
        {
            "steps": steps,
            "batch_size": ROWS,
            "schedule": {"peak_lr": peak, "min_lr": peak / 10, "warmup_steps": warmup},
            "health": {"on_spike": "skip"},
        }
    )
    first = jax.device_get(batch_of(jnp.zeros((ROWS, CONTEXT), jnp.int32)))

    class Feed:
        def iterate(self, start_step: int) -> object:
            raise NotImplementedError("the batches are drawn on the device")

    job = TrainJob(
        graph=parse(model()), settings=settings, mesh={"data": 1}, seed=0, feed=Feed(), folder=Path("unused")
    )
    program = Program(job, make_mesh(job.mesh, jax.devices()[:1]), first)
    step = step_of(program.held, program.optimizer, settings, program.call, job.seed)

    @partial(jax.jit, static_argnames="count")
    def chunk(state, letters, start, draw, count):
        key = jax.random.key(1 + draw)

        def one(state, number):
            at = jax.random.randint(jax.random.fold_in(key, number), (ROWS, 1), 0, len(letters) - CONTEXT)
            state, metrics = step(state, batch_of(letters[at + jnp.arange(CONTEXT)[None]]))
            return state, {name: metrics[name] for name in ("loss", "loss_z", "spike", "skipped", "grad_norm")}

        return jax.lax.scan(one, state, start + jnp.arange(count))

    begun = program.begin()

    def record(letters: jax.Array, steps: int, draw: int) -> Metrics:
        state, found = begun, []
        for start in range(0, steps, CHUNK):
            state, metrics = chunk(state, letters, start, draw, min(CHUNK, steps))
            found.append(jax.device_get(metrics))
            if start and start % (10 * CHUNK) == 0:
                print(f"{start:,} steps, loss {found[-1]['loss'].mean():.3f}", flush=True)
        return {name: np.concatenate([one[name] for one in found]) for name in found[0]}

    return record


def trips(metrics: Metrics) -> int:
    """How often the breaker opens, beginning anew each time."""
    settings, opened = HealthSettings(on_spike="skip"), 0
    with tempfile.TemporaryDirectory() as folder:
        health = Health(settings, Path(folder), 0, {})
        for step in np.flatnonzero(metrics["spike"] + metrics["skipped"]):
            try:
                health.look(int(step) + 1, {name: float(values[step]) for name, values in metrics.items()})
            except Incurable:
                opened, health = opened + 1, Health(settings, Path(folder), int(step) + 1, {})
    return opened


def noise(losses: np.ndarray) -> np.ndarray:
    """The standard deviation around the trend at each step of some runs; of a single one, within 500 steps of it."""
    off = losses[:, 1:-1] - (losses[:, 2:] + losses[:, :-2]) / 2
    variance = np.pad((off**2).mean(axis=0), 1, mode="edge") / 1.5  # a loss has its own noise and half of two others'
    if len(losses) == 1:
        around = min(500, (len(variance) - 1) // 2)
        variance = np.convolve(np.pad(variance, around, mode="reflect"), np.ones(2 * around + 1), "valid")
        variance /= 2 * around + 1
    return np.sqrt(variance)


@jax.jit
def seen(losses: jax.Array, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of every loss of a run, moved up by each of `MOVED`, whether it is a spike, and one by the median alone."""

    def one(window: LossWindow, at: tuple[jax.Array, jax.Array]):
        moved = at[0] + at[1] * jnp.asarray(MOVED, jnp.float32)
        scores = jax.vmap(window.score)(moved), jax.vmap(window.above_median)(moved)
        return window.with_loss(at[0]), tuple(score > HealthSettings().spike_deviations for score in scores)

    return jax.lax.scan(one, LossWindow.empty(HealthSettings().spike_window), (losses, noise))[1]


def shares(name: str, kinds: list[np.ndarray]) -> list[tuple[str, float, float | None, str]]:
    """Lines of how many of the losses of runs [R T], of some kinds, are seen where they are and moved up."""
    found = [jax.vmap(seen, (0, None))(jnp.asarray(losses), jnp.asarray(noise(losses))) for losses in kinds]
    ours, peer = (np.concatenate([np.asarray(each[which])[:, 1:] for each in found]) for which in (0, 1))
    clean = (f"{name}: clean losses taken for spikes", int(ours[..., 0].sum()), int(peer[..., 0].sum()), "")
    return [clean] + [
        (f"{name}: seen of spikes of {by} deviations", *(100 * float(s[..., at].mean()) for s in (ours, peer)), "%")
        for at, by in enumerate(MOVED)
        if by
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3,000 steps, 10 starts, 6 falls")
    parser.add_argument("--steps", type=int, default=100_000, help="a multiple of 1,000")
    asked = parser.parse_args()
    steps = 3 * CHUNK if asked.quick else asked.steps
    letters, record = documentation(), recorder(steps, peak=3e-3, warmup=100)
    metrics = record(letters, steps, 0)
    starts = [record(letters, START, draw) for draw in range(1, 11 if asked.quick else STARTS + 1)]
    fall = recorder(START, peak=1e-2, warmup=20)
    falls = [
        [fall(jnp.resize(letters[:line], CHUNK), START, draw) for draw in range(1, 3 if asked.quick else FALLS + 1)]
        for line in LINES
    ]
    begun, ended = (np.mean([run["loss"][at] for runs in falls for run in runs]) for at in (0, -1))
    lines = (
        ("clean steps", steps, None, ""),
        ("loss of the first thousand steps", float(metrics["loss"][:CHUNK].mean()), None, "nats"),
        ("loss of the last thousand steps", float(metrics["loss"][-CHUNK:].mean()), None, "nats"),
        ("largest score", float(metrics["loss_z"].max()), None, "deviations"),
        ("updates left out", int(metrics["skipped"].sum()), None, ""),
        ("false trips", trips(metrics), None, ""),
        *shares("of these", [metrics["loss"][None]]),
        ("other starts, of 128 steps each", len(starts), None, ""),
        ("largest score in them", float(max(run["loss_z"].max() for run in starts)), None, "deviations"),
        ("updates left out in them", int(sum(run["skipped"].sum() for run in starts)), None, ""),
        *shares("starts", [np.stack([run["loss"] for run in starts])]),
        ("falls, of 128 steps each", sum(map(len, falls)), None, ""),
        ("loss of their first step", float(begun), None, "nats"),
        ("loss of their last step", float(ended), None, "nats"),
        ("false trips in them", sum(trips(run) for runs in falls for run in runs), None, ""),
        *shares("falls", [np.stack([run["loss"] for run in runs]) for runs in falls]),
    )
    results = [
        {"name": name, "ours": ours, "peer": peer, "unit": unit, "ratio": None} for name, ours, peer, unit in lines
    ]
    print(json.dumps({"benchmark": "false_trips", "results": results}))


if __name__ == "__main__":
    main()
