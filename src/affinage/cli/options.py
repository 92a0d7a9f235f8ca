"""The program `affinage`, to which every verb registers itself, and what verbs share: options, and what names mean."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.config.load import LoadedRecipe
    from affinage.pipeline.models import Target

RUNS = Path("runs")
HELP: dict[str, Any] = {"no_args_is_help": True, "context_settings": {"help_option_names": ["-h", "--help"]}}

app = typer.Typer(
    name="affinage",
    help="From raw text in two languages to a released, evaluated chat model.\n\nBegin with: affinage run quickstart",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    **HELP,
)


def verbs(name: str, help: str, **more: Any) -> typer.Typer:
    """A group of verbs."""
    group = typer.Typer(help=help, **HELP, **more)
    app.add_typer(group, name=name)
    return group


def opt(help: str, *names: str, **more: Any) -> Any:
    """An option of a verb: its help, its names if they are not the parameter's, and what else typer takes."""
    return typer.Option(*names, help=help, **more)


def arg(metavar: str, help: str) -> Any:
    """An argument of a verb."""
    return typer.Argument(metavar=metavar, help=help, show_default=False)


def _is_a_folder(runs: Path) -> Path:
    scheme, colon, _ = str(runs).partition(":/")
    if colon and scheme.isalnum():
        fix = "Mount the bucket (gcsfuse, mountpoint-s3, rclone mount) and name the folder that it is mounted at."
        what = f"runs are kept in a folder, and {str(runs).replace(':/', '://', 1)} is a URL"
        raise UserError(what, where="--runs", fix=fix)
    return runs


RecipeArgument = Annotated[str, arg("RECIPE|RUN", "A recipe file, a run, or a packaged recipe.")]
_MODEL = (
    "A run (quickstart), a training of it (quickstart/pretrain), a checkpoint (quickstart/pretrain@1000), an average "
    "(quickstart/pretrain@ema or @mean:5), an import, or a Hugging Face folder."
)
ModelArgument = Annotated[str, arg("MODEL", _MODEL)]
RunArgument = Annotated[str, arg("RUN", "A run, or its recipe.")]
SetOption = Annotated[
    list[str] | None, opt("Change a setting, e.g. pretrain.steps=100. May be repeated.", "--set", metavar="KEY=VALUE")
]
RunsOption = Annotated[
    Path, opt("The folder of all runs.", "--runs", metavar="DIR", envvar="AFFINAGE_RUNS", callback=_is_a_folder)
]
LangOption = Annotated[Literal["en", "fr"] | None, opt("The language of the output.", "--lang", show_default=False)]
JsonOption = Annotated[bool, opt("Print JSON, for scripts.", "--json")]
DryRunOption = Annotated[bool, opt("List what would run and why, and do nothing.", "--dry-run")]
UntilOption = Annotated[list[str] | None, opt("Stop after this step. May be repeated.", "--until", metavar="STEP")]
ForceOption = Annotated[
    list[str] | None, opt("Run this step again, and those that read it. May be repeated.", "--force", metavar="STEP")
]


class PipelineOptions(NamedTuple):
    """Options of the verbs that run the steps of a recipe."""

    overrides: list[str] | None = None
    runs: Path = RUNS
    force: list[str] | None = None
    dry_run: bool = False
    as_json: bool = False


def warn(message: str) -> None:
    """Print a warning in one line of standard error."""
    print(f"Warning: {message}", file=sys.stderr)


def find(name: str, runs: Path) -> "Target":
    """Returns what a name stands for; warns if it may stand for something else."""
    from affinage.pipeline.models import resolve

    target = resolve(name, runs)
    if target.warning:
        warn(target.warning)
    return target


def load(
    name: str, overrides: Sequence[str] | None, runs: Path, *, lenient: bool = False
) -> "tuple[LoadedRecipe, Path | None]":
    """Returns the recipe that a name stands for, with `overrides` laid over it, and the folder of a run that is named.

    With `lenient`, settings of a run that no longer exist are left out, with a warning. Another warning is printed for
    a run that has the name of a packaged recipe and other settings.
    """
    from affinage.config.load import load_recipe, packaged_recipes
    from affinage.pipeline.models import recipe_of

    target = find(name, runs)
    loaded = recipe_of(target, runs, overrides or (), warn=warn if lenient else None)
    packaged = packaged_recipes().get(name) if target.kind == "run" else None
    if packaged is not None and recipe_of(target, runs, warn=lambda _: None).recipe != load_recipe(packaged).recipe:
        warn(f"`{name}` is the run {target.path}, whose settings are not those of the packaged recipe {packaged}")
    return loaded, target.run
