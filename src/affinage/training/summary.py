"""What is written down about a run: with every checkpoint, and at the end."""

import datetime
import importlib.metadata
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from pydantic import FiniteFloat, TypeAdapter, ValidationError
from typing_extensions import TypedDict

import affinage
from affinage.checkpoint.compatibility import IDENTITY
from affinage.hardware.devices import peak_bytes
from affinage.model.analysis import parameters
from affinage.model.parameter import parameters_in
from affinage.secrets import masked
from affinage.training.health import Health
from affinage.training.ledger import ACCOUNTS, Ledger
from affinage.training.metrics import MetricsLog
from affinage.training.program import Program


def checkpoint_meta(program: Program, ledger: Ledger, health: Health, resumed_at: Sequence[int]) -> dict[str, Any]:
    """Facts saved with a checkpoint: what made it, where, and the accounts that a resumed run carries on."""
    job = program.job
    return {
        "name": job.name,
        IDENTITY: identity(program),
        "settings": job.settings.model_dump(mode="json"),
        "mesh": dict(program.mesh.shape),
        "remat": remat(program),
        "seconds": ledger.rounded(),
        "stalls": ledger.stalls,
        "clock": time.time(),  # seconds since 1970 at which the accounts above end
        "health": health.facts(),
        "resumed_at": list(resumed_at),
        "saved": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
    }


class _Health(TypedDict, total=False):
    sick: list[int]
    left_out: list[int]
    rewinds: list[tuple[int, int]]
    spikes: int


class _Carried(TypedDict, total=False):
    """Those of the facts above that a run goes on with."""

    identity: dict[str, Any]
    seconds: dict[str, FiniteFloat]
    stalls: list[FiniteFloat]
    clock: FiniteFloat
    health: _Health
    resumed_at: list[int]


def check_carried(meta: Mapping[str, Any]) -> None:
    """Raise ValueError, in one line, if facts that a run goes on with are not such as `checkpoint_meta` gives."""
    try:
        TypeAdapter(_Carried).validate_python(meta)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"what it says of its run is not of a training: {place}: {first['msg']}") from None


def identity(program: Program) -> dict[str, Any]:
    """What decides over the numbers of a run, as JSON: model, settings, seed, rows of a batch, data, others' code."""
    job = program.job
    # How many rows a step has may hang on the devices: what counts is how many they were.
    facts = {
        **job.settings.deciding(),
        "batch_size": program.rows,
        "model": job.graph.to_dict(),
        "seed": job.seed,
        "data": dict(job.data),
    }
    if job.code:
        facts["code"] = dict(job.code)
    del facts["per_device_batch_size"]
    return dict(json.loads(json.dumps(facts)))


def summarize(
    program: Program, metrics: MetricsLog, ledger: Ledger, health: Health, resumed_at: Sequence[int], steps: int
) -> dict[str, Any]:
    """The JSON-able summary of a run that ended after so many steps.

    `seconds` and `percent` split the time since the first start into the accounts of `affinage.training.ledger`;
    `saves` counts them, and has for how many seconds one stalled the loop, in the mean and at most.
    `tokens_per_second` (of a model of images `images_per_second`) and `mfu` are over the whole run, from the seconds
    of its steps alone; `data_wait` are those of them in which the next batch was waited for, most of it while the
    devices computed.
    """
    lines = metrics.training()
    seconds, seen = ledger.rounded(), steps * program.units
    training, total = seconds["compute"] + seconds["data"], seconds["total"]
    stalls = ledger.stalls
    peak, flops = program.peak_flops, program.flops_per_step
    count = parameters(program.job.graph)
    trained = sum(parameter.size for parameter in parameters_in(program.held.trained.parameters))
    device = program.mesh.devices.flat[0]
    return {
        "name": program.job.name,
        "parameters": {
            "total": count.total,
            "embedding": count.embedding,
            "non_embedding": count.non_embedding,
            "trained": trained,
        },
        "flops_per_step": flops,
        "steps": steps,
        program.unit: seen,
        "seconds": seconds,
        "percent": {name: round(100 * seconds[name] / total, 3) for name in ACCOUNTS} if total else {},
        "saves": {"count": len(stalls), "stall_mean": _mean(stalls), "stall_most": max(stalls, default=0.0)},
        f"{program.unit}_per_second": seen / training if training else None,
        "data_wait": round(_data_wait(lines), 3),
        "mfu": flops * steps / training / peak if peak and training else None,
        "first_loss": lines[0]["loss"] if lines else None,
        "final_loss": lines[-1]["loss"] if lines else None,
        "skipped_updates": sum(bool(line["skipped"]) for line in lines),
        "health": health.facts(),
        "validation": metrics.validation(),
        "predicted": {"parameters": count.total, "flops": flops * steps},
        "memory": {"peak_bytes": peak_bytes(program.mesh.local_devices)},
        "devices": {"kind": device.device_kind, "count": program.mesh.size, "mesh": dict(program.mesh.shape)},
        "remat": remat(program),
        "resumed_at": list(resumed_at),
        "versions": versions(),
    }


def remat(program: Program) -> Any:
    """What was computed again, as a recipe says it: also where the planner chose."""
    return program.job.parallel.model_dump(mode="json")["remat"]


def facts_for_trackers(program: Program) -> dict[str, Any]:
    """What trackers are told of a run, as JSON."""
    job, device = program.job, program.mesh.devices.flat[0]
    facts = {
        "settings": job.settings.model_dump(mode="json"),
        "seed": job.seed,
        "parameters": parameters(job.graph).total,
        "flops_per_step": program.flops_per_step,
        "devices": {"kind": device.device_kind, "count": program.mesh.size, "mesh": dict(program.mesh.shape)},
        "versions": versions(),
    }
    return dict(json.loads(masked(json.dumps(facts))))


def _data_wait(lines: Sequence[Mapping[str, Any]]) -> float:
    """Seconds: every line has the mean of the steps since the line before."""
    steps = [0, *(line["step"] for line in lines)]
    return sum(line.get("data_wait", 0.0) * (step - before) for line, before, step in zip(lines, steps, steps[1:]))


def _mean(seconds: Sequence[float]) -> float:
    return round(sum(seconds) / len(seconds), 6) if seconds else 0.0


def versions() -> dict[str, str]:
    """Versions of the software that decides over numbers."""
    names = ("jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
    found = {name: importlib.metadata.version(name) for name in names}
    return {"affinage": affinage.__version__, "jax": jax.__version__, **found}
