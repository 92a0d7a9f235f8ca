"""The verb `launch`: a recipe in several processes, on this machine or on a Ray cluster."""

import contextlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from affinage.cli import options
from affinage.cli.options import app, load, opt

if TYPE_CHECKING:
    from affinage.cluster.launch import WorkerGroup
    from affinage.config.load import LoadedRecipe


@app.command()
def launch(
    recipe: options.RecipeArgument,
    processes: Annotated[int, opt("Number of processes that train together.", min=1, metavar="N")],
    on: Annotated[Literal["local", "ray"], opt("On this machine, or on a Ray cluster.")] = "local",
    devices: Annotated[int | None, opt("Devices that the CPU of each process simulates.", min=1, metavar="N")] = None,
    overrides: options.SetOption = None,
    runs: options.RunsOption = options.RUNS,
    until: options.UntilOption = None,
    max_failures: Annotated[int, opt("Restarts after a process was killed or failed.", min=0)] = 10,
    grace: Annotated[float, opt("Seconds to save in when this program is stopped.", min=1)] = 35.0,
    address: Annotated[
        str, opt("ray: of the cluster (auto, HOST:6379); default: one on this machine.", metavar="ADDRESS")
    ] = "",
    min_processes: Annotated[
        int | None, opt("ray: continue with fewer processes while there are no more machines.", min=1, metavar="N")
    ] = None,
) -> None:
    """Run a recipe in several processes, and start them again when one is lost.

    All processes must see the same folder of runs, unless `runtime.remote` is a gs:// URL. For Slurm, GKE and others
    see docs/clusters.md.

    Example: affinage launch quickstart --processes 2 --devices 4 --set mesh.data=auto

    affinage launch my.yaml --on ray --processes 4 --address auto --runs /mnt/shared/runs
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

            launcher = RayLauncher(
                processes,
                address=address,
                min_workers=min_processes,
                devices=devices,
                files=_files_of(loaded, file),
                say=write,
            )
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
