"""The verb `sweep`: a run for every combination of some settings, and one table of their scores."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from affinage.cli.options import RUNS, DryRunOption, JsonOption, RecipeArgument, RunsOption, SetOption, app, load, warn
from affinage.cli.output import Table, emit, only_data_on_stdout, screen, table
from affinage.errors import EXIT_USER_ERROR, TransientError, UserError

if TYPE_CHECKING:
    from affinage.pipeline.runner import PipelineRunner, Point

RESULTS = "sweep.json"  # in the folder of the recipe's run


@app.command()
def sweep(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    runs: RunsOption = RUNS,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run every combination of the settings in a recipe's `sweep`; what they have in common is made once.

    The table has a row for each run: its name, its settings, the losses of its last training, its scores. A run that
    fails does not end the others; the table is written after each.

    Example: affinage sweep quickstart --set 'sweep={pretrain.steps: [600, 1200], sft.steps: [200, 400]}'
    """
    base, run = load(recipe, overrides, runs)
    from affinage.cli.watch import Watch
    from affinage.data.json_files import write_json
    from affinage.pipeline.build import prepare_process
    from affinage.pipeline.models import RECIPE
    from affinage.pipeline.runner import points
    from affinage.stopping import StopSignals, without_readers

    grid = points(recipe if run is None else str(run / RECIPE), overrides or ())
    if dry_run:
        emit(_planned(grid, runs), as_json)
        return
    prepare_process(base.recipe)
    folder = runs / base.recipe.name
    with StopSignals(), without_readers(), only_data_on_stdout(as_json):
        for point in grid:  # all of them first: a mistake in the last is not found after days of the others
            try:
                runner = _runner(point, runs)
                runner.check(runner.plan())
            except UserError as error:
                error.where = f"{point.number} of {len(grid)}, {_settings(point)}: {error.where}"
                raise
        folder.mkdir(parents=True, exist_ok=True)
        results = []
        for point in grid:
            screen().print(f"--- {point.number} of {len(grid)}: {_settings(point)}", markup=False)
            failure = {}
            try:
                _runner(point, runs).run(Watch())
            except TransientError:
                raise
            except UserError as error:
                failure = {"error": str(error)}
                warn(f"{point.loaded.recipe.name} failed: {error}")
            results.append(_result(point, runs) | failure)
            write_json(folder / RESULTS, results)
    emit(results, as_json, [*scores_view(results), f"\nresults  {folder / RESULTS}"])
    if any("error" in result for result in results):
        raise typer.Exit(EXIT_USER_ERROR)


def _runner(point: "Point", runs: Path) -> "PipelineRunner":
    from affinage.pipeline.build import build_steps
    from affinage.pipeline.runner import PipelineRunner

    return PipelineRunner(point.loaded, runs, build_steps(point.loaded))


def _planned(grid: "list[Point]", runs: Path) -> list[dict[str, Any]]:
    """For every point the steps that would run for it, without those that run for a point before it."""
    rows, keys = [], set[str]()
    for point in grid:
        missing = {step.request.key: step.name for step in _runner(point, runs).plan() if not step.complete}
        rows.append(_of_point(point) | {"would_run": [name for key, name in missing.items() if key not in keys]})
        keys |= missing.keys()
    return rows


def _of_point(point: "Point") -> dict[str, Any]:
    return {"point": point.number, "run": point.loaded.recipe.name, "settings": point.settings}


def _result(point: "Point", runs: Path) -> dict[str, Any]:
    """The losses of a point's last training, and the headline scores of the last model that was evaluated."""
    from affinage.pipeline.models import EVALUATIONS, TRAININGS
    from affinage.report.evaluations import read_evaluation
    from affinage.results import MANIFEST, TrainingResult, read_result

    run, losses, scores = runs / point.loaded.recipe.name, {}, {}
    for training in reversed(TRAININGS):
        if (result := read_result(run / training, TrainingResult)) is not None:
            sets = result.validation
            by_set = {name: validated.loss for name, validated in sets.items()} or {"training": result.final_loss}
            losses = {f"{training} loss, {name}": loss for name, loss in by_set.items()}
            # Losses per token of different tokenizers cannot be compared, bits per byte can.
            losses |= {
                f"{training} bits per byte, {name}": v.bits_per_byte for name, v in sets.items() if v.bits_per_byte
            }
        if (run / EVALUATIONS[training] / MANIFEST).is_file():
            evaluation = read_evaluation(training, run / EVALUATIONS[training])
            names = ("metric", "value", "stderr", "chance", "chat_template")
            scores = {score.task: {name: getattr(score, name) for name in names} for score in evaluation.headlines}
    return _of_point(point) | {"losses": losses, "scores": scores}


def scores_view(results: list[dict[str, Any]]) -> "Iterator[str | Table]":
    """The table of a sweep's points: runs, settings, losses and scores in percent."""
    rows = []
    for result in results:
        row = {"run": result["run"], **result["settings"]}
        row |= {name: f"{loss:.4f}" for name, loss in result["losses"].items() if loss is not None}
        for task, score in result["scores"].items():
            error = "" if score["stderr"] is None else f" ± {100 * score['stderr']:.1f}"
            mark = " †" if score["chat_template"] else ""
            row[f"{task} {score['metric']}"] = f"{100 * score['value']:.1f}{error}{mark}"
        rows.append(row)
    yield table(rows)
    if any(score["chat_template"] for result in results for score in result["scores"].values()):
        yield "† asked in the model's chat template"
    yield from (f"{result['run']} failed: {result['error'].splitlines()[0]}" for result in results if "error" in result)


def _settings(point: "Point") -> str:
    return ", ".join(f"{key} = {value}" for key, value in point.settings.items())
