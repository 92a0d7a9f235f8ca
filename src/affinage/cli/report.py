"""The verb `report`: what a run made, as a page."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from affinage.cli import completion
from affinage.cli.options import (
    RUNS,
    JsonOption,
    LangOption,
    RunsOption,
    SetOption,
    Walking,
    is_recipe,
    recorded,
    run_folder,
)
from affinage.cli.run import walk
from affinage.cli.terminal import only_data_on_stdout
from affinage.errors import UserError


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("report")(report)


def report(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|RUN",
            help="A recipe, or a run.",
            show_default=False,
            autocompletion=completion.recipes_or_models,
        ),
    ],
    overrides: SetOption = None,
    runs: RunsOption = RUNS,
    lang: LangOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where to write; default: report.html in the run.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the report, one HTML file: of a run as it is, or of a recipe, which is run up to there.

    Examples: affinage report quickstart

    affinage report quickstart --lang fr --out rapport.html

    affinage report my_recipe.yaml --set report.language=fr
    """
    run = run_folder(target, runs)
    if is_recipe(target, runs) or run is None or not recorded(run):
        said = [*(overrides or ()), *([f"report.language={lang}"] if lang else [])]
        with only_data_on_stdout(as_json):
            run = walk(target, Walking(said, runs, as_json=as_json and out is None), ("report",))
        if out is None:
            return
    elif overrides:
        raise UserError("--set is of recipes", where=target, fix="Leave it out for a run, or name the recipe's file.")
    else:
        os.environ["JAX_PLATFORMS"] = "cpu"  # only shapes are computed: no accelerator is taken, or looked for
    from affinage.report import write_report

    file = out or run / "report.html"
    told = write_report(run, file, lang)
    if as_json:
        print(json.dumps({"report": str(file), **told}, ensure_ascii=False, indent=1))
        return
    typer.echo(f"{told['summary']}\nThe report is in {file}.")
