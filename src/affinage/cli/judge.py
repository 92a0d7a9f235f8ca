"""Verbs about what came out: `eval`, `report`."""

import json
from pathlib import Path
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

_STAGES = ("evaluate-base", "evaluate-sft", "evaluate-dpo")


def add_to(app: typer.Typer) -> None:
    """Register the verbs."""
    app.command("eval")(evaluate)
    app.command("report")(report)


def evaluate(
    target: TargetArgument,
    overrides: SetOption = None,
    runs: RunsOption = RUNS,
    force: ForceOption = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks",
            "--task",
            metavar="TASK",
            help="julian, french, quickstart, a name of lm-evaluation-harness, a task file; several with commas. "
            "A recipe has its own.",
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option("--data-dir", metavar="DIR", help="Items as NAME.jsonl or .jsonl.gz; default: from the hub."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Items per task; default all.")] = None,
    shots: Annotated[int | None, typer.Option(min=0, help="Examples before each question; default 0.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows per forward pass; default 64.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Judge models on benchmarks: those of a recipe, as stages of its run, or any model on any task.

    Examples: affinage eval quickstart

    affinage eval quickstart/pretrain --tasks julian --data-dir my_benchmarks --limit 100
    """
    chosen = [name for names in tasks or () for name in names.split(",") if name]
    asked: dict[str, Any] = {"tasks": chosen or None, "data_dir": data_dir and str(data_dir)}
    asked |= {"limit": limit, "shots": shots, "batch": batch}
    given = {name: value for name, value in asked.items() if value is not None}
    if is_recipe(target):
        settings = [f"evaluate.{name}={json.dumps(value)}" for name, value in given.items()]
        folder = walk(target, [*(overrides or ()), *settings], runs, _STAGES, force=force, as_json=as_json)
        for stage in () if as_json else _STAGES:
            if (folder / stage / "results.json").is_file():
                typer.echo(f"\n{stage.removeprefix('evaluate-')}")
                _show(json.loads((folder / stage / "results.json").read_text(encoding="utf-8")))
        return
    if not chosen:
        raise UserError("no task was named", fix="For example: --tasks julian, or --task my_task.yaml")
    if overrides or force:
        raise UserError("--set and --force are of recipes", where=target, fix="Leave them out for a model.")
    results = _evaluate_model(target, runs, chosen, given)
    if as_json:
        print(json.dumps(results, ensure_ascii=False, indent=1))
    else:
        _show(results)


def _evaluate_model(target: str, runs: Path, tasks: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    from affinage.hardware.devices import prepare

    prepare()
    from affinage.evaluation.run import evaluate
    from affinage.recipe.data import POCKET_WORLD
    from affinage.stages.models import is_chat, locate_model, made_from, open_model

    training, _ = locate_model(target, runs)
    world = made_from(training, "world")
    return evaluate(
        open_model(target, runs),
        tasks,
        task_folders={POCKET_WORLD: world / "tasks"} if world else {},
        chat=is_chat(training),
        **{name: value for name, value in settings.items() if name != "tasks"},
    )


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
    for title in ("value", "±", "chance", "items"):
        table.add_column(title, justify="right")
    for task, entry in results["tasks"].items():
        for metric, score in entry["metrics"].items():
            value, error = (_shown(score[part]) for part in ("value", "stderr"))
            chance = _shown(entry.get("chance") if metric.startswith("acc") else None)
            table.add_row(task, metric, value, error, chance, f"{entry['items']:,}")
    console = rich.get_console()
    console.print(table, highlight=False, markup=False)
    if results.get("missing"):
        console.print(f"Not there, so left out: {', '.join(results['missing'])}", highlight=False, markup=False)


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if abs(value) < 1e5 else f"{value:.3g}"
