"""The verb `sweep`: a run for every combination of some settings, and one table of their scores."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from affinage.cli.options import RUNS, DryRunOption, JsonOption, RecipeArgument, RunsOption, SetOption, load, verb, warn
from affinage.cli.output import Table, emit, only_data_on_stdout, screen, table
from affinage.errors import EXIT_USER_ERROR, TransientError, UserError

if TYPE_CHECKING:
    from affinage.pipeline.runner import PipelineRunner, Point

RESULTS = "sweep.json"  # in the folder of the recipe's run


@verb()
def sweep(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    runs: RunsOption = RUNS,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run every combination of the settings in a recipe's `sweep`; what they have in common is made once.

    The table has a column for each run: its name, its settings, the losses of its last training, its scores. A run that
    fails does not end the others; the table is written after each.

    Example: affinage sweep quickstart --set 'sweep={pretrain.steps: [600, 1200], sft.steps: [200, 400]}'
    """
    base = load(recipe, overrides, runs)
    from affinage.api import prepare_process
    from affinage.cli.watch import Watch
    from affinage.data.atomic import write_json
    from affinage.pipeline.models import RECIPE, resolve
    from affinage.pipeline.runner import points
    from affinage.stopping import StopSignals, without_readers

    made = resolve(recipe, runs).run
    found = points(recipe if made is None else str(made / RECIPE), overrides or ())
    if dry_run:
        planned = _planned(found, runs)
        emit(planned, as_json)
        return
    prepare_process(base)
    folder, results = runs / base.recipe.name, [_result(point, runs) for point in found]
    with StopSignals(), without_readers(), only_data_on_stdout(as_json):
        for point in found:  # all of them first: a mistake in the last is not found after days of the others
            try:
                runner = _runner(point, runs)
                runner.check(runner.plan())
            except UserError as error:
                place = f"{point.number} of {len(found)}, {_settings(point)}"
                error.where = f"{place}: {error.where}" if error.where else place
                raise
        folder.mkdir(parents=True, exist_ok=True)
        for index, point in enumerate(found):
            screen().print(f"--- {point.number} of {len(found)}: {_settings(point)}", markup=False)
            failure = {}
            try:
                runner = _runner(point, runs)
                with Watch() as watch:
                    runner.run(watch)
            except TransientError:
                raise
            except UserError as error:
                failure = {"error": str(error)}
                warn(f"{point.loaded.recipe.name} failed: {error}")
            results[index] = _result(point, runs) | failure
            write_json(folder / RESULTS, results)
    emit(results, as_json, [*scores_view(results), f"\nresults  {folder / RESULTS}"])
    if any("error" in one for one in results):
        raise typer.Exit(EXIT_USER_ERROR)


def _runner(point: "Point", runs: Path) -> "PipelineRunner":
    from affinage.api import write_report
    from affinage.pipeline.build import build_steps
    from affinage.pipeline.runner import PipelineRunner

    return PipelineRunner(point.loaded, runs, build_steps(point.loaded, write_report))


def _planned(found: "list[Point]", runs: Path) -> list[dict[str, Any]]:
    """For every point the steps that would run for it, and those that a point before it runs."""
    seen: set[tuple[str, str]] = set()
    planned: list[dict[str, Any]] = []
    for point in found:
        missing = [(step.name, step.request.key) for step in _runner(point, runs).plan() if not step.complete]
        own = [step[0] for step in missing if step not in seen]
        shared = [step[0] for step in missing if step in seen]
        seen.update(missing)
        planned.append(_of_point(point) | {"would_run": own, "shared": shared})
    return planned


def _of_point(point: "Point") -> dict[str, Any]:
    return {"point": point.number, "run": point.loaded.recipe.name, "settings": point.settings}


def _result(point: "Point", runs: Path) -> dict[str, Any]:
    """The losses of a point's last training, and the headline scores of the last model that was evaluated."""
    from affinage.pipeline.models import EVALUATIONS, TRAININGS
    from affinage.report.evaluations import read_evaluation
    from affinage.results import MANIFEST, TrainingResult, read_result

    run, losses, scores = runs / point.loaded.recipe.name, {}, {}
    for training in TRAININGS:  # the last one first
        if (result := read_result(run / training, TrainingResult)) is not None:
            found = {name: facts.loss for name, facts in result.validation.items()} or {"training": result.final_loss}
            losses = {f"{training} loss, {name}": loss for name, loss in found.items()}
            break
    steps = (EVALUATIONS[training] for training in TRAININGS)
    if step := next((step for step in steps if (run / step / MANIFEST).is_file()), None):
        scores = {
            one.task: {name: getattr(one, name) for name in ("metric", "value", "stderr", "chance", "chat_template")}
            for one in read_evaluation(step, run / step).scores
            if one.headline
        }
    return _of_point(point) | {"losses": losses, "scores": scores}


def scores_view(results: list[dict[str, Any]]) -> "Iterator[str | Table]":
    """The table of a sweep's points: runs, settings, losses and scores."""
    yield table([{"run": one["run"], **one["settings"], **_losses_and_scores(one)} for one in results])
    if any(score["chat_template"] for one in results for score in one["scores"].values()):
        yield "† asked in the model's chat template"
    yield from (f"{one['run']} failed: {one['error'].splitlines()[0]}" for one in results if "error" in one)


def _losses_and_scores(point: dict[str, Any]) -> dict[str, str]:
    from affinage.report.evaluations import marked

    found = {name: f"{loss:.4f}" for name, loss in point["losses"].items() if loss is not None}
    for task, score in point["scores"].items():
        scale = 100 if score["metric"].startswith(("acc", "exact")) else 1
        error = "" if score["stderr"] is None else f" ± {scale * score['stderr']:.1f}"
        found[f"{task} {score['metric']}"] = marked(f"{scale * score['value']:.1f}{error}", score["chat_template"])
    return found


def _settings(point: "Point") -> str:
    return ", ".join(f"{key} = {value}" for key, value in point.settings.items())
