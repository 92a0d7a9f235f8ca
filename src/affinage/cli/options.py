"""Arguments and options that several verbs have."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from affinage.recipe.load import LoadedRecipe

RecipeArgument = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help="A recipe file, or the name of one that comes along.", show_default=False),
]
ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A run (quickstart), its training (runs/quickstart/pretrain), a checkpoint of it (...@1000), "
        "an import, a Hugging Face folder.",
        show_default=False,
    ),
]
TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE|MODEL", help="A recipe, or a model such as runs/quickstart/sft.", show_default=False
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, e.g. pretrain.steps=100. May be repeated."),
]
RunsOption = Annotated[
    Path, typer.Option("--runs", metavar="DIR", envvar="AFFINAGE_RUNS", help="The folder of all runs.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="List what would run and why, and do nothing.")]
ForceOption = Annotated[
    list[str] | None,
    typer.Option("--force", metavar="STAGE", help="Make this stage anew, and what reads it. May be repeated."),
]
AnyCodeOption = Annotated[
    bool, typer.Option("--any-code", help="Keep, or go on with, results that another version of affinage made.")
]

RUNS = Path("runs")


def load(recipe: str, overrides: list[str] | None) -> "LoadedRecipe":
    """The recipe that a verb is given."""
    from affinage.recipe.load import load_recipe

    return load_recipe(recipe, overrides or ())


def is_recipe(word: str) -> bool:
    """Whether RECIPE is meant where a verb takes RECIPE or MODEL."""
    from affinage.recipe.layers import packaged_recipes

    return Path(word).suffix in (".yaml", ".yml", ".json") or (word in packaged_recipes() and not Path(word).is_dir())
