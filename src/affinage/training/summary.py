"""What is written down about a training at its end."""

import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax

import affinage
from affinage.cluster.processes import Processes
from affinage.hardware.devices import peak_bytes
from affinage.model.analysis import parameters
from affinage.model.layer import parameters_in
from affinage.secrets import masked
from affinage.training.metrics import METRICS, GoodputTimer, read_lines
from affinage.training.trainer import Trainer


def write_summary(
    trainer: Trainer,
    goodput: GoodputTimer,
    health: Mapping[str, Any],
    resumed_at: Sequence[int],
    steps: int,
    ended: str,
) -> dict[str, Any]:
    """Return the JSON-able summary of a run that ended after a number of steps; the first process writes summary.json.

    The speed and `mfu` are from the seconds of the steps alone. `ended`: why the run ended before its last step.
    """
    rows = read_lines(trainer.job.folder / METRICS)
    lines = [row for row in rows if "loss" in row]
    seconds, tokens = goodput.seconds(), steps * trainer.tokens
    training, peak, flops = seconds["compute"] + seconds["data"], trainer.peak_flops, trainer.flops_per_step * steps
    count = parameters(trainer.job.graph)
    summary = {
        "parameters": {
            "total": count.total,
            "embedding": count.embedding,
            "non_embedding": count.total - count.embedding,
            "trained": sum(parameter.size for parameter in parameters_in(trainer.split.trainable.parameters)),
        },
        "flops_per_step": trainer.flops_per_step,
        "steps": steps,
        "tokens": tokens,
        "seconds": seconds | {"total": round(sum(seconds.values()), 3)},
        "tokens_per_second": tokens / training if training else None,
        "mfu": flops / training / peak if peak and training else None,
        "first_loss": lines[0]["loss"] if lines else None,
        "final_loss": lines[-1]["loss"] if lines else None,
        "skipped_updates": sum(bool(line["skipped"]) for line in lines),
        "health": dict(health),
        "validation": next((row["validation"] for row in reversed(rows) if "validation" in row), {}),
        "predicted": {"parameters": count.total, "flops": flops},
        "memory": {"peak_bytes": peak_bytes(trainer.mesh.local_devices)},
        "devices": _devices(trainer),
        "resumed_at": list(resumed_at),
        "ended": "monitor" if ended else "",
    }
    if Processes.current.first:
        part = trainer.job.folder / "summary.json.part"
        part.write_text(json.dumps(summary, indent=1), encoding="utf-8")
        part.replace(part.with_suffix(""))
    return summary


def facts_for_trackers(trainer: Trainer) -> dict[str, Any]:
    """What trackers get to know about a run, as JSON."""
    settings, seed = trainer.job.settings.model_dump(mode="json"), trainer.job.seed
    facts = {"settings": settings, "seed": seed, "devices": _devices(trainer), "versions": versions()}
    return dict(json.loads(masked(json.dumps(facts))))


def versions() -> dict[str, str]:
    """Versions of the software that decides about numbers."""
    names = ("jaxlib", "flax", "optax", "orbax-checkpoint")
    by_name = {name: importlib.metadata.version(name) for name in names}
    return {"affinage": affinage.__version__, "jax": jax.__version__, **by_name}


def _devices(trainer: Trainer) -> dict[str, Any]:
    kind = trainer.mesh.devices.flat[0].device_kind
    return {"kind": kind, "count": trainer.mesh.size, "mesh": dict(trainer.mesh.shape)}
