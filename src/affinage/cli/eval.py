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
from affinage.cluster.processes import init_distributed, is_first, placement
from affinage.errors import EXIT_USER_ERROR, TransientError, UserError
from affinage.json_files import write_json
from affinage.stopping import StopSignals, without_readers

if TYPE_CHECKING:
    from affinage.pipeline.models import Target
    from affinage.report.page import Entrant

_TASKS = "julian, french, a name of lm-evaluation-harness, a task file; several with commas. Default: the recipe's."


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
    apply_chat_template: Annotated[Literal["auto", "true", "false"] | None, opt("Use the chat template.")] = None,
    batch_size: Annotated[int | None, opt("Whole sequences at once; default: by its context.", min=1)] = None,
    contamination: Annotated[bool | None, opt("Search its training text for the items; default yes.")] = None,
    mesh: terminal.MeshOption = None,
    max_model_len: terminal.MaxLenOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """Score models on benchmarks: a run on those of its recipe, or any model on any task.

    A run that is evaluated already is not evaluated again; --set and --force change that, as for `affinage run`. With
    an option of its own, such as --tasks or --limit, or for another model than a run, it leaves the run as it is.

    Example: affinage eval quickstart/pretrain --tasks julian --data-dir my_benchmarks --limit 100
    """
    settings: dict[str, Any] = {"data_dir": data_dir, "limit": limit, "num_fewshot": num_fewshot}
    settings |= {"batch_size": batch_size, "contamination": contamination}
    settings["tasks"] = [name for names in tasks or () for name in names.split(",") if name] or None
    settings["apply_chat_template"] = {"true": True, "false": False}.get(str(apply_chat_template), apply_chat_template)
    target = find(model, runs)
    whole = target.kind in ("recipe", "run") and target.step is None
    if whole and all(value is None for value in (mesh, max_model_len, *settings.values())):
        options = terminal.PipelineOptions(overrides, runs, force, as_json=as_json)
        results = _evaluate_run(target, options)
        view = [part for step, each in results["evaluations"].items() for part in ("\n" + step, *_view(each))]
    elif overrides or force:
        fix = "Use the options of `eval`, such as --tasks and --limit, or name the run alone."
        raise UserError("--set and --force are for a whole run and its recipe's benchmarks", where=model, fix=fix)
    else:
        results = _evaluate_model(target, runs, mesh, max_model_len, settings)
        view = [*_view(results)]
    if is_first():
        emit(results, as_json, [*view, f"\nresults  {results['folder']}"])


def _evaluate_run(target: "Target", options: terminal.PipelineOptions) -> dict[str, Any]:
    """The results of a run's own evaluation, after running those of its steps that are missing."""
    from affinage.pipeline.models import EVALUATIONS, is_evaluated, run_of
    from affinage.results import read_json

    run, steps = run_of(target, options.runs), [*EVALUATIONS.values()]
    if options.overrides or options.force or not is_evaluated(run):
        instead = "Name benchmarks: --tasks julian, or --task my_task.yaml"
        run = run_own_steps(target, options, "evaluate", steps, instead)
    results = {step: result for step in steps if (result := read_json(run / step / "results.json"))}
    return {"run": run.name, "folder": str(run), "evaluations": results}


def _evaluate_model(
    target: "Target", runs: Path, mesh: Any, max_model_len: int | None, settings: dict[str, Any]
) -> dict[str, Any]:
    """The results of one model, evaluated apart from its recipe, which decides the settings that are None."""
    target, _ = model_of(target, runs)  # before JAX is imported
    from affinage.config.recipe import EvaluateSettings
    from affinage.evaluation.run import evaluate
    from affinage.evaluation.tasks import check_names
    from affinage.pipeline import models, steps_eval

    if target.run is not None and settings["tasks"] is None:
        of_recipe = models.recorded(target.run).get("evaluate") or {}
        unset = (key for key in EvaluateSettings.model_fields if settings.get(key, "") is None)
        settings |= {key: of_recipe.get(key) for key in unset}  # a run of another version may have more
    settings = {key: value for key, value in settings.items() if value is not None}
    tasks, searches = settings.pop("tasks", []), settings.pop("contamination", True)
    if not tasks:
        fix = "For example: --tasks julian, or --task my_task.yaml"
        raise UserError("no task was named", where=target.name, fix=fix)
    world, folder = models.made_from(target.path, "synthesize"), models.results_folder(target, runs)
    check_names(tasks, settings.get("data_dir"), world, where="--tasks")
    with contextlib.ExitStack() as entered:
        if placement() is not None:
            entered.enter_context(StopSignals())  # one that waits for others is left at once
        processes = entered.enter_context(init_distributed())
        entered.enter_context(processes.all_at_work())
        model, state = terminal.opened(target, runs, mesh, max_model_len, reserves=True)
        with terminal.working(target.name) as progress:
            results = evaluate(
                model,
                tasks,
                folder=folder if processes.first else None,
                keep=folder / "answers.db",
                world=world,
                seen=steps_eval.contamination_search(target.path) if searches else None,
                progress=progress,
                **settings,
            )
        processes.barrier("the end of the evaluation")
    return {**results, **state, "folder": str(folder)}


def _score(value: float | None) -> str | None:
    return None if value is None else f"{value:,.4f}"


def _view(results: dict[str, Any]) -> Iterator[Any]:
    rows = [
        {"task": task, "metric": metric, "value": _score(score["value"]), "±": _score(score["stderr"])}
        | {"chance": _score(entry.get("chance")) if metric.startswith("acc") else None, "items": entry["items"]}
        | {"chat": entry.get("chat_template") or None, "cut": entry.get("truncated") or None}
        for task, entry in results["tasks"].items()
        for metric, score in entry["metrics"].items()
    ]
    yield table(rows) if rows else "No task was scored. Choose some: --tasks julian, or --task my_task.yaml"
    left_out = {"not available": results.get("unavailable"), "for chat models only": results.get("skipped")}
    yield from described({"core": results.get("core"), **{f"left out, {why}": left_out[why] for why in left_out}})
    if facts := results.get("contamination"):
        yield f"\n{counted(facts['texts'], 'training text')} searched for the items."
        rows = [
            {"task": task, "items": entry["items"], "found": len(entry["found"] + entry["common"])}
            | {"metric": metric, "without them": rest["value"], "±": rest["stderr"]}
            for task, entry in facts["tasks"].items()
            for metric, rest in entry["without"].items()
        ]
        yield table(rows)


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

    Example: affinage compare quickstart/evaluate-base quickstart/evaluate-sft --html compared.html
    """
    if len(names) < 2:
        raise UserError("one alone cannot be compared", where=names[0], fix="Name two or more.")
    from affinage.config.yaml import brief
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
    shown = [row | {"summary": None, "scores": None} for row in facts["runs"]]
    settings = [{"setting": row["key"], **dict(zip(names, map(brief, row["values"])))} for row in facts["settings"]]
    hint = "With 95 % intervals, about 1 in 20 null differences looks significant."
    notes = facts["notes"] + ([hint] if len(facts["differences"]) > 5 else [])
    emit(facts, as_json, described(facts | {"runs": shown, "settings": settings, "notes": notes}))


def _entrant(target: "Target", runs: Path) -> "Entrant":
    """What is known of a target. Raises UserError if it is neither a complete run nor a model with results."""
    from affinage.pipeline import models
    from affinage.report import facts, page

    name, run, parts = target.name, target.run, None
    if target.kind in ("recipe", "run") and target.step is None:
        run = models.run_of(target, runs)
        results = models.eval_results(replace(target, kind="run", path=run), runs)
    else:
        results = models.eval_results(target, runs)
        if run is not None and target.kind != "result":
            parts = models.results_of(models.locate(target, runs).path, run)
        run = run if parts else None
    if run is None and results is None:
        models.locate(target, runs)  # refuses what is no model, and so has no scores
        fix = f"Make them: {models.command('eval', name, '--tasks', 'TASKS', runs=runs)}, with the tasks of the others."
        raise UserError(f"there are no results of `{name}` as it is now", fix=fix)
    known = facts.collect_facts(Path(name) if run is None else run, {} if run is None else parts)
    if parts and target.step is not None:
        known = facts.at_checkpoint(known, models.state_of(target, runs)["step"])
    return page.Entrant(name, known, results, last=parts is not None)


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
    from affinage.config.yaml import brief
    from affinage.pipeline.build import build_steps
    from affinage.pipeline.models import RECIPE
    from affinage.pipeline.runner import PipelineRunner, points
    from affinage.report.facts import losses_and_scores
    from affinage.report.page import losses_notes

    file = runs / base.recipe.name / "sweep.json"
    grid = points(recipe if run is None else str(run / RECIPE), overrides or ())
    results, keys = list[dict[str, Any]](), set[str]()
    with StopSignals(), without_readers(), terminal.only_data_on_stdout(as_json):
        # All of them first: a mistake in the last is not found after days of the others.
        for settings, point in grid:
            try:
                runner = PipelineRunner(point, runs, build_steps(point))
                runner.check(plan := runner.plan())
            except UserError as error:
                error.where = f"{point.recipe.name}: {error.where}"
                raise
            missing = {step.request.key: step.name for step in plan if not step.complete}
            would_run = [step for key, step in missing.items() if key not in keys]  # and not for a point before it
            results.append({"run": point.recipe.name, "settings": settings, "would_run": would_run})
            keys |= missing.keys()
        for number, (result, (_, point)) in enumerate(zip(results, grid if not dry_run else ())):
            del result["would_run"]
            changes = ", ".join(f"{key}={brief(value)}" for key, value in result["settings"].items())
            terminal.write(f"--- {number + 1} of {len(grid)}, {result['run']}: {changes}")
            try:  # planned again: days may have passed, in which files changed and other points copied to the remote
                PipelineRunner(point, runs, build_steps(point)).run(Watch())
            except TransientError:
                raise
            except UserError as error:
                result["error"] = str(error)
                terminal.warn(f"{result['run']} failed: {error}")
            result |= losses_and_scores(runs / result["run"])
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, results[: number + 1])
    if dry_run:
        emit(results, as_json)
        return
    rows = [{"run": result["run"], **result["settings"], **result["losses"]} for result in results]
    for row, result in zip(rows, results):
        for task, score in result["scores"].items():
            spread = f" ± {100 * score['stderr']:.1f}" if score["stderr"] else ""
            row[f"{task} {score['metric']}, %"] = f"{100 * score['value']:.1f}{spread}"
    emit(results, as_json, [table(rows), f"\nresults  {file}"])
    for note in losses_notes([runs / result["run"] for result in results]):
        terminal.warn(note)
    if any("error" in result for result in results):
        raise typer.Exit(EXIT_USER_ERROR)
