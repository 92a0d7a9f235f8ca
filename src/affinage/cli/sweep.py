"""The verb `sweep`: a run for every combination of some settings, and one table of their scores."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from affinage.cli.options import RUNS, DryRunOption, JsonOption, RecipeArgument, RunsOption, SetOption, load, warn
from affinage.cli.output import Table, emit, only_data_on_stdout, screen
from affinage.errors import EXIT_USER_ERROR, TransientError, UserError

if TYPE_CHECKING:
    from affinage.pipeline.runner import PipelineRunner, Point, Runs

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

    The table has a column for each run: its name, its settings, the losses of its last training, its scores. A run that
    fails does not end the others; the table is written after each.

    Example: affinage sweep quickstart --set 'sweep={pretrain.steps: [600, 1200], sft.steps: [200, 400]}'
    """
    base = load(recipe, overrides, runs)
    from affinage.api import prepare_process
    from affinage.data.atomic import write_json
    from affinage.pipeline.models import RECIPE, resolve
    from affinage.pipeline.plan import check
    from affinage.pipeline.runner import Runs, points
    from affinage.stopping import StopSignals, without_readers

    made = resolve(recipe, runs).run
    found = points(recipe if made is None else str(made / RECIPE), overrides or ())
    if dry_run:
        planned = _planned(found, Runs(runs))
        emit(planned, as_json, _plan(planned))
        return
    prepare_process(base)
    folder, results = runs / base.recipe.name, [_result(point, runs) for point in found]
    with StopSignals(), without_readers(), only_data_on_stdout(as_json):
        for point in found:  # all of them first: a mistake in the last is not found after days of the others
            try:
                check(point.loaded, _runner(point, Runs(runs)).plan())
            except UserError as error:
                place = f"{point.number} of {len(found)}, {_settings(point.settings)}"
                error.where = f"{place}: {error.where}" if error.where else place
                raise
        folder.mkdir(parents=True, exist_ok=True)
        for index, point in enumerate(found):
            screen().print(f"--- {point.number} of {len(found)}: {_settings(point.settings)}", markup=False)
            failure = ""
            try:
                _run(point, Runs(runs))
            except TransientError:
                raise
            except UserError as error:
                failure = str(error)
                warn(f"{point.loaded.recipe.name} failed: {failure}")
            results[index] = _result(point, runs) | ({"error": failure} if failure else {})
            write_json(folder / RESULTS, results)
    emit(
        results, as_json, (part for view in (scores_view(results), [f"\nresults  {folder / RESULTS}"]) for part in view)
    )
    if any("error" in one for one in results):
        raise typer.Exit(EXIT_USER_ERROR)


def _result(point: "Point", runs: Path) -> dict[str, Any]:
    run = runs / point.loaded.recipe.name
    of_point = {"point": point.number, "run": run.name, "settings": point.settings}
    return of_point | {"losses": _losses(run), "scores": _scores(run)}


def _run(point: "Point", runs: "Runs") -> None:
    from affinage.cli.watch import Watch

    runner = _runner(point, runs)
    with Watch(runner.plan()) as watch:
        runner.run(watch)


def _runner(point: "Point", runs: "Runs") -> "PipelineRunner":
    from affinage.api import write_report
    from affinage.pipeline.build import build_steps
    from affinage.pipeline.runner import PipelineRunner

    return PipelineRunner(point.loaded, runs, build_steps(point.loaded, write_report))


def _planned(found: "list[Point]", runs: "Runs") -> list[dict[str, Any]]:
    """For every point the steps that would run for it, and those that a point before it runs."""
    seen: set[tuple[str, str]] = set()
    planned: list[dict[str, Any]] = []
    for point in found:
        steps = _runner(point, runs).plan()
        missing = [(step.name, step.request.key) for step in steps if not step.complete]
        of_point = {"point": point.number, "run": point.loaded.recipe.name, "settings": point.settings}
        own, shared = (
            [name for name, key in missing if ((name, key) in seen) is is_shared] for is_shared in (False, True)
        )
        planned.append(of_point | {"would_run": own, "shared": shared})
        seen.update(missing)
    return planned


def _plan(planned: list[dict[str, Any]]) -> Iterator[str]:
    for one in planned:
        made, shared = (", ".join(one[key]) or "nothing" for key in ("would_run", "shared"))
        yield f"{one['point']}: {_settings(one['settings'])}"
        yield f"   would run {made}; shares {shared}"


def _losses(run: Path) -> dict[str, float | None]:
    """The losses of a run's last training: on each validation set, or on its batches where it has none."""
    from affinage.pipeline.models import TRAININGS
    from affinage.results import TrainingResult, read_result

    for training in TRAININGS:
        if (result := read_result(run / training, TrainingResult)) is not None:
            found = {name: facts.loss for name, facts in result.validation.items()} or {"training": result.final_loss}
            return {f"{training} loss, {name}": loss for name, loss in found.items()}
    return {}


def _scores(run: Path) -> dict[str, dict[str, Any]]:
    """The headline metrics of the last model that was evaluated in a run, by task.

    {metric, value, stderr, chance, chat_template: whether it was asked in that}
    """
    from affinage.pipeline.models import EVALUATIONS, TRAININGS
    from affinage.pipeline.store import read_manifest
    from affinage.report.evaluations import read_evaluation

    for step in (EVALUATIONS[training] for training in TRAININGS):
        if read_manifest(run / step) is not None:
            scores = read_evaluation(step, run / step).scores
            return {one.task: {name: getattr(one, name) for name in _OF_A_SCORE} for one in scores if one.headline}
    return {}


def scores_view(results: list[dict[str, Any]]) -> "Iterator[str | Table]":
    """The table of a sweep's points: runs, settings, losses and scores."""
    from affinage.report.strings import strings

    rows: list[list[Any]] = [["run", *(one["run"] for one in results)]]
    rows += [[key, *(_value(one["settings"][key]) for one in results)] for key in results[0]["settings"]]
    for name in dict.fromkeys(name for one in results for name in one["losses"]):
        losses = (one["losses"].get(name) for one in results)
        rows.append([name, *(None if loss is None else f"{loss:.4f}" for loss in losses)])
    for task in dict.fromkeys(task for one in results for task in one["scores"]):
        first = next(one["scores"][task] for one in results if task in one["scores"])
        rows.append([f"{task} {first['metric']}", *(_score(one["scores"].get(task)) for one in results)])
    yield ""
    yield Table(["", *(str(one["point"]) for one in results)], rows)
    if any(score["chat_template"] for one in results for score in one["scores"].values()):
        yield strings("en")["in_chat_note"]
    yield from (f"{one['run']} failed: {one['error'].splitlines()[0]}" for one in results if "error" in one)


def _score(score: dict[str, Any] | None) -> str | None:
    from affinage.report.evaluations import marked

    if score is None:
        return None
    share = score["metric"].startswith(("acc", "exact"))
    value, error = (100 * part if share and part is not None else part for part in (score["value"], score["stderr"]))
    return marked(f"{value:.1f}" + ("" if error is None else f" ± {error:.1f}"), score["chat_template"])


def _settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key} = {_value(value)}" for key, value in settings.items())


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
