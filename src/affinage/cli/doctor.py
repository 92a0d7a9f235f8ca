"""The verb `doctor`: what is here, and what is missing for what."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import typer

import affinage
from affinage.cli.options import RUNS, JsonOption, RunsOption
from affinage.cli.output import Table, emit

_PACKAGES = (
    "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "polars", "pyarrow",
    "sentencepiece", "tokenizers", "lm-eval", "pydantic",
)  # fmt: skip
_OPTIONAL = (  # package, what needs it, how to get it
    ("transformers", "export --verify", "pip install 'affinage[verify]'"),
    ("torch", "export --verify", "pip install 'affinage[verify]'"),
    ("ray", "data.executor: ray, the data steps on many machines", "pip install 'affinage[ray]'"),
    ("libtpu", "TPUs, and plans for TPUs", "pip install 'affinage[tpu]'"),
)
_HUB = "https://huggingface.co"
_TIMEOUT = 3.0  # seconds; being offline is fine


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("doctor")(doctor)


def doctor(runs: RunsOption = RUNS, as_json: JsonOption = False) -> None:
    """Look at this machine: devices, versions, disk, memory, network, and what is missing for what.

    Example: affinage doctor --json
    """
    with ThreadPoolExecutor(1) as pool:
        reachable = pool.submit(_reachable)
        versions = {name: _version(name) for name in _PACKAGES}
        facts = {
            "devices": _devices(),
            "machine": _machine(runs),
            "versions": {"affinage": affinage.__version__, "python": platform.python_version(), **versions},
            "missing": [
                {"package": package, "needed_for": purpose, "get_it": how}
                for package, purpose, how in _OPTIONAL
                if importlib.util.find_spec(package) is None
            ],
            "network": {_HUB: reachable.result()},
        }
    emit(facts, as_json, [Table(("", ""), _rows(facts), left=(0, 1))])


def _devices() -> list[dict[str, Any]]:
    from affinage.errors import UserError
    from affinage.hardware.chips import chip
    from affinage.hardware.devices import acquire

    try:
        devices = acquire()
    except UserError as error:
        return [{"problem": str(error)}]
    return [
        {
            "platform": device.platform,
            "kind": device.device_kind,
            "bfloat16_flops": chip(device.device_kind).flops_per_device,
            "memory_bytes": chip(device.device_kind).memory_bytes,
        }
        for device in devices
    ]


def _machine(runs: Path) -> dict[str, Any]:
    place = next(folder for folder in (runs.absolute(), *runs.absolute().parents) if folder.exists())
    return {
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory("MemTotal"),
        "memory_available_bytes": _memory("MemAvailable"),
        "runs": str(runs.absolute()),
        "disk_free_bytes": shutil.disk_usage(place).free,
    }


def _memory(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None  # not Linux
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _reachable() -> bool:
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(urllib.request.Request(_HUB, method="HEAD"), timeout=_TIMEOUT):
            return True
    except urllib.error.HTTPError:
        return True  # it answered
    except (OSError, ValueError):
        return False


def _rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    devices, machine = facts["devices"], facts["machine"]
    for device in devices[:1]:
        yield "devices", device.get("problem") or f"{len(devices)} × {device['kind']} ({device['platform']})"
    yield "system", f"{machine['system']}, {machine['cores']} cores"
    if machine["memory_bytes"]:
        yield "memory", f"{_gib(machine['memory_available_bytes'])} free of {_gib(machine['memory_bytes'])}"
    yield "disk", f"{_gib(machine['disk_free_bytes'])} free for {machine['runs']}"
    online = facts["network"][_HUB]
    yield "network", f"{_HUB} answers" if online else f"{_HUB} does not answer: only local files and tasks"
    yield "versions", ", ".join(f"{name} {version or 'MISSING'}" for name, version in facts["versions"].items())
    for entry in facts["missing"]:
        yield "not installed", f"{entry['package']}, for {entry['needed_for']}: {entry['get_it']}"


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.1f} GiB"
