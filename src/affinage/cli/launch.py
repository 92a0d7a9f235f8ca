"""Verbs about machines: `launch` runs a recipe in several processes, here or on Ray; `doctor` shows what is here."""

import contextlib
import importlib.util
import os
import platform
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from affinage.cli import terminal
from affinage.cli.terminal import app, emit, load, opt

if TYPE_CHECKING:
    from affinage.cluster.launch import WorkerGroup
    from affinage.config.load import LoadedRecipe

_OPTIONAL = {  # package: (what needs it, the extra that installs it, files that are there on a machine that needs it)
    "torch": ("export --verify", "verify", ()),
    "ray": ("data.executor: ray, and launch --on ray", "ray", ()),
    "libtpu": ("training on TPUs, and plan --compile for TPUs", "tpu", ("/dev/accel0", "/dev/vfio/0")),
    "jax_cuda12_plugin": ("training on NVIDIA GPUs", "cuda", ("/dev/nvidia0", "/proc/driver/nvidia/version")),
}


@app.command()
def launch(
    recipe: terminal.RecipeArgument,
    processes: Annotated[int, opt("Number of processes that train together.", min=1, metavar="N")],
    on: Annotated[Literal["local", "ray"], opt("On this machine, or on a Ray cluster.")] = "local",
    devices: Annotated[int | None, opt("Devices that the CPU of each process simulates.", min=1, metavar="N")] = None,
    overrides: terminal.SetOption = None,
    runs: terminal.RunsOption = terminal.RUNS,
    until: terminal.UntilOption = None,
    max_failures: Annotated[int, opt("Restarts after a process was killed or failed.", min=0)] = 10,
    grace: Annotated[float, opt("Seconds to save in when this program is stopped.", min=1)] = 35.0,
    address: Annotated[str, opt("ray: of the cluster (auto, HOST:6379); default: one on this machine.")] = "",
    min_processes: Annotated[int | None, opt("ray: go on with this many machines.", min=1, metavar="N")] = None,
) -> None:
    """Run a recipe in several processes, and start them again when one is lost.

    All processes must see the same folder of runs, unless `runtime.remote` is a gs:// URL. For Slurm, GKE and others
    see docs/clusters.md.

    Example: affinage launch quickstart --processes 2 --devices 4 --set mesh.data=auto
    """
    loaded, run = load(recipe, overrides, runs)  # a mistake is reported once, before anything is started
    from affinage.cluster.launch import start_local, supervise
    from affinage.pipeline.models import RECIPE

    file = (loaded.path if run is None else run / RECIPE).resolve()
    words = ["run", str(file), "--runs", str(runs.absolute())]
    for option, values in (("--set", overrides), ("--until", until)):
        words += [word for value in values or () for word in (option, value)]
    write = partial(print, flush=True)
    with contextlib.ExitStack() as cleanup:
        if on == "local":
            start: Callable[..., WorkerGroup] = partial(start_local, workers=processes, devices=devices, say=write)
        else:
            from affinage.cluster.ray_launch import RayLauncher

            how = {"address": address, "min_workers": min_processes, "devices": devices}
            launcher = RayLauncher(processes, files=_files_of(loaded, file), say=write, **how)
            cleanup.callback(launcher.close)
            start = launcher.start
        status = supervise(start, words, max_failures=max_failures, grace=grace, say=write)
    raise typer.Exit(status)


def _files_of(loaded: "LoadedRecipe", file: Path) -> dict[str, bytes]:
    """The recipe's file, those that it is based on, and its plug-ins, by their paths here."""
    from affinage.config.load import read_file

    files, base = [file], loaded.base
    while base is not None:
        files.append(base)
        base = read_file(base).base  # which need not be a whole recipe
    files += [loaded.beside(plugin, ("plugins", at)) for at, plugin in enumerate(loaded.recipe.plugins)]
    return {os.fspath(path.resolve()): path.read_bytes() for path in files}


@app.command()
def doctor(runs: terminal.RunsOption = terminal.RUNS, as_json: terminal.JsonOption = False) -> None:
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
