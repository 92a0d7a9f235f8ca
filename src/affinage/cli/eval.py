"""The verb `eval`: models on benchmarks."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from affinage.cli import options
from affinage.cli.options import app, find, model_of, opened, opt
from affinage.cli.output import Table, counted, emit, listed, table, working
from affinage.cli.run import run_own_steps
from affinage.errors import UserError

_NUMBERS = 12  # of items, that are listed on the terminal
_TASKS = (
    "julian, french, quickstart, a name of lm-evaluation-harness, a task file; several with commas. Default: those of "
    "the run's recipe."
)
_TEMPLATE = "Ask in the model's chat template: tasks made for chat (auto), all (true), or none."
_CONTAMINATION = "Search the text that it was trained on for the items, where it is here; default yes."


@app.command("eval")
def evaluate(
    model: options.ModelArgument,
    overrides: options.SetOption = None,
    runs: options.RunsOption = options.RUNS,
    force: options.ForceOption = None,
    tasks: Annotated[list[str] | None, opt(_TASKS, "--tasks", "--task", metavar="TASK")] = None,
    data_dir: Annotated[str | None, opt("Items as NAME.jsonl(.gz); default: from the hub.", metavar="DIR")] = None,
    limit: Annotated[int | None, opt("Items per task; default all.", min=1)] = None,
    num_fewshot: Annotated[int | None, opt("Examples before a question; default: as the task defines.", min=0)] = None,
    apply_chat_template: Annotated[Literal["auto", "true", "false"] | None, opt(_TEMPLATE)] = None,
    batch_size: Annotated[int | None, opt("Whole sequences at once; default: by its context.", min=1)] = None,
    contamination: Annotated[bool | None, opt(_CONTAMINATION)] = None,
    mesh: options.MeshOption = None,
    max_model_len: options.MaxLenOption = None,
    as_json: options.JsonOption = False,
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
        "apply_chat_template": {"true": True, "false": False}.get(apply_chat_template or "", apply_chat_template),
        "batch_size": batch_size,
        "contamination": contamination,
    }
    target = find(model, runs)
    whole = target.kind in ("recipe", "run") and target.step is None
    if whole and all(value is None for value in (mesh, max_model_len, *settings.values())):
        results = _evaluate_run(model, options.PipelineOptions(overrides, runs, force, as_json=as_json))
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


def _evaluate_run(name: str, settings: options.PipelineOptions) -> dict[str, Any]:
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
        model, state = opened(name, runs, mesh, max_model_len, reserves=True, announce=False)
        with working(name) as progress:
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


def _view(results: dict[str, Any]) -> "Iterator[str | Table]":
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
    if rows:
        yield table(rows)
    else:
        yield "No task was scored."
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
        for task, entry in facts["tasks"].items():
            if numbers := [*entry["found"], *entry["common"]]:
                found = listed([*map(str, numbers)], _NUMBERS)
                yield f"{task}: {len(numbers):,} of {entry['items']:,} found: {found}"
                for metric, rest in entry["without"].items():
                    value = _number(tasks[task]["metrics"][metric]["value"])
                    yield f"  {metric} {value}; without them {_number(rest['value'])} ± {_number(rest['stderr'])}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if abs(value) < 1e5 else f"{value:.3g}"
