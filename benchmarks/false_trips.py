"""How often a clean training of 100,000 steps is taken for a sick one, and whether spikes in it are seen.

    python benchmarks/false_trips.py [--quick] [--steps 100000]

A real training: one block of width 32 with AdamW on the letters of this repository's own documentation, its steps as
`train` compiles them, with `on_spike: skip` and the default limits. Every update that is left out counts towards the
breaker (3 in a row, 5 in 100), and each time it opens is a false trip. A thousand starts with other batches tell of
the first steps, in which the window holds few losses. Then the recorded losses are scored again with one in 500 moved
up, by 8 robust standard deviations of the window before it: how many are seen.
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

from affinage.model import parse
from affinage.recipe.training import HealthSettings, PretrainSettings
from affinage.training import TrainJob
from affinage.training.health import Health, Incurable
from affinage.training.program import Program, step_of
from affinage.training.spikes import LossWindow

ROOT = Path(__file__).parent.parent
ROWS, CONTEXT, LETTERS, CHUNK = 8, 16, 128, 1000
STARTS, START = 1000, 128


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


def recorder(steps: int) -> Callable[..., dict[str, np.ndarray]]:
    """What gives the metrics of the first steps of a training of `steps`, whose batches a number draws."""
    from affinage.parallel import make_mesh

    text = "".join(path.read_text() for path in sorted(ROOT.glob("docs/*.md"))).encode("ascii", "replace")
    letters = jnp.asarray(np.frombuffer(text, np.uint8).astype(np.int32))
    settings = PretrainSettings.model_validate(
        {
            "steps": steps,
            "batch": ROWS,
            "schedule": {"peak": 3e-3, "floor": 3e-4, "warmup_steps": 100},
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
    def chunk(state, start, draw, count):
        key = jax.random.key(1 + draw)

        def one(state, number):
            at = jax.random.randint(jax.random.fold_in(key, number), (ROWS, 1), 0, len(letters) - CONTEXT)
            state, metrics = step(state, batch_of(letters[at + jnp.arange(CONTEXT)[None]]))
            return state, {name: metrics[name] for name in ("loss", "loss_z", "spike", "skipped", "grad_norm")}

        return jax.lax.scan(one, state, start + jnp.arange(count))

    begun = program.begin()

    def record(steps: int, draw: int = 0) -> dict[str, np.ndarray]:
        state, found = begun, []
        for start in range(0, steps, CHUNK):
            state, metrics = chunk(state, start, draw, min(CHUNK, steps))
            found.append(jax.device_get(metrics))
            if start and start % (10 * CHUNK) == 0:
                print(f"{start:,} steps, loss {found[-1]['loss'].mean():.3f}", flush=True)
        return {name: np.concatenate([one[name] for one in found]) for name in found[0]}

    return record


def trips(metrics: dict[str, np.ndarray]) -> int:
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


@jax.jit
def seen_among(losses: jax.Array, moved: jax.Array) -> jax.Array:
    def one(window: LossWindow, at: tuple[jax.Array, jax.Array]) -> tuple[LossWindow, jax.Array]:
        loss, sick = at
        spread = 1.4826 * jnp.nanmedian(jnp.abs(window.losses - jnp.nanmedian(window.losses)))
        loss = loss + jnp.where(sick, 8 * spread, 0.0)
        return window.with_loss(loss), window.score(loss) > HealthSettings().spike_deviations

    return jax.lax.scan(one, LossWindow.empty(HealthSettings().window), (losses, moved))[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3,000 steps")
    parser.add_argument("--steps", type=int, default=100_000, help="a multiple of 1,000")
    asked = parser.parse_args()
    steps = 3 * CHUNK if asked.quick else asked.steps
    record = recorder(steps)
    metrics = record(steps)
    starts = [record(START, draw) for draw in range(1, 11 if asked.quick else STARTS + 1)]
    moved = (np.arange(steps) % 500 == 499) & (np.arange(steps) > 500)
    seen = np.asarray(seen_among(jnp.asarray(metrics["loss"]), jnp.asarray(moved)))
    lines = (
        ("clean steps", steps, ""),
        ("loss of the first thousand steps", float(metrics["loss"][:CHUNK].mean()), "nats"),
        ("loss of the last thousand steps", float(metrics["loss"][-CHUNK:].mean()), "nats"),
        ("largest score", float(metrics["loss_z"].max()), "deviations"),
        ("updates left out", int(metrics["skipped"].sum()), ""),
        ("false trips", trips(metrics), ""),
        ("other starts, of 128 steps each", len(starts), ""),
        ("updates left out in them", int(sum(one["skipped"].sum() for one in starts)), ""),
        ("losses moved up by 8 deviations", int(moved.sum()), ""),
        ("of them seen", int(seen[moved].sum()), ""),
    )
    results = [{"name": name, "ours": ours, "peer": None, "unit": unit, "ratio": None} for name, ours, unit in lines]
    print(json.dumps({"benchmark": "false_trips", "results": results}))


if __name__ == "__main__":
    main()
