"""The verb `launch`: a recipe on many hosts."""

import threading
from typing import Annotated, Literal

import typer

from affinage.cli.options import RUNS, ForceOption, RecipeArgument, RunsOption, SetOption, load


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("launch")(launch)


def launch(
    recipe: RecipeArgument,
    hosts: Annotated[int, typer.Option("--hosts", min=1, metavar="N", help="How many processes compute together.")],
    on: Annotated[Literal["local"], typer.Option("--on", help="Where they run: local, on this machine.")] = "local",
    devices: Annotated[
        int | None,
        typer.Option("--devices", min=1, metavar="N", help="Let the CPU of each host play so many devices."),
    ] = None,
    overrides: SetOption = None,
    runs: RunsOption = RUNS,
    until: Annotated[list[str] | None, typer.Option("--until", metavar="STAGE", help="Stop after this stage.")] = None,
    force: ForceOption = None,
    preemptions: Annotated[int, typer.Option(min=0, help="Start again so often after a host was told to stop.")] = 1000,
    failures: Annotated[int, typer.Option(min=0, help="Start again so often after a host was killed or failed.")] = 10,
    grace: Annotated[float, typer.Option(min=1, help="Seconds to save in when this program is told to stop.")] = 35.0,
) -> None:
    """Run a recipe on many hosts, and start them again when one is lost.

    Example: affinage launch quickstart --hosts 2 --devices 4
    """
    from affinage.launch import LocalLauncher, Restarts, supervise

    loaded = load(recipe, overrides)  # what cannot be read is told once, and before anything is started
    words = ["run", str(loaded.path) if loaded.path.is_file() else recipe, "--runs", str(runs)]
    for option, values in (("--set", overrides), ("--until", until), ("--force", force)):
        words += [word for value in values or () for word in (option, value)]
    launcher = LocalLauncher(hosts, devices=devices, say=_Lines())
    status = supervise(launcher, words, Restarts(preemptions=preemptions, failures=failures), grace=grace, say=_Lines())
    raise typer.Exit(status)


class _Lines:
    """Writes whole lines, whichever thread says them."""

    _lock = threading.Lock()

    def __call__(self, line: str) -> None:
        with self._lock:
            typer.echo(line)
