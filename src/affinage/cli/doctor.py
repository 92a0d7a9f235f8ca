"""The verb `doctor`: what this machine has, and which packages are missing."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from pathlib import Path
from typing import Any

import affinage
from affinage.cli.options import RUNS, JsonOption, RunsOption, app
from affinage.cli.output import emit

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "pyarrow", "sentencepiece", "lm-eval")
_OPTIONAL = {  # package: (what needs it, the extra that installs it, files that are there on a machine that needs it)
    "transformers": ("export --verify", "verify", ()),
    "torch": ("export --verify", "verify", ()),
    "ray": ("data.executor: ray, and launch --on ray", "ray", ()),
    "libtpu": ("training on TPUs, and plan --compile for TPUs", "tpu", ("/dev/accel0", "/dev/vfio/0")),
    "jax_cuda12_plugin": ("training on NVIDIA GPUs", "cuda", ("/dev/nvidia0", "/proc/driver/nvidia/version")),
}
_HUB = "https://huggingface.co"
_TIMEOUT = 3.0  # seconds; being offline is fine


@app.command()
def doctor(runs: RunsOption = RUNS, as_json: JsonOption = False) -> None:
    """Print what this machine has (devices, memory, disk, network, versions) and which packages are missing for what.

    Example: affinage doctor --json
    """
    missing = [
        {
            "package": package,
            "needed_for": purpose,
            "get_it": f"pip install 'affinage[{extra}]'",
            "hardware_is_here": any(map(os.path.exists, files)),
        }
        for package, (purpose, extra, files) in _OPTIONAL.items()
        if importlib.util.find_spec(package) is None
    ]
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    facts = {
        "devices": _devices(),
        "machine": _machine(runs),
        "versions": {"affinage": affinage.__version__, "python": platform.python_version()} | versions,
        "missing": missing,
        "network": {_HUB: _reachable()},
    }
    emit(facts, as_json)


def _devices() -> list[dict[str, Any]]:
    from affinage.errors import UserError
    from affinage.hardware.chips import chip
    from affinage.hardware.devices import acquire

    try:
        kinds = [(device.platform, device.device_kind) for device in acquire()]
    except UserError as error:
        return [{"problem": str(error)}]
    return [
        {"platform": name, "kind": kind, "bfloat16_flops": chip(kind).flops_per_device}
        | {"memory_bytes": chip(kind).memory_bytes}
        for name, kind in kinds
    ]


def _machine(runs: Path) -> dict[str, Any]:
    place = next(folder for folder in (runs.absolute(), *runs.absolute().parents) if folder.exists())
    return {
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "memory_available_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"),
        "runs": str(runs.absolute()),
        "disk_free_bytes": shutil.disk_usage(place).free,
    }


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
