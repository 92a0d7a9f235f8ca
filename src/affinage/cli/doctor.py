"""The verb `doctor`: what this machine has, and which packages are missing."""

import importlib.util
import os
import platform
import shutil

from affinage.cli.options import RUNS, JsonOption, RunsOption, app
from affinage.cli.output import emit

_OPTIONAL = {  # package: (what needs it, the extra that installs it, files that are there on a machine that needs it)
    "torch": ("export --verify", "verify", ()),
    "ray": ("data.executor: ray, and launch --on ray", "ray", ()),
    "libtpu": ("training on TPUs, and plan --compile for TPUs", "tpu", ("/dev/accel0", "/dev/vfio/0")),
    "jax_cuda12_plugin": ("training on NVIDIA GPUs", "cuda", ("/dev/nvidia0", "/proc/driver/nvidia/version")),
}


@app.command()
def doctor(runs: RunsOption = RUNS, as_json: JsonOption = False) -> None:
    """Print what this machine has (devices, memory, disk, versions) and which packages are missing for what.

    Example: affinage doctor --json
    """
    from affinage.hardware.chips import chip
    from affinage.hardware.devices import acquire
    from affinage.results import versions

    place = next(folder for folder in (runs.absolute(), *runs.absolute().parents) if folder.exists())
    machine = {
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "disk_free_bytes": shutil.disk_usage(place).free,
    }
    missing = [
        {"package": package, "needed_for": purpose, "get_it": f"pip install 'affinage[{extra}]'"}
        | {"hardware_is_here": any(map(os.path.exists, files))}
        for package, (purpose, extra, files) in _OPTIONAL.items()
        if importlib.util.find_spec(package) is None
    ]
    devices = []
    for device in acquire():
        known = chip(device.device_kind)
        facts = {"platform": device.platform, "kind": device.device_kind, "bfloat16_flops": known.flops_per_device}
        devices.append(facts | {"memory_bytes": known.memory_bytes})
    emit({"devices": devices, "machine": machine, "versions": versions(), "missing": missing}, as_json)
