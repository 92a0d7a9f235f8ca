"""The verb `doctor`: what this machine has, and which packages are missing."""

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

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "pyarrow", "sentencepiece", "lm-eval")
_OPTIONAL = (  # package, what needs it, the extra that installs it
    ("transformers", "export --verify", "verify"),
    ("torch", "export --verify", "verify"),
    ("ray", "data.executor: ray, and launch --on ray", "ray"),
    ("libtpu", "training on TPUs, and plan --compile for TPUs", "tpu"),
    ("jax_cuda12_plugin", "training on NVIDIA GPUs", "cuda"),
)
_NVIDIA = ("/dev/nvidia0", "/proc/driver/nvidia/version")
_TPU = ("/dev/accel0", "/dev/vfio/0")
_HUB = "https://huggingface.co"
_TIMEOUT = 3.0  # seconds; being offline is fine


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("doctor")(doctor)


def doctor(runs: RunsOption = RUNS, as_json: JsonOption = False) -> None:
    """Print what this machine has (devices, memory, disk, network, versions) and which packages are missing for what.

    Example: affinage doctor --json
    """
    with ThreadPoolExecutor(1) as pool:
        reachable = pool.submit(_reachable)
        versions = {name: _version(name) for name in _PACKAGES}
        facts = {
            "devices": _devices(),
            "unused": _unused(),
            "machine": _machine(runs),
            "versions": {"affinage": affinage.__version__, "python": platform.python_version(), **versions},
            "missing": [
                {"package": package, "needed_for": purpose, "get_it": f"pip install 'affinage[{extra}]'"}
                for package, purpose, extra in _OPTIONAL
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


def _unused() -> list[str]:
    """Accelerators here that JAX cannot use for want of a package, each with the command that installs it."""
    found = []
    for name, places, package, extra in (
        ("an NVIDIA GPU", _NVIDIA, "jax_cuda12_plugin", "cuda"),
        ("a TPU", _TPU, "libtpu", "tpu"),
    ):
        if any(Path(place).exists() for place in places) and importlib.util.find_spec(package) is None:
            found.append(f"{name} is here, and JAX cannot use it: pip install 'affinage[{extra}]'")
    return found


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
    for advice in facts["unused"]:
        yield "unused", advice
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
