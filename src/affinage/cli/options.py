"""Arguments and options that several verbs have."""

import functools
import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from affinage.cli import completion
from affinage.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from affinage.config.load import LoadedRecipe

RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe file, or the name of one that comes along.",
        show_default=False,
        autocompletion=completion.recipes,
    ),
]
RecipeOrRunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE|RUN",
        help="A recipe file, the name of one that comes along, or a run, as it was last made.",
        show_default=False,
        autocompletion=completion.recipes_or_models,
    ),
]
ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A run (quickstart), its training (runs/quickstart/pretrain), a checkpoint of it (...@1000), "
        "an import, a Hugging Face folder.",
        show_default=False,
        autocompletion=completion.models,
    ),
]
TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE|MODEL",
        help="A recipe, or a model such as runs/quickstart/sft.",
        show_default=False,
        autocompletion=completion.recipes_or_models,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, e.g. pretrain.steps=100. May be repeated."),
]


def _is_a_folder(runs: Path) -> Path:
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(runs)):
        raise UserError(
            f"runs are kept in a folder, and {str(runs).replace(':/', '://', 1)} is a URL",
            where="--runs",
            fix="Mount the bucket (gcsfuse, mountpoint-s3, rclone mount) and name the folder that it is mounted at.",
        )
    return runs


RunsOption = Annotated[
    Path,
    typer.Option(
        "--runs", metavar="DIR", envvar="AFFINAGE_RUNS", help="The folder of all runs.", callback=_is_a_folder
    ),
]
LangOption = Annotated[
    Literal["en", "fr"] | None, typer.Option("--lang", help="The language of what is written.", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
ProfileOption = Annotated[
    str | None,
    typer.Option("--profile", metavar="STEPS", help="Write a trace of these steps of each training, e.g. 20-25."),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="List what would run and why, and do nothing.")]
ForceOption = Annotated[
    list[str] | None,
    typer.Option("--force", metavar="STEP", help="Run this step again, and all that read it. May be repeated."),
]

RUNS = Path("runs")


@dataclass(frozen=True)
class Walking:
    """How a verb walks the road of a recipe; see `walks`."""

    overrides: SetOption = None
    runs: RunsOption = RUNS
    force: ForceOption = None
    profile: ProfileOption = None
    dry_run: DryRunOption = False
    as_json: JsonOption = False


def sharing(**groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a verb the options that dataclasses list; it takes those of each one together, under the name given here.

    For example `@sharing(how=Walking)`.
    """
    words = inspect.Parameter.KEYWORD_ONLY

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        given_to = inspect.signature(verb).parameters.values()
        own = [each.replace(kind=words) for each in given_to if each.name not in groups]
        shared = [
            inspect.Parameter(option.name, words, default=option.default, annotation=option.type)
            for group in groups.values()
            for option in fields(group)
        ]

        @functools.wraps(verb)
        def wrapped(**given: Any) -> None:
            together = {
                name: group(**{option.name: given.pop(option.name) for option in fields(group)})
                for name, group in groups.items()
            }
            verb(**given, **together)

        vars(wrapped)["__signature__"] = inspect.Signature([*own, *shared])
        return wrapped

    return decorate


walks = sharing(how=Walking)


def load(recipe: str, overrides: list[str] | None) -> "LoadedRecipe":
    """The recipe that a verb is given."""
    from affinage.config.load import load_recipe

    return load_recipe(recipe, overrides or ())


def recipe_or_run(word: str, runs: Path) -> str:
    """The recipe that is meant where a verb takes RECIPE or RUN, as `load` takes it: of a run the settings it has.

    Raises UserError for a name that is neither.
    """
    from affinage.config.layers import packaged_recipes

    packaged, run = packaged_recipes(), run_folder(word, runs)
    if word in packaged or Path(word).is_file():
        return word
    if run is not None and (run / "recipe.json").is_file():
        return str(run / "recipe.json")
    if run is None and Path(word).name == word and not Path(word).suffix:
        made = sorted(file.parent.name for file in runs.glob("*/recipe.json"))
        there = [f"Runs in {runs}: {', '.join(made)}."] if made else []
        there.append(f"Recipes that come with affinage: {', '.join(packaged)}.")
        fix = did_you_mean(word, [*packaged, *made]) or " ".join(there)
        raise UserError(f"there is no recipe and no run named `{word}`", fix=fix)
    return word


def is_recipe(word: str, runs: Path) -> bool:
    """Whether RECIPE is meant where a verb takes RECIPE or MODEL: a file, or a name that no run has yet.

    Says which one is meant where the word could be both.
    """
    from affinage.config.layers import packaged_recipes

    if Path(word).suffix in (".yaml", ".yml", ".json"):
        return True
    if word not in packaged_recipes():
        return False
    made = run_folder(word, runs)
    if made is not None:
        said = f"`{word}` is {made}, as it was made; the recipe of this name is run by `affinage run {word}`."
        typer.echo(said, err=True)
    return made is None


def run_folder(word: str, runs: Path) -> Path | None:
    """The folder that is there under the name of a run, or as a path."""
    return next((place for place in (runs / word, Path(word)) if place.is_dir()), None)


def recorded(run: Path | None) -> dict[str, Any]:
    """The settings that a run was last made with; none if it is no run."""
    if run is None or not (run / "recipe.json").is_file():
        return {}
    file = run / "recipe.json"
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        fix = "Run its recipe again: what is complete is kept, and this file is written anew."
        raise UserError("this file of the run is damaged", where=str(file), fix=fix) from error
    return settings if isinstance(settings, dict) else {}


def made_with(word: str, runs: Path) -> dict[str, Any]:
    """The settings of the run that is called so, or that has the training that is; none of other models."""
    named = run_folder(word.partition("@")[0], runs)
    return recorded(named) or recorded(None if named is None else named.parent)
