"""The verb `launch`: a recipe on many machines."""

import contextlib
import os
import shlex
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from affinage.cli.options import (
    RUNS,
    ForceOption,
    ProfileOption,
    RecipeArgument,
    RunsOption,
    SetOption,
    UntilOption,
    load,
    opt,
)
from affinage.cli.output import counted
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.config.load import LoadedRecipe
    from affinage.launch import Launcher


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("launch")(launch)


def launch(
    recipe: RecipeArgument,
    hosts: Annotated[int | None, opt("How many processes compute together.", min=1, metavar="N")] = None,
    on: Annotated[
        Literal["local", "ray", "ssh", "cloud"],
        opt("Where: on this machine, a Ray cluster, machines that ssh reaches, a rented TPU slice."),
    ] = "local",
    devices: Annotated[int | None, opt("Devices that the CPU of each host stands for.", min=1, metavar="N")] = None,
    overrides: SetOption = None,
    runs: RunsOption = RUNS,
    until: UntilOption = None,
    force: ForceOption = None,
    profile: ProfileOption = None,
    preemptions: Annotated[int, opt("Restarts after a host was preempted.", min=0)] = 1000,
    failures: Annotated[int, opt("Restarts after a host was killed or failed.", min=0)] = 10,
    grace: Annotated[float, opt("Seconds to save in when this program is told to stop.", min=1)] = 35.0,
    address: Annotated[
        str, opt("ray: of the cluster (auto, HOST:6379); default: one of our own.", metavar="ADDRESS")
    ] = "",
    open_cluster: Annotated[bool, opt("ray: also join a cluster that needs no token.", "--open-cluster")] = False,
    least: Annotated[
        int | None, opt("ray: continue with fewer hosts while no more are there.", "--at-least", min=1, metavar="N")
    ] = None,
    machines: Annotated[str, opt("ssh: addresses of the hosts, the first is host 0.", metavar="A,B,...")] = "",
    folder: Annotated[str, opt("ssh, cloud: where to work on each machine.")] = "affinage",
    prepare: Annotated[str, opt("ssh, cloud: run on each machine first, e.g. to install.", metavar="COMMAND")] = "",
    ssh: Annotated[str, opt("ssh, cloud: how to call ssh.", metavar="COMMAND")] = "ssh",
    keep: Annotated[bool, opt("cloud: do not give the slice back at the end.", "--keep")] = False,
) -> None:
    """Run a recipe on many machines, and start it again when one is lost.

    All hosts must see the same folder of runs, unless they are on this machine.

    Example: affinage launch quickstart --hosts 2 --devices 4 --set mesh.data=auto

    affinage launch my.yaml --on ssh --machines a,b,c,d --runs /mnt/shared/runs
    """
    loaded = load(recipe, overrides, runs)  # what cannot be read is refused once, and before anything is started
    from affinage.launch import LocalLauncher, Restarts, supervise
    from affinage.launch.ssh import SshLauncher
    from affinage.pipeline.names import RECIPE, resolve

    made = resolve(recipe, runs).run
    file = loaded.path if made is None else made / RECIPE
    words = ["run", str(file.resolve() if on != "local" else file)]
    words += ["--runs", str(runs.absolute() if on == "ray" else runs)]
    traced = None if profile is None else [profile]
    for option, values in (("--set", overrides), ("--until", until), ("--force", force), ("--profile", traced)):
        words += [word for value in values or () for word in (option, value)]
    files = files_of(loaded, file) if on != "local" else {}
    over_ssh = partial(
        SshLauncher, folder=folder, prepare=prepare, files=files, devices=devices, ssh=shlex.split(ssh), say=_print
    )
    check = partial(_check_mesh, loaded, until)
    with contextlib.ExitStack() as cleanup:
        launcher: Launcher
        if on == "local":
            check(_given(hosts), devices)
            launcher = LocalLauncher(_given(hosts), devices=devices, say=_print)
        elif on == "ray":
            from affinage.launch.ray import RayLauncher

            if least is None:
                check(_given(hosts), devices)
            many, more = _given(hosts), {"least": least, "devices": devices, "files": files}
            on_ray = RayLauncher(many, address=address, open_cluster=open_cluster, say=_print, **more)  # type: ignore[arg-type]
            cleanup.callback(on_ray.close)
            launcher = on_ray
        elif on == "ssh":
            launcher = over_ssh(_addresses(machines, hosts))
            check(launcher.hosts, devices)
        else:
            launcher = cleanup.enter_context(_rented(loaded, check, devices, over_ssh, keep))
        restarts = Restarts(preemptions=preemptions, failures=failures)
        status = supervise(launcher, words, restarts, grace=grace, say=_print)
    raise typer.Exit(status)


def _check_mesh(loaded: "LoadedRecipe", until: Sequence[str] | None, hosts: int, devices: int | None) -> None:
    """Refuse a mesh that cannot span all devices, where it is known how many each host has and that they train."""
    trainings = loaded.recipe.trainings
    if devices is None or not trainings or (until and not set(until) & set(trainings)):
        return
    from affinage.hardware.mesh import axis_sizes

    try:
        axis_sizes({str(axis): size for axis, size in loaded.recipe.mesh.items()}, hosts * devices, hosts)
    except UserError as error:
        what = f"{error.what} (hosts: {hosts}, devices of each: {devices})"
        raise UserError(what, where=loaded.locate(("mesh",)), fix=error.fix) from error


def _addresses(machines: str, hosts: int | None) -> list[str]:
    addresses = [address.strip() for address in machines.split(",") if address.strip()]
    if not addresses or hosts not in (None, len(addresses)):
        named = f"{counted(len(addresses), 'machine')} {'is' if len(addresses) == 1 else 'are'} named"
        wanted = f", and {counted(hosts, 'host')} wanted" if hosts else ""
        fix = "Name one machine for each host: --machines a,b,c"
        raise UserError(named + wanted, where="--machines", fix=fix)
    return addresses


@contextlib.contextmanager
def _rented(
    loaded: "LoadedRecipe",
    check: Callable[[int, int | None], None],
    devices: int | None,
    over_ssh: "Callable[[Sequence[str]], Launcher]",
    keep: bool,
) -> "Iterator[Launcher]":
    """A launcher on the slice that the recipe names; it is given back at the end."""
    from affinage.hardware.cloud import CloudSlice
    from affinage.hardware.slices import find_slice
    from affinage.launch.rented import RentedLauncher

    settings = loaded.recipe.hardware
    if settings.slice is None or settings.cloud is None:
        fix = "For example: hardware: {slice: v4-32, cloud: {project: my-project, zone: us-central2-b, spot: true}}"
        raise UserError("the recipe does not name a slice to rent, and a cloud", where="hardware", fix=fix)
    where = find_slice(settings.slice)
    check(where.hosts, devices or where.devices // where.hosts)
    name = loaded.recipe.name.lower().replace(".", "-").replace("_", "-")
    rented = CloudSlice(f"affinage-{name}", where, settings.cloud, _print)
    try:
        yield RentedLauncher(rented, where.hosts, over_ssh)
    finally:
        if keep:
            _print(f"{rented.name}: kept, and paid for")
        else:
            rented.release()


def files_of(loaded: "LoadedRecipe", file: Path) -> dict[str, bytes]:
    """The recipe's file, those that it is based on, and its plug-ins, by their paths here."""
    from affinage.config.load import load_recipe

    plugins = [loaded.beside(plugin, ("plugins", at)) for at, plugin in enumerate(loaded.recipe.plugins)]
    chain, base = [file], loaded.base
    while base is not None:
        chain.append(base)
        base = load_recipe(base).base
    return {os.fspath(path.resolve()): path.read_bytes() for path in (*chain, *plugins) if Path(path).is_file()}


def _given(hosts: int | None) -> int:
    if hosts is None:
        raise UserError("the number of hosts is missing", where="--hosts", fix="For example: --hosts 2")
    return hosts


_lock = threading.Lock()


def _print(line: str) -> None:
    """Print a whole line, from whichever thread."""
    with _lock:
        typer.echo(line)
