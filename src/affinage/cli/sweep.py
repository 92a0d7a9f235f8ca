"""The verb `sweep`: a run for every combination of some settings, and one table of their scores."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from affinage.cli.options import RUNS, DryRunOption, JsonOption, RecipeArgument, RunsOption, SetOption, app, load, warn
from affinage.cli.output import Table, emit, only_data_on_stdout, screen, table
from affinage.errors import EXIT_USER_ERROR, TransientError, UserError

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
    from affinage.hardware.devices import prepare
    from affinage.pipeline.build import build_steps
    from affinage.pipeline.models import RECIPE
    from affinage.pipeline.runner import PipelineRunner, points
    from affinage.stopping import StopSignals, without_readers

    folder = runs / base.recipe.name
    grid = points(recipe if run is None else str(run / RECIPE), overrides or ())
    prepare()
    planned, results, keys = list[dict[str, Any]](), list[dict[str, Any]](), set[str]()
    with StopSignals(), without_readers(), only_data_on_stdout(as_json):
        titles = [
            f"{number} of {len(grid)}, {', '.join(f'{key} = {value}' for key, value in settings.items())}"
            for number, (settings, _) in enumerate(grid, 1)
        ]
        # All of them first: a mistake in the last is not found after days of the others.
        for title, (settings, point) in zip(titles, grid, strict=True):
            try:
                runner = PipelineRunner(point, runs, build_steps(point))
                plan = runner.plan()
                runner.check(plan)
            except UserError as error:
                error.where = f"{title}: {error.where}"
                raise
            missing = {step.request.key: step.name for step in plan if not step.complete}
            would_run = [name for key, name in missing.items() if key not in keys]  # and not for a point before it
            planned.append({"run": point.recipe.name, "settings": settings, "would_run": would_run})
            keys |= missing.keys()
        if dry_run:
            emit(planned, as_json)
            return
        folder.mkdir(parents=True, exist_ok=True)
        for title, result, (_, point) in zip(titles, planned, grid, strict=True):
            screen().print(f"--- {title}", markup=False)
            del result["would_run"]
            try:  # planned again: days may have passed, in which files changed and other points copied to the remote
                PipelineRunner(point, runs, build_steps(point)).run(Watch())
            except TransientError:
                raise
            except UserError as error:
                result |= {"error": str(error)}
                warn(f"{result['run']} failed: {error}")
            results.append(result | _losses_and_scores(runs / result["run"]))
            write_json(folder / RESULTS, results)
    emit(results, as_json, [*scores_view(results), f"\nresults  {folder / RESULTS}"])
    if any("error" in result for result in results):
        raise typer.Exit(EXIT_USER_ERROR)


def _losses_and_scores(run: Path) -> dict[str, Any]:
    """The losses of a run's last training, and the headline scores of the last model that was evaluated."""
    from affinage.report.facts import MODELS, read_evaluation
    from affinage.results import MANIFEST, TrainingResult, read_result

    losses, scores = {}, {}
    for training, model in MODELS.items():
        if (result := read_result(run / training, TrainingResult)) is not None:
            sets = result.validation
            by_set = {name: validated.loss for name, validated in sets.items()} or {"training": result.final_loss}
            losses = {f"{training} loss, {name}": loss for name, loss in by_set.items()}
            # Losses per token of different tokenizers cannot be compared, bits per byte can.
            losses |= {
                f"{training} bits per byte, {name}": v.bits_per_byte for name, v in sets.items() if v.bits_per_byte
            }
        evaluated = run / f"evaluate-{model}"
        if (evaluated / MANIFEST).is_file():
            names = ("metric", "value", "stderr", "chance", "chat_template")
            headlines = read_evaluation(model, evaluated).headlines
            scores = {score.task: {name: getattr(score, name) for name in names} for score in headlines}
    return {"losses": losses, "scores": scores}


def scores_view(results: list[dict[str, Any]]) -> Iterator[str | Table]:
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
