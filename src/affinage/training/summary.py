"""What is written down about a training at its end."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from affinage.hardware.devices import peak_bytes
from affinage.model.analysis import parameters
from affinage.model.parameter import parameters_in
from affinage.secrets import masked
from affinage.training.checkpointing import versions
from affinage.training.goodput import ACCOUNTS, GoodputTimer
from affinage.training.health import HealthMonitor
from affinage.training.metrics import read_rows
from affinage.training.trainer import Trainer


def summarize(
    trainer: Trainer, goodput: GoodputTimer, monitor: HealthMonitor, resumed_at: Sequence[int], steps: int, ended: str
) -> dict[str, Any]:
    """The JSON-able summary of a run that ended after a number of steps, for the reason `ended` if that is not "".

    `seconds` and `percent` split the time since the first start into the accounts of `affinage.training.goodput`;
    `saves` counts them, and has for how many seconds one stalled the loop, in the mean and at most. The speed and `mfu`
    are over the whole run, from the seconds of its steps alone; `data_time` are those of them in which the loop waited
    for the next batch, most of it while the devices computed.
    """
    rows = read_rows(trainer.job.folder)
    lines = [row for row in rows if "loss" in row]
    validation: dict[str, Any] = next((row["validation"] for row in reversed(rows) if "validation" in row), {})
    seconds, seen, stalls = goodput.rounded(), steps * trainer.tokens, goodput.stalls
    training, total = seconds["compute"] + seconds["data"], seconds["total"]
    peak, flops, count = trainer.peak_flops, trainer.flops_per_step, parameters(trainer.job.graph)
    return {
        "name": trainer.job.name,
        "parameters": {
            "total": count.total,
            "embedding": count.embedding,
            "non_embedding": count.non_embedding,
            "trained": sum(parameter.size for parameter in parameters_in(trainer.split.trainable.parameters)),
        },
        "flops_per_step": flops,
        "steps": steps,
        "tokens": seen,
        "seconds": seconds,
        "percent": {name: round(100 * seconds[name] / total, 3) for name in ACCOUNTS} if total else {},
        "saves": {
            "count": len(stalls),
            "stall_mean": round(sum(stalls) / max(len(stalls), 1), 6),
            "stall_most": max(stalls, default=0.0),
        },
        "tokens_per_second": seen / training if training else None,
        "data_time": round(_data_time(lines), 3),
        "mfu": flops * steps / training / peak if peak and training else None,
        "first_loss": lines[0]["loss"] if lines else None,
        "final_loss": lines[-1]["loss"] if lines else None,
        "skipped_updates": sum(bool(line["skipped"]) for line in lines),
        "health": monitor.facts(),
        "validation": validation,
        "predicted": {"parameters": count.total, "flops": flops * steps},
        "memory": {"peak_bytes": peak_bytes(trainer.mesh.local_devices)},
        "devices": _devices(trainer),
        "remat": trainer.remat,
        "resumed_at": list(resumed_at),
        "versions": versions(),
        **({"ended": ended} if ended else {}),
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


def _devices(trainer: Trainer) -> dict[str, Any]:
    kind = trainer.mesh.devices.flat[0].device_kind
    return {"kind": kind, "count": trainer.mesh.size, "mesh": dict(trainer.mesh.shape)}


def _data_time(lines: Sequence[Mapping[str, Any]]) -> float:
    """Seconds: every line has the mean of the steps since the line before."""
    steps = [0, *(line["step"] for line in lines)]
    return sum(line.get("data_time", 0.0) * (step - before) for line, before, step in zip(lines, steps, steps[1:]))
