"""Verbs about what came out: `eval`, `export`, `report`."""

import typer

from affinage.cli.options import RUNS, RecipeArgument, RunsOption, SetOption
from affinage.cli.run import walk


def add_to(app: typer.Typer) -> None:
    """Register the verbs."""
    app.command("report")(report)


def report(recipe: RecipeArgument, overrides: SetOption = None, runs: RunsOption = RUNS) -> None:
    """Run a recipe up to its report, one HTML file.

    Example: affinage report quickstart --set report.language=fr
    """
    walk(recipe, overrides, runs, ("report",))
