"""The verb `doctor`: what this machine has, and which packages are missing."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import affinage
from affinage.cli.options import RUNS, JsonOption, RunsOption, verb
from affinage.cli.output import emit

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "pyarrow", "sentencepiece", "lm-eval")
_OPTIONAL = {  # package: (what needs it, the extra that installs it)
    "transformers": ("export --verify", "verify"),
    "torch": ("export --verify", "verify"),
    "ray": ("data.executor: ray, and launch --on ray", "ray"),
    "libtpu": ("training on TPUs, and plan --compile for TPUs", "tpu"),
    "jax_cuda12_plugin": ("training on NVIDIA GPUs", "cuda"),
}
_ACCELERATORS = {  # package: (what it is for, files that are there where this machine has one)
    "jax_cuda12_plugin": ("an NVIDIA GPU", ("/dev/nvidia0", "/proc/driver/nvidia/version")),
    "libtpu": ("a TPU", ("/dev/accel0", "/dev/vfio/0")),
}
_HUB = "https://huggingface.co"
_TIMEOUT = 3.0  # seconds; being offline is fine


@verb()
def doctor(runs: RunsOption = RUNS, as_json: JsonOption = False) -> None:
    """Print what this machine has (devices, memory, disk, network, versions) and which packages are missing for what.

    Example: affinage doctor --json
    """
    missing = {name: extra for name, extra in _OPTIONAL.items() if importlib.util.find_spec(name) is None}
    with ThreadPoolExecutor(1) as pool:
        reachable = pool.submit(_reachable)
        facts = {
            "devices": _devices(),
            "unused": [
                f"{what} is here, and JAX cannot use it: pip install 'affinage[{_OPTIONAL[package][1]}]'"
                for package, (what, places) in _ACCELERATORS.items()
                if package in missing and any(Path(place).exists() for place in places)
            ],
            "machine": _machine(runs),
            "versions": {"affinage": affinage.__version__, "python": platform.python_version()}
            | {name: _version(name) for name in _PACKAGES},
            "missing": [
                {"package": package, "needed_for": purpose, "get_it": f"pip install 'affinage[{extra}]'"}
                for package, (purpose, extra) in missing.items()
            ],
            "network": {_HUB: reachable.result()},
        }
    emit(facts, as_json)


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
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "memory_available_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"),
        "runs": str(runs.absolute()),
        "disk_free_bytes": shutil.disk_usage(place).free,
    }


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
