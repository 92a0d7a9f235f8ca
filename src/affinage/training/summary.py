"""What is written down about a training at its end."""

import importlib.metadata
import json
from collections.abc import Sequence
from typing import Any, Literal

import jax

import affinage
from affinage.hardware.devices import peak_bytes
from affinage.model.analysis import parameters
from affinage.model.layer import parameters_in
from affinage.secrets import masked
from affinage.training.goodput import GoodputTimer
from affinage.training.health import HealthMonitor
from affinage.training.metrics import read_rows
from affinage.training.trainer import Trainer

Ended = Literal["", "monitor"]  # at the last step; before it, by the job's monitor


def summarize(
    trainer: Trainer, goodput: GoodputTimer, monitor: HealthMonitor, resumed_at: Sequence[int], steps: int, ended: Ended
) -> dict[str, Any]:
    """The JSON-able summary of a run that ended after a number of steps.

    `seconds` splits the time since the first start into the accounts of `affinage.training.goodput`. The speed and
    `mfu` are over the whole run, from the seconds of its steps alone.
    """
    rows = read_rows(trainer.job.folder)
    lines = [row for row in rows if "loss" in row]
    seconds, tokens = goodput.seconds(), steps * trainer.tokens
    training, peak, flops = seconds["compute"] + seconds["data"], trainer.peak_flops, trainer.flops_per_step * steps
    count = parameters(trainer.job.graph)
    return {
        "name": trainer.job.name,
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
        "health": monitor.facts(),
        "validation": next((row["validation"] for row in reversed(rows) if "validation" in row), {}),
        "predicted": {"parameters": count.total, "flops": flops},
        "memory": {"peak_bytes": peak_bytes(trainer.mesh.local_devices)},
        "devices": _devices(trainer),
        "resumed_at": list(resumed_at),
        "versions": versions(),
        "ended": ended,
    }


def facts_for_trackers(trainer: Trainer) -> dict[str, Any]:
    """What trackers get to know about a run, as JSON."""
    facts = {
        "settings": trainer.job.settings.model_dump(mode="json"),
        "seed": trainer.job.seed,
        "parameters": parameters(trainer.job.graph).total,
        "flops_per_step": trainer.flops_per_step,
        "devices": _devices(trainer),
        "versions": versions(),
    }
    return dict(json.loads(masked(json.dumps(facts))))


def versions() -> dict[str, str]:
    """Versions of the software that decides about numbers."""
    names = ("jaxlib", "flax", "optax", "orbax-checkpoint")
    by_name = {name: importlib.metadata.version(name) for name in names}
    return {"affinage": affinage.__version__, "jax": jax.__version__, **by_name}


def _devices(trainer: Trainer) -> dict[str, Any]:
    kind = trainer.mesh.devices.flat[0].device_kind
    return {"kind": kind, "count": trainer.mesh.size, "mesh": dict(trainer.mesh.shape)}
