"""Verbs that score: `eval` models, `compare` models and runs, and `sweep`, a run for each point of a grid."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from affinage.cli import terminal
from affinage.cli.run import run_own_steps
from affinage.cli.terminal import arg, counted, described, emit, find, load, model_of, opt, table
from affinage.errors import EXIT_USER_ERROR, TransientError, UserError

if TYPE_CHECKING:
    from affinage.pipeline.models import Target
    from affinage.report.page import Entrant

SWEEP = "sweep.json"  # in the folder of the recipe's run: the points of a sweep
_TASKS = "julian, french, a name of lm-evaluation-harness, a task file; several with commas. Default: the recipe's."
_TEMPLATE = "Ask in the model's chat template: tasks made for chat (auto), all (true), or none."
_CONTAMINATION = "Search the text that it was trained on for the items, where it is here; default yes."


@terminal.app.command("eval")
def evaluate(
    model: terminal.ModelArgument,
    overrides: terminal.SetOption = None,
    runs: terminal.RunsOption = terminal.RUNS,
    force: terminal.ForceOption = None,
    tasks: Annotated[list[str] | None, opt(_TASKS, "--tasks", "--task", metavar="TASK")] = None,
    data_dir: Annotated[str | None, opt("Items as NAME.jsonl(.gz); default: from the hub.", metavar="DIR")] = None,
    limit: Annotated[int | None, opt("Items per task; default all.", min=1)] = None,
    num_fewshot: Annotated[int | None, opt("Examples before a question; default: as the task defines.", min=0)] = None,
    apply_chat_template: Annotated[Literal["auto", "true", "false"] | None, opt(_TEMPLATE)] = None,
    batch_size: Annotated[int | None, opt("Whole sequences at once; default: by its context.", min=1)] = None,
    contamination: Annotated[bool | None, opt(_CONTAMINATION)] = None,
    mesh: terminal.MeshOption = None,
    max_model_len: terminal.MaxLenOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """Score models on benchmarks: a run on those of its recipe, or any model on any task.

    A run that is evaluated already is not evaluated again; --set and --force change that, as for `affinage run`. With
    an option of its own, such as --tasks or --limit, or for another model than a run, it leaves the run as it is.

    Examples: affinage eval quickstart

    affinage eval quickstart/pretrain --tasks julian --data-dir my_benchmarks --limit 100
    """
    settings: dict[str, Any] = {
        "tasks": [name for names in tasks or () for name in names.split(",") if name] or None,
        "data_dir": data_dir,
        "limit": limit,
        "num_fewshot": num_fewshot,
        "apply_chat_template": {"true": True, "false": False, "auto": "auto", None: None}[apply_chat_template],
        "batch_size": batch_size,
        "contamination": contamination,
    }
    target = find(model, runs)
    whole = target.kind in ("recipe", "run") and target.step is None
    if whole and all(value is None for value in (mesh, max_model_len, *settings.values())):
        results = _evaluate_run(model, terminal.PipelineOptions(overrides, runs, force, as_json=as_json))
        tables = iter([part for step, each in results["evaluations"].items() for part in ("\n" + step, *_view(each))])
    elif overrides or force:
        fix = "Use the options of `eval`, such as --tasks and --limit, or name the run alone."
        raise UserError("--set and --force are for a whole run and its recipe's benchmarks", where=model, fix=fix)
    else:
        results = _evaluate_model(model, runs, mesh, max_model_len, settings)
        tables = _view(results)
    from affinage.cluster.processes import is_first

    if is_first():
        emit(results, as_json, tables)


def _evaluate_run(name: str, settings: terminal.PipelineOptions) -> dict[str, Any]:
    """The results of a run's own evaluation, after running those of its steps that are missing."""
    from affinage.pipeline.models import EVALUATIONS, is_evaluated, resolve, run_of
    from affinage.results import read_json

    run, steps = run_of(resolve(name, settings.runs), settings.runs), [*EVALUATIONS.values()]
    if settings.overrides or settings.force or not is_evaluated(run):
        instead = "Name benchmarks: --tasks julian, or --task my_task.yaml"
        run = run_own_steps(name, settings, "evaluate", steps, instead)
    results = {step: read_json(run / step / "results.json") for step in steps}
    return {"run": run.name, "evaluations": {step: result for step, result in results.items() if result}}


def _evaluate_model(
    name: str, runs: Path, mesh: Any, max_model_len: int | None, settings: dict[str, Any]
) -> dict[str, Any]:
    """The results of one model, evaluated apart from its recipe, which decides the settings that are None."""
    target, _ = model_of(name, runs)  # before JAX is imported
    from affinage.cluster.processes import init_distributed, placement
    from affinage.config.recipe import EvaluateSettings
    from affinage.evaluation.run import evaluate
    from affinage.evaluation.tasks import check_names
    from affinage.pipeline.models import made_from, recorded, results_folder
    from affinage.pipeline.steps_eval import contamination_search
    from affinage.stopping import StopSignals

    if target.run is not None and settings["tasks"] is None:
        of_recipe = recorded(target.run).get("evaluate") or {}
        unset = (key for key in EvaluateSettings.model_fields if settings.get(key, "") is None)
        settings |= {key: of_recipe.get(key) for key in unset}  # a run of another version may have more
    settings = {key: value for key, value in settings.items() if value is not None}
    tasks, searches = settings.pop("tasks", []), settings.pop("contamination", True)
    if not tasks:
        raise UserError("no task was named", where=name, fix="For example: --tasks julian, or --task my_task.yaml")
    world = made_from(target.path, "synthesize")
    check_names(tasks, settings.get("data_dir"), world, where="--tasks")
    folder = results_folder(target, runs)
    with contextlib.ExitStack() as entered:
        if placement() is not None:
            entered.enter_context(StopSignals())  # one that waits for others is left at once
        processes = entered.enter_context(init_distributed())
        entered.enter_context(processes.all_at_work())
        model, state = terminal.opened(name, runs, mesh, max_model_len, reserves=True, announce=False)
        with terminal.working(name) as progress:
            results = evaluate(
                model,
                tasks,
                folder=folder if processes.first else None,
                keep=folder / "answers.db",
                world=world,
                seen=contamination_search(target.path) if searches else None,
                progress=progress,
                **settings,
            )
        processes.barrier("the end of the evaluation")
    return {**results, **state}


def _view(results: dict[str, Any]) -> Iterator[Any]:
    tasks = results["tasks"]
    rows = [
        {
            "task": task,
            "metric": metric,
            "value": _number(score["value"]),
            "±": _number(score["stderr"]),
            "chance": _number(entry.get("chance") if metric.startswith("acc") else None),
            "items": entry["items"],
        }
        for task, entry in tasks.items()
        for metric, score in entry["metrics"].items()
    ]
    yield table(rows) if rows else "No task was scored."
    cut = [f"{entry['truncated']:,} of {task}" for task, entry in tasks.items() if entry.get("truncated")]
    notes = {
        "Asked in the chat template": [task for task, entry in tasks.items() if entry.get("chat_template")],
        f"Items longer than the context of {results.get('context', 0):,} tokens, cut or in pieces": cut,
        "Not available, so left out": results.get("unavailable"),
        "For chat models only, so left out": results.get("skipped"),
    }
    yield from (f"{note}: {', '.join(names)}" for note, names in notes.items() if names)
    if facts := results.get("contamination"):
        yield f"\n{counted(facts['texts'], 'training text')} searched for the items."
        rows = [
            {"task": task, "items": entry["items"], "found": len(entry["found"] + entry["common"])}
            | {"metric": metric, "without them": _number(rest["value"]), "±": _number(rest["stderr"])}
            for task, entry in facts["tasks"].items()
            for metric, rest in entry["without"].items()
        ]
        yield from [table(rows)] if rows else []


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if abs(value) < 1e5 else f"{value:.3g}"


@terminal.app.command()
def compare(
    names: Annotated[list[str], arg("A B [C]...", "Runs, models that `eval` has scored, or folders of results.")],
    runs: terminal.RunsOption = terminal.RUNS,
    html: Annotated[Path | None, opt("Write a page: settings, losses, scores, time.", "--html", metavar="FILE")] = None,
    lang: terminal.LangOption = None,
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
        {"setting": row["key"]}
        | {name: "–" if value is None else brief(value) for name, value in zip(names, row["values"])}
        for row in facts["settings"]
    ]
    yield from described(facts | {"runs": runs, "settings": settings, "notes": None})
    yield from facts["notes"]
    if len(facts["differences"]) > 5:
        yield "With 95 % intervals, about 1 in 20 null differences looks significant."


def _entrant(target: "Target", runs: Path) -> "Entrant":
    """What is known of a target. Raises UserError if it is neither a complete run nor a model with results."""
    from affinage.pipeline.models import TRAININGS, command, eval_results, locate, results_of, run_of
    from affinage.report.facts import collect_facts
    from affinage.report.page import Entrant

    name, run, parts = target.name, target.run, None
    if target.kind in ("recipe", "run") and target.step is None:
        run = run_of(target, runs)
        results = eval_results(replace(target, kind="run", path=run), runs)
    else:
        results = eval_results(target, runs)
        is_training = run is not None and target.path.name in TRAININGS and target.step is None
        parts = results_of(target.path.resolve(), run) if run is not None and is_training else None
        run = run if parts else None
    if run is None and results is None:
        locate(target, runs)  # refuses what is no model, and so has no scores
        fix = f"Make them: {command('eval', name, '--tasks', 'TASKS', runs=runs)}, with the tasks of the others."
        raise UserError(f"there are no results of `{name}` as it is now", fix=fix)
    facts = collect_facts(run, parts) if run is not None else collect_facts(Path(name), {})
    return Entrant(name, facts, results, last=parts is not None)


@terminal.app.command()
def sweep(
    recipe: terminal.RecipeArgument,
    overrides: terminal.SetOption = None,
    runs: terminal.RunsOption = terminal.RUNS,
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
    from affinage.hardware.devices import prepare
    from affinage.pipeline.build import build_steps
    from affinage.pipeline.models import RECIPE
    from affinage.pipeline.runner import PipelineRunner, points
    from affinage.stopping import StopSignals, without_readers

    folder = runs / base.recipe.name
    grid = points(recipe if run is None else str(run / RECIPE), overrides or ())
    prepare()
    planned, results, keys = list[dict[str, Any]](), list[dict[str, Any]](), set[str]()
    with StopSignals(), without_readers(), terminal.only_data_on_stdout(as_json):
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
            terminal.screen().print(f"--- {title}", markup=False)
            del result["would_run"]
            try:  # planned again: days may have passed, in which files changed and other points copied to the remote
                PipelineRunner(point, runs, build_steps(point)).run(Watch())
            except TransientError:
                raise
            except UserError as error:
                result |= {"error": str(error)}
                terminal.warn(f"{result['run']} failed: {error}")
            results.append(result | _losses_and_scores(runs / result["run"]))
            write_json(folder / SWEEP, results)
    rows = []
    for result in results:
        row = {"run": result["run"], **result["settings"]}
        row |= {name: f"{loss:.4f}" for name, loss in result["losses"].items()}
        for task, score in result["scores"].items():
            spread = "" if score["stderr"] is None else f" ± {100 * score['stderr']:.1f}"
            row[f"{task} {score['metric']}"] = f"{100 * score['value']:.1f}{spread}"
        rows.append(row)
    emit(results, as_json, [table(rows), f"\nresults  {folder / SWEEP}"])
    if any("error" in result for result in results):
        raise typer.Exit(EXIT_USER_ERROR)


def _losses_and_scores(run: Path) -> dict[str, Any]:
    """The losses of a run's last training, and the headline scores of the last model that was evaluated."""
    from affinage.report.facts import MODELS, read_evaluation
    from affinage.results import MANIFEST, TrainingResult, read_result

    losses: dict[str, float | None] = {}
    scores = {}
    for training, model in MODELS.items():
        if (result := read_result(run / training, TrainingResult)) is not None:
            losses = {} if result.validation else {f"{training} loss": result.final_loss}
            for name, validated in result.validation.items():
                losses[f"{training} loss, {name}"] = validated.loss
                # Losses per token of different tokenizers cannot be compared, bits per byte can.
                losses[f"{training} bits per byte, {name}"] = validated.bits_per_byte
        evaluated = run / f"evaluate-{model}"
        if (evaluated / MANIFEST).is_file():
            names = ("metric", "value", "stderr", "chance", "chat_template")
            headlines = read_evaluation(model, evaluated).headlines
            scores = {score.task: {name: getattr(score, name) for name in names} for score in headlines}
    return {"losses": {name: loss for name, loss in losses.items() if loss is not None}, "scores": scores}
