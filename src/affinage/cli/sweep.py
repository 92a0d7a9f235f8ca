"""The verb `sweep`: a run for every combination of some settings, and one table of what they score."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from affinage.cli.options import RUNS, DryRunOption, JsonOption, RecipeArgument, RunsOption, SetOption
from affinage.cli.terminal import only_data_on_stdout, screen

if TYPE_CHECKING:
    from affinage.pipeline.runner import PipelineRunner, Runs
    from affinage.pipeline.sweep import Point

RESULTS = "sweep.json"  # in the folder of the recipe's run
_OF_A_SCORE = ("metric", "value", "stderr", "chance", "chat_template")


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("sweep")(sweep)


def sweep(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    runs: RunsOption = RUNS,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run every combination of the settings in a recipe's `sweep`; what they have in common is made once.

    A table at the end has a column for each run: its name, its settings, the losses of its last training, its scores.

    Example: affinage sweep quickstart --set 'sweep={pretrain.steps: [600, 1200], sft.steps: [200, 400]}'
    """
    from affinage.api import prepare_process
    from affinage.data.atomic import write_json
    from affinage.errors import UserError
    from affinage.pipeline.preflight import check
    from affinage.pipeline.runner import Runs
    from affinage.pipeline.sweep import points
    from affinage.stopping import OwnProcess

    found = points(recipe, overrides or ())
    if dry_run:
        _show_plan(found, Runs(runs), as_json=as_json)
        return
    prepare_process(found[0].loaded)
    with OwnProcess(), only_data_on_stdout(as_json):
        for point in found:  # all of them first: a mistake in the last is not found out after the others' days
            try:
                check(point.loaded, [step.name for step in _flow(point, Runs(runs)).plan() if not step.complete])
            except UserError as error:
                point_said = f"{point.number} of {len(found)}, {_said(point.settings)}"
                error.where = f"{point_said}: {error.where}" if error.where else point_said
                raise
        for point in found:
            screen().print(f"--- {point.number} of {len(found)}: {_said(point.settings)}", markup=False)
            _run(point, Runs(runs))
    told = [
        {
            "point": point.number,
            "run": point.loaded.recipe.name,
            "settings": point.settings,
            "losses": losses_of(runs / point.loaded.recipe.name),
            "scores": scores_of(runs / point.loaded.recipe.name),
        }
        for point in found
    ]
    folder = runs / found[0].loaded.recipe.name.rpartition("-")[0]
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / RESULTS, told)
    if as_json:
        print(json.dumps(told, ensure_ascii=False, indent=1))
    else:
        show_scores(told)
        screen().print(f"\nresults  {folder / RESULTS}", highlight=False)


def _run(point: "Point", runs: "Runs") -> None:
    from affinage.cli.watch import Watch
    from affinage.hardware.standstill import Standstill

    runner = _flow(point, runs)
    with Standstill(point.loaded.recipe.name, runner.folder, point.loaded.recipe.runtime), Watch(runner.plan()) as watch:
        runner.run(watch)


def _flow(point: "Point", runs: "Runs") -> "PipelineRunner":
    from affinage.api import write_report
    from affinage.pipeline.build import build_steps
    from affinage.pipeline.runner import PipelineRunner

    return PipelineRunner(point.loaded, runs, build_steps(point.loaded, write_report))


def _show_plan(found: "list[Point]", runs: "Runs", *, as_json: bool) -> None:
    seen: set[tuple[str, str]] = set()
    told: list[dict[str, Any]] = []
    for point in found:
        steps = _flow(point, runs).plan()
        missing = [(step.name, step.request.key) for step in steps if not step.complete]
        told.append(
            {
                "point": point.number,
                "run": point.loaded.recipe.name,
                "settings": point.settings,
                "would_run": [name for name, key in missing if (name, key) not in seen],
                "shared": [name for name, key in missing if (name, key) in seen],
            }
        )
        seen.update(missing)
    if as_json:
        print(json.dumps(told, ensure_ascii=False, indent=1))
        return
    for one in told:
        made, shared = (", ".join(one[key]) or "nothing" for key in ("would_run", "shared"))
        screen().print(f"{one['point']}: {_said(one['settings'])}", highlight=False, markup=False)
        screen().print(f"   would run {made}; shares {shared}", highlight=False, markup=False)


def losses_of(run: Path) -> dict[str, float | None]:
    """Of the last training of a run, by what it is of: on each validation set, or on its batches where it has none."""
    from affinage.pipeline.models import TRAININGS
    from affinage.pipeline.store import read_manifest

    for stage in TRAININGS:
        manifest = read_manifest(run / stage)
        if manifest is not None:
            summary = manifest["summary"]
            held_out = {name: facts["loss"] for name, facts in (summary["validation"] or {}).items()}
            found = held_out or {"training": summary["final_loss"]}
            return {f"{stage} loss, {name}": loss for name, loss in found.items()}
    return {}


def scores_of(run: Path) -> dict[str, dict[str, Any]]:
    """Of the last model that was judged in a run its headline metrics, by task.

    {metric, value, stderr, chance, chat_template: whether it was asked in that}
    """
    from affinage.pipeline.models import JUDGED, TRAININGS
    from affinage.pipeline.store import read_manifest
    from affinage.report.evaluations import read_evaluation

    for stage in (JUDGED[training] for training in TRAININGS):
        manifest = read_manifest(run / stage)
        if manifest is not None:
            judged = read_evaluation(stage, run / stage, manifest["summary"])
            return {
                each.task: {name: getattr(each, name) for name in _OF_A_SCORE}
                for each in judged.scores
                if each.headline
            }
    return {}


def show_scores(told: list[dict[str, Any]]) -> None:
    """Print the table of a sweep's points: runs, settings, losses and scores."""
    from rich.table import Table

    from affinage.report.strings import strings

    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for one in told:
        table.add_column(str(one["point"]), justify="right")
    table.add_row("run", *(one["run"] for one in told))
    for key in told[0]["settings"]:
        table.add_row(key, *(_value(one["settings"][key]) for one in told), style="bold")
    for name in dict.fromkeys(name for one in told for name in one["losses"]):
        table.add_row(name, *(_loss(one["losses"].get(name)) for one in told))
    for task in dict.fromkeys(task for one in told for task in one["scores"]):
        first = next(one["scores"][task] for one in told if task in one["scores"])
        table.add_row(f"{task} {first['metric']}", *(_score(one["scores"].get(task)) for one in told))
    console = screen()
    console.print()
    console.print(table, highlight=False, markup=False)
    if any(score["chat_template"] for one in told for score in one["scores"].values()):
        console.print(strings("en")["in_chat_note"], highlight=False, markup=False)


def _loss(loss: float | None) -> str:
    return "–" if loss is None else f"{loss:.4f}"


def _score(score: dict[str, Any] | None) -> str:
    from affinage.report.evaluations import marked

    if score is None:
        return "–"
    share = score["metric"].startswith(("acc", "exact"))
    value, error = (100 * part if share and part is not None else part for part in (score["value"], score["stderr"]))
    return marked(f"{value:.1f}" + ("" if error is None else f" ± {error:.1f}"), score["chat_template"])


def _said(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key} = {_value(value)}" for key, value in settings.items())


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
