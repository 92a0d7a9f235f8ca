"""Verbs about several runs: `compare` puts them beside each other, `sweep` makes one for each point of a grid."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from affinage.cli import terminal
from affinage.cli.terminal import (
    RUNS,
    LangOption,
    RunsOption,
    app,
    arg,
    described,
    emit,
    find,
    load,
    only_data_on_stdout,
    opt,
    screen,
    table,
    warn,
)
from affinage.errors import EXIT_USER_ERROR, TransientError, UserError

if TYPE_CHECKING:
    from affinage.pipeline.models import Target
    from affinage.pipeline.runner import Point
    from affinage.report.page import Entrant

SWEEP = "sweep.json"  # in the folder of the recipe's run: the points of a sweep


@app.command()
def compare(
    names: Annotated[list[str], arg("A B [C]...", "Runs, models that `eval` has scored, or folders of results.")],
    runs: RunsOption = RUNS,
    html: Annotated[Path | None, opt("Write a page: settings, losses, scores, time.", "--html", metavar="FILE")] = None,
    lang: LangOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """Compare runs: settings, time and losses; and their models item by item, with 95 % confidence intervals.

    Differences are from the first one that is named.

    Examples: affinage compare quickstart/evaluate-base quickstart/evaluate-sft

    affinage compare small wide deep --html compared.html
    """
    if len(names) < 2:
        raise UserError("one alone cannot be compared", where=names[0], fix="Name two or more.")
    from affinage.pipeline.models import check_complete

    targets = [find(name, runs) for name in names]  # before JAX is imported
    for target in targets:
        check_complete(target, runs)
    from affinage.report.page import comparison, render_comparison, write_page

    compared = comparison([_entrant(target, runs) for target in targets])
    facts = compared.to_dict()
    if html is not None:
        write_page(render_comparison(compared, lang), html)
        facts["page"] = str(html)
    emit(facts, as_json, _compared(facts))


def _compared(facts: dict[str, Any]) -> Iterator[Any]:
    """The text of a comparison."""
    from affinage.config.yaml import brief

    names = [row["name"] for row in facts["runs"]]
    runs = [{key: value for key, value in row.items() if key not in ("summary", "scores")} for row in facts["runs"]]
    settings = [
        {"setting": row["key"]} | {name: brief(value) for name, value in zip(names, row["values"]) if value is not None}
        for row in facts["settings"]
    ]
    yield from described(facts | {"runs": runs, "settings": settings, "notes": None})
    yield from facts["notes"]
    if len(facts["differences"]) > 5:
        yield "With 95 % intervals, about 1 in 20 null differences looks significant."


def _entrant(target: "Target", runs: Path) -> "Entrant":
    """What is known of a target. Raises UserError if it is neither a complete run nor a model with results."""
    from affinage.pipeline.eval_results import eval_results
    from affinage.pipeline.models import TRAININGS, command, results_of, run_of
    from affinage.report.facts import collect_facts
    from affinage.report.page import Entrant

    name, run, parts = target.name, target.run, None
    if target.kind in ("recipe", "run"):
        run = run_of(target, runs)
        results = eval_results(name if target.kind == "run" else str(run), runs)
    else:
        results = eval_results(name, runs)
        is_training = run is not None and target.path.name in TRAININGS and target.step is None
        parts = results_of(target.path.resolve(), run) if run is not None and is_training else None
        run = run if parts else None
    if run is None and results is None:
        fix = f"Make them: {command('eval', name, '--tasks', 'TASKS', runs=runs)}, with the tasks of the others."
        raise UserError(f"there are no results of `{name}` as it is now", fix=fix)
    facts = collect_facts(run, parts) if run is not None else collect_facts(Path(name), {})
    return Entrant(name, facts, results, last=parts is not None)


@app.command()
def sweep(
    recipe: terminal.RecipeArgument,
    overrides: terminal.SetOption = None,
    runs: RunsOption = RUNS,
    dry_run: terminal.DryRunOption = False,
    as_json: terminal.JsonOption = False,
) -> None:
    """Run every combination of the settings in a recipe's `sweep`; what they have in common is made once.

    The table has a row for each run: its name, its settings, the losses of its last training, its scores. A run that
    fails does not end the others; the table is written after each.

    Example: affinage sweep quickstart --set 'sweep={pretrain.steps: [600, 1200], sft.steps: [200, 400]}'
    """
    base, run = load(recipe, overrides, runs)
    from affinage.cli.watch import Watch
    from affinage.data.json_files import write_json
    from affinage.pipeline.build import build_steps, prepare_process
    from affinage.pipeline.models import RECIPE
    from affinage.pipeline.runner import PipelineRunner, points
    from affinage.stopping import StopSignals, without_readers

    folder = runs / base.recipe.name
    grid = points(recipe if run is None else str(run / RECIPE), overrides or ())
    prepare_process(base.recipe)
    planned, results, keys = list[dict[str, Any]](), list[dict[str, Any]](), set[str]()
    with StopSignals(), without_readers(), only_data_on_stdout(as_json):
        for point in grid:  # all of them first: a mistake in the last is not found after days of the others
            try:
                runner = PipelineRunner(point.loaded, runs, build_steps(point.loaded))
                plan = runner.plan()
                runner.check(plan)
            except UserError as error:
                error.where = f"{_title(point, len(grid))}: {error.where}"
                raise
            missing = {step.request.key: step.name for step in plan if not step.complete}
            would_run = [name for key, name in missing.items() if key not in keys]  # and not for a point before it
            about = {"point": point.number, "run": point.loaded.recipe.name, "settings": point.settings}
            planned.append(about | {"would_run": would_run})
            keys |= missing.keys()
        if dry_run:
            emit(planned, as_json)
            return
        folder.mkdir(parents=True, exist_ok=True)
        for result, point in zip(planned, grid, strict=True):
            screen().print(f"--- {_title(point, len(grid))}", markup=False)
            del result["would_run"]
            try:  # planned again: days may have passed, in which files changed and other points copied to the remote
                PipelineRunner(point.loaded, runs, build_steps(point.loaded)).run(Watch())
            except TransientError:
                raise
            except UserError as error:
                result |= {"error": str(error)}
                warn(f"{result['run']} failed: {error}")
            results.append(result | _losses_and_scores(runs / result["run"]))
            write_json(folder / SWEEP, results)
    rows = []
    for result in results:
        row = {"run": result["run"], **result["settings"]}
        row |= {name: f"{loss:.4f}" for name, loss in result["losses"].items()}
        for task, score in result["scores"].items():
            error = "" if score["stderr"] is None else f" ± {100 * score['stderr']:.1f}"
            row[f"{task} {score['metric']}"] = f"{100 * score['value']:.1f}{error}"
        rows.append(row)
    emit(results, as_json, [table(rows), f"\nresults  {folder / SWEEP}"])
    if any("error" in result for result in results):
        raise typer.Exit(EXIT_USER_ERROR)


def _title(point: "Point", points: int) -> str:
    settings = ", ".join(f"{key} = {value}" for key, value in point.settings.items())
    return f"{point.number} of {points}, {settings}"


def _losses_and_scores(run: Path) -> dict[str, Any]:
    """The losses of a run's last training, and the headline scores of the last model that was evaluated."""
    from affinage.report.facts import MODELS, read_evaluation
    from affinage.results import MANIFEST, TrainingResult, Validated, read_result

    losses, scores = {}, {}
    for training, model in MODELS.items():
        if (result := read_result(run / training, TrainingResult)) is not None:
            losses = {}
            for name, validated in (result.validation or {"training": Validated(loss=result.final_loss)}).items():
                losses[f"{training} loss, {name}"] = validated.loss
                # Losses per token of different tokenizers cannot be compared, bits per byte can.
                losses[f"{training} bits per byte, {name}"] = validated.bits_per_byte
        evaluated = run / f"evaluate-{model}"
        if (evaluated / MANIFEST).is_file():
            names = ("metric", "value", "stderr", "chance", "chat_template")
            headlines = read_evaluation(model, evaluated).headlines
            scores = {score.task: {name: getattr(score, name) for name in names} for score in headlines}
    return {"losses": {name: loss for name, loss in losses.items() if loss is not None}, "scores": scores}
