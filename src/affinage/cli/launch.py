"""The verb `launch`: a recipe on many hosts."""

import contextlib
import os
import shlex
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from affinage.cli.options import RUNS, ForceOption, ProfileOption, RecipeArgument, RunsOption, SetOption, load
from affinage.cli.terminal import counted
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.config.load import LoadedRecipe
    from affinage.hardware.slices import Slice
    from affinage.launch import Launcher

HostsOption = Annotated[
    int | None, typer.Option("--hosts", min=1, metavar="N", help="How many processes compute together.")
]
OnOption = Annotated[
    Literal["local", "ray", "ssh", "cloud"],
    typer.Option("--on", help="Where: on this machine, a Ray cluster, machines that ssh reaches, a rented TPU slice."),
]
DevicesOption = Annotated[
    int | None, typer.Option("--devices", min=1, metavar="N", help="Let the CPU of each host play so many devices.")
]
AddressOption = Annotated[
    str, typer.Option("--address", metavar="ADDRESS", help="ray: of the cluster (auto, HOST:6379); default: our own.")
]
OpenOption = Annotated[
    bool, typer.Option("--open-cluster", help="ray: join also a cluster that asks nobody for a token.")
]
LeastOption = Annotated[
    int | None,
    typer.Option("--at-least", min=1, metavar="N", help="ray: go on with so few hosts while no more are there."),
]
MachinesOption = Annotated[
    str, typer.Option("--machines", metavar="A,B,...", help="ssh: addresses of the hosts, the first is host 0.")
]
FolderOption = Annotated[str, typer.Option("--folder", help="ssh, cloud: where to work on each machine.")]
PrepareOption = Annotated[
    str, typer.Option("--prepare", metavar="COMMAND", help="ssh, cloud: run on each machine first, e.g. to install.")
]
SshOption = Annotated[str, typer.Option("--ssh", metavar="COMMAND", help="ssh, cloud: how to call ssh.")]
KeepOption = Annotated[bool, typer.Option("--keep", help="cloud: do not give the slice back at the end.")]


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("launch")(launch)


def launch(
    recipe: RecipeArgument,
    hosts: HostsOption = None,
    on: OnOption = "local",
    devices: DevicesOption = None,
    overrides: SetOption = None,
    runs: RunsOption = RUNS,
    until: Annotated[list[str] | None, typer.Option("--until", metavar="STAGE", help="Stop after this stage.")] = None,
    force: ForceOption = None,
    profile: ProfileOption = None,
    preemptions: Annotated[int, typer.Option(min=0, help="Start again so often after a host was told to stop.")] = 1000,
    failures: Annotated[int, typer.Option(min=0, help="Start again so often after a host was killed or failed.")] = 10,
    grace: Annotated[float, typer.Option(min=1, help="Seconds to save in when this program is told to stop.")] = 35.0,
    address: AddressOption = "",
    open_cluster: OpenOption = False,
    least: LeastOption = None,
    machines: MachinesOption = "",
    folder: FolderOption = "affinage",
    prepare: PrepareOption = "",
    ssh: SshOption = "ssh",
    keep: KeepOption = False,
) -> None:
    """Run a recipe on many hosts, and start them again when one is lost.

    All hosts must see the same folder of runs, unless they are on this machine.

    Example: affinage launch quickstart --hosts 2 --devices 4 --set mesh.data=auto

    affinage launch my.yaml --on ssh --machines a,b,c,d --runs /mnt/shared/runs
    """
    from affinage.launch import Restarts, supervise

    loaded = load(recipe, overrides)  # what cannot be read is told once, and before anything is started
    elsewhere = on != "local"
    path = str(loaded.path.resolve() if elsewhere else loaded.path)
    words = ["run", path, "--runs", str(runs.absolute() if on == "ray" else runs)]
    traced = None if profile is None else [profile]
    for option, values in (("--set", overrides), ("--until", until), ("--force", force), ("--profile", traced)):
        words += [word for value in values or () for word in (option, value)]
    by_ssh = _BySsh(folder, prepare, shlex.split(ssh), devices, files_of(loaded) if elsewhere else {})
    with contextlib.ExitStack() as cleanup:
        if on == "local":
            launcher = _local(hosts, devices)
            _check_mesh(loaded, until, launcher.hosts, devices)
        elif on == "ray":
            if least is None:
                _check_mesh(loaded, until, _given(hosts), devices)
            launcher = cleanup.enter_context(_ray(hosts, address, open_cluster, least, devices, files_of(loaded)))
        elif on == "ssh":
            launcher = _over_ssh(machines, hosts, by_ssh)
            _check_mesh(loaded, until, launcher.hosts, devices)
        else:
            where = _slice_of(loaded)
            _check_mesh(loaded, until, where.hosts, devices or where.devices // where.hosts)
            launcher = cleanup.enter_context(_rented(loaded, where, by_ssh, keep))
        status = supervise(
            launcher, words, Restarts(preemptions=preemptions, failures=failures), grace=grace, say=_Lines()
        )
    raise typer.Exit(status)


def _check_mesh(loaded: "LoadedRecipe", until: Sequence[str] | None, hosts: int, devices: int | None) -> None:
    """Refuse a mesh that cannot be of all devices, where it is known how many each host has and that they train."""
    trainings = loaded.recipe.trainings
    if devices is None or not trainings or (until and not set(until) & set(trainings)):
        return
    from affinage.hardware.mesh import axis_sizes

    try:
        axis_sizes({str(axis): size for axis, size in loaded.recipe.mesh.items()}, hosts * devices, hosts)
    except UserError as error:
        said = f"{error.what} (hosts: {hosts}, devices of each: {devices})"
        raise UserError(said, where=loaded.locate(("mesh",)), fix=error.fix) from error


class _BySsh(NamedTuple):
    folder: str
    prepare: str
    ssh: list[str]
    devices: int | None
    files: dict[str, bytes]


def _local(hosts: int | None, devices: int | None) -> "Launcher":
    from affinage.launch import LocalLauncher

    return LocalLauncher(_given(hosts), devices=devices, say=_Lines())


@contextlib.contextmanager
def _ray(
    hosts: int | None, address: str, open_cluster: bool, least: int | None, devices: int | None, files: dict[str, bytes]
) -> "Iterator[Launcher]":
    from affinage.launch.ray import RayLauncher

    launcher = RayLauncher(
        _given(hosts),
        address=address,
        open_cluster=open_cluster,
        least=least,
        devices=devices,
        files=files,
        say=_Lines(),
    )
    try:
        yield launcher
    finally:
        launcher.close()


def _over_ssh(machines: str, hosts: int | None, how: _BySsh) -> "Launcher":
    from affinage.launch.ssh import SshLauncher

    addresses = [address.strip() for address in machines.split(",") if address.strip()]
    if not addresses or hosts not in (None, len(addresses)):
        raise UserError(
            f"{counted(len(addresses), 'machine')} {'is' if len(addresses) == 1 else 'are'} named"
            + (f", and {counted(hosts, 'host')} wanted" if hosts else ""),
            where="--machines",
            fix="Name one machine for each host: --machines a,b,c",
        )
    return SshLauncher(
        addresses,
        folder=how.folder,
        prepare=how.prepare,
        files=how.files,
        devices=how.devices,
        ssh=how.ssh,
        say=_Lines(),
    )


def _slice_of(loaded: "LoadedRecipe") -> "Slice":
    """What the recipe says is to be rented."""
    from affinage.hardware.slices import find_slice

    settings = loaded.recipe.hardware
    if settings.slice is None or settings.cloud is None:
        raise UserError(
            "the recipe does not say what to rent, and where",
            where="hardware",
            fix="For example: hardware: {slice: v4-32, cloud: {project: my-project, zone: us-central2-b, spot: true}}",
        )
    return find_slice(settings.slice)


@contextlib.contextmanager
def _rented(loaded: "LoadedRecipe", where: "Slice", how: _BySsh, keep: bool) -> "Iterator[Launcher]":
    from affinage.hardware.cloud import CloudSlice
    from affinage.launch.rented import RentedLauncher

    cloud = loaded.recipe.hardware.cloud
    assert cloud is not None  # `_slice_of` has looked
    name = loaded.recipe.name.lower().replace(".", "-").replace("_", "-")
    slice = CloudSlice(f"affinage-{name}", where, cloud, _Lines())
    outside = cloud.external_addresses
    try:
        yield RentedLauncher(slice, where.hosts, lambda found: _over_ssh(",".join(found), None, how), outside)
    finally:
        if keep:
            _Lines()(f"{slice.name}: kept, and paid for")
        else:
            slice.release()


def files_of(loaded: "LoadedRecipe") -> dict[str, bytes]:
    """The recipe's file, those that it is based on, and its plug-ins, by their paths here."""
    from affinage.config.load import load_recipe

    plugins = [loaded.beside(plugin, ("plugins", at)) for at, plugin in enumerate(loaded.recipe.plugins)]
    chain, base = [loaded.path], loaded.base
    while base is not None:
        chain.append(base)
        base = load_recipe(base).base
    return {os.fspath(path.resolve()): path.read_bytes() for path in (*chain, *plugins) if Path(path).is_file()}


def _given(hosts: int | None) -> int:
    if hosts is None:
        raise UserError("how many hosts?", where="--hosts", fix="For example: --hosts 2")
    return hosts


class _Lines:
    """Writes whole lines, whichever thread says them."""

    _lock = threading.Lock()

    def __call__(self, line: str) -> None:
        with self._lock:
            typer.echo(line)
