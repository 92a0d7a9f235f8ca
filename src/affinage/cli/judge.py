"""Verbs about what came out: `eval`, `report`."""

import json
from typing import Annotated, Any

import typer

from affinage.cli.options import (
    RUNS,
    ForceOption,
    JsonOption,
    RecipeArgument,
    RunsOption,
    SetOption,
    TargetArgument,
    is_recipe,
)
from affinage.cli.run import walk
from affinage.errors import UserError


def add_to(app: typer.Typer) -> None:
    """Register the verbs."""
    app.command("eval")(evaluate)
    app.command("report")(report)


def evaluate(
    target: TargetArgument,
    overrides: SetOption = None,
    runs: RunsOption = RUNS,
    force: ForceOption = None,
    tasks: Annotated[list[str] | None, typer.Option("--task", help="MODEL only: a task name, or a task file.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="MODEL only: items per task; default all.")] = None,
    shots: Annotated[int, typer.Option(min=0, help="MODEL only: examples before each question.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="MODEL only: rows per forward pass.")] = 64,
    as_json: JsonOption = False,
) -> None:
    """Judge models on benchmarks: those of a recipe, as stages of its run, or any model on any task.

    Examples: affinage eval quickstart

    affinage eval runs/quickstart/pretrain --task hellaswag --limit 100
    """
    if is_recipe(target):
        walk(target, overrides, runs, ("evaluate-base", "evaluate-sft", "evaluate-dpo"), force=force, as_json=as_json)
        return
    if not tasks:
        raise UserError("no task was named", fix="For example: --task hellaswag, or --task my_task.yaml")
    from affinage.evaluation.run import evaluate
    from affinage.recipe.data import POCKET_WORLD
    from affinage.stages.models import is_chat, locate_model, made_from, open_model

    training, _ = locate_model(target, runs)
    world = made_from(training, "world")
    results = evaluate(
        open_model(target, runs),
        tasks,
        task_folders={POCKET_WORLD: world / "tasks"} if world else {},
        chat=is_chat(training),
        limit=limit,
        shots=shots,
        batch=batch,
    )
    if as_json:
        print(json.dumps(results, ensure_ascii=False, indent=1))
    else:
        _show(results)


def report(recipe: RecipeArgument, overrides: SetOption = None, runs: RunsOption = RUNS) -> None:
    """Run a recipe up to its report, one HTML file.

    Example: affinage report quickstart --set report.language=fr
    """
    walk(recipe, overrides, runs, ("report",))


def _show(results: dict[str, Any]) -> None:
    import rich
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("task", "metric"):
        table.add_column(title)
    for title in ("value", "±", "items"):
        table.add_column(title, justify="right")
    for task, entry in results["tasks"].items():
        for metric, score in entry["metrics"].items():
            value, error = (_shown(score[part]) for part in ("value", "stderr"))
            table.add_row(task, metric, value, error, f"{entry['items']:,}")
    rich.get_console().print(table, highlight=False, markup=False)


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
