"""The verb `eval`: models on benchmarks."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from affinage.cli.opening import MaxLenOption, MeshOption, OpenOptions, model_of, opened
from affinage.cli.options import (
    RUNS,
    ForceOption,
    JsonOption,
    ModelArgument,
    PipelineOptions,
    RunsOption,
    SetOption,
    find,
    opt,
)
from affinage.cli.output import Table, counted, emit, listed
from affinage.cli.run import run_pipeline
from affinage.cli.working import Working
from affinage.errors import UserError

_NUMBERS = 12  # of items, that are listed on the terminal
_SETTINGS = (  # of `evaluate` in a recipe
    "tasks",
    "data_dir",
    "limit",
    "num_fewshot",
    "apply_chat_template",
    "batch_size",
    "max_new_tokens",
    "contamination",
)


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("eval")(evaluate)


def evaluate(
    model: ModelArgument,
    overrides: SetOption = None,
    runs: RunsOption = RUNS,
    force: ForceOption = None,
    tasks: Annotated[
        list[str] | None,
        opt(
            "julian, french, quickstart, a name of lm-evaluation-harness, a task file; several with commas. "
            "Default: those of the run's recipe.",
            "--tasks",
            "--task",
            metavar="TASK",
        ),
    ] = None,
    data_dir: Annotated[
        Path | None, opt("Items as NAME.jsonl or .jsonl.gz; default: from the hub.", metavar="DIR")
    ] = None,
    limit: Annotated[int | None, opt("Items per task; default all.", min=1)] = None,
    num_fewshot: Annotated[
        int | None, opt("Examples before each question; default: as many as the task defines.", min=0)
    ] = None,
    apply_chat_template: Annotated[
        Literal["auto", "true", "false"] | None,
        opt("Ask in the model's chat template: tasks made for chat (auto), all (true), or none."),
    ] = None,
    batch_size: Annotated[int | None, opt("Whole sequences at once; default: what fits, to 64.", min=1)] = None,
    contamination: Annotated[
        bool | None, opt("Look for the items in the text it was trained on, where that is here; default yes.")
    ] = None,
    mesh: MeshOption = None,
    max_model_len: MaxLenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score models on benchmarks: those of a run on its recipe's, or any model on any task.

    A run that is evaluated already is not evaluated again; --set and --force change that, as for `affinage run`. With
    an option of its own, such as --tasks or --limit, or for another model than a run, it leaves the run as it is.

    Examples: affinage eval quickstart

    affinage eval quickstart/pretrain --tasks julian --data-dir my_benchmarks --limit 100
    """
    chosen = [name for names in tasks or () for name in names.split(",") if name]
    options: dict[str, Any] = {"tasks": chosen or None, "data_dir": data_dir and str(data_dir), "limit": limit}
    options |= {"num_fewshot": num_fewshot, "batch_size": batch_size, "contamination": contamination}
    if apply_chat_template is not None:
        options["apply_chat_template"] = {"true": True, "false": False}.get(apply_chat_template, "auto")
    options = {name: value for name, value in options.items() if value is not None}
    target = find(model, runs)
    own = not options and mesh is None and max_model_len is None
    if own and target.kind in ("recipe", "run") and target.step is None:
        _evaluate_run(model, PipelineOptions(overrides, runs, force, as_json=as_json), as_json)
        return
    if overrides or force:
        fix = "Use the options of `eval`, such as --tasks and --limit, or name the run alone."
        raise UserError("--set and --force are of a whole run and its recipe's benchmarks", where=model, fix=fix)
    results = _evaluate_model(model, OpenOptions(mesh, max_model_len, runs), options)
    if results:
        emit(results, as_json, _view(results))


def _evaluate_run(name: str, how: PipelineOptions, as_json: bool) -> None:
    """Print the results of a run's own evaluation, after running those of its steps that are missing."""
    from affinage.cluster.processes import is_first
    from affinage.pipeline.eval_results import is_evaluated
    from affinage.pipeline.models import EVALUATIONS, check_complete, recorded, resolve, run_of

    run = run_of(resolve(name, how.runs), how.runs)
    if how.overrides or how.force or not is_evaluated(run):
        if not how.overrides:
            check_complete(resolve(name, how.runs), how.runs)
            if recorded(run).get("evaluate") is None:
                fix = "Name benchmarks: --tasks julian, or --task my_task.yaml"
                raise UserError("the recipe of this run evaluates nothing", where=name, fix=fix)
        steps = [*EVALUATIONS.values()]
        run = run_pipeline(name, how, steps, any_of=True, only=steps, quiet=True)
    found = {step: run / step / "results.json" for step in EVALUATIONS.values()}
    results = {step: json.loads(file.read_text(encoding="utf-8")) for step, file in found.items() if file.is_file()}
    if is_first():
        emit({"run": run.name, "evaluations": results}, as_json, _views(results))


def _views(results: Mapping[str, Any]) -> "Iterator[str | Table]":
    for step, of_model in results.items():
        yield f"\n{step}"
        yield from _view(of_model)


def _evaluate_model(name: str, opening: OpenOptions, options: dict[str, Any]) -> dict[str, Any]:
    """Evaluate one model apart from its recipe; {} in the processes after the first one."""
    target, _ = model_of(name, opening.runs)  # before JAX is imported
    from affinage.cluster.processes import init_distributed, placement
    from affinage.config.data import POCKET_WORLD
    from affinage.evaluation.run import evaluate
    from affinage.evaluation.tasks import check_names
    from affinage.pipeline.contamination import contamination_search
    from affinage.pipeline.eval_results import model_fingerprint, results_folder, training_of
    from affinage.pipeline.models import made_from, recorded
    from affinage.stopping import StopSignals

    runs = opening.runs
    run = target.run
    as_made = recorded(run).get("evaluate") or {} if run is not None and "tasks" not in options else {}
    settings = {key: as_made[key] for key in _SETTINGS if as_made.get(key) is not None} | options
    tasks = settings.pop("tasks", [])
    if not tasks:
        raise UserError("no task was named", where=name, fix="For example: --tasks julian, or --task my_task.yaml")
    world = made_from(target.path, "synthesize")
    worlds = {POCKET_WORLD: world / "tasks"} if world else {}
    check_names(tasks, worlds, settings.get("data_dir"), where="--tasks")
    folder, lines = results_folder(name, runs), list[str]()
    with contextlib.ExitStack() as entered:
        if placement() is not None:
            entered.enter_context(StopSignals())  # one that waits for others is left at once
        processes = entered.enter_context(init_distributed())
        entered.enter_context(processes.all_at_work())
        found = opened(name, opening, reserves=True, announce=False)
        contamination = settings.pop("contamination", True)
        with Working(name) as working:
            results = evaluate(
                found.model,
                tasks,
                folder=folder if processes.first else None,
                state=model_fingerprint(target, runs),
                training=training_of(target),
                keep=folder / "answers.db",
                task_folders=worlds,
                chat=found.is_chat,
                seen=contamination_search(target.path) if contamination else None,
                progress=working.progressed,
                say=lines.append,
                **settings,
            )
        for line in lines:
            typer.echo(line, err=True)
        processes.barrier("the end of the evaluation")
    return {**results, **found.facts} if processes.first else {}


def _view(results: dict[str, Any]) -> "Iterator[str | Table]":
    tasks = results["tasks"]
    rows = [
        (
            task,
            metric,
            *(_number(score[part]) for part in ("value", "stderr")),
            _number(entry.get("chance") if metric.startswith("acc") else None),
            entry["items"],
        )
        for task, entry in tasks.items()
        for metric, score in entry["metrics"].items()
    ]
    yield Table(("task", "metric", "value", "±", "chance", "items"), rows, left=(0, 1))
    if templated := [task for task, entry in tasks.items() if entry.get("chat_template")]:
        yield f"Asked in the chat template: {', '.join(templated)}"
    cut = [
        f"{entry['longer']:,} of {task}'s {counted(entry['items'], 'item')}"
        for task, entry in tasks.items()
        if entry.get("longer")
    ]
    if cut:
        yield (
            f"Longer than the context of {results['context']:,} tokens, and cut or scored in pieces: {', '.join(cut)}"
        )
    yield from _contamination(results)
    yield from _published(tasks)
    if results.get("missing"):
        yield f"Not available, so left out: {', '.join(results['missing'])}"
    if results.get("skipped"):
        yield f"For chat models only, so left out: {', '.join(results['skipped'])}"


def _contamination(results: dict[str, Any]) -> Iterator[str]:
    """The items that were found in the training text, and the scores without them."""
    facts = results.get("contamination")
    if not facts:
        return
    yield f"\n{counted(facts['texts'], 'training text')} searched for the items."
    found = {task: entry for task, entry in facts["tasks"].items() if entry["found"] or entry.get("common")}
    for task, entry in found.items():
        common = entry.get("common", [])  # results of older versions have none
        lists = [_numbers(entry["found"])] if entry["found"] else []
        if common:
            lists.append(f"in more than {facts['boilerplate']:,} texts each: {_numbers(common)}")
        count = len(entry["found"]) + len(common)
        yield f"{task}: {count:,} of {entry['items']:,} found: {'; '.join(lists)}"
        for metric, without in entry["without"].items():
            value = results["tasks"][task]["metrics"][metric]["value"]
            rest = (
                f"{_number(without['value'])} ± {_number(without['stderr'])}"
                if without["value"] is not None
                else "none"
            )
            yield f"  {metric} {_number(value)}; without them {rest}"
    if not found:
        yield "None was found."
    short = [_short(task, entry) for task, entry in facts["tasks"].items() if entry.get("too_short")]
    if short:
        yield f"Too short to be searched for: {', '.join(short)}"


def _short(task: str, entry: dict[str, Any]) -> str:
    whole = entry.get("too_short_of")  # results of older versions do not have it
    return f"{entry['too_short']:,} of {task}" + (f"'s {counted(whole, 'item')}" if whole else "")


def _numbers(numbers: Sequence[int]) -> str:
    return listed([*map(str, numbers)], _NUMBERS)


def _published(tasks: dict[str, Any]) -> "Iterator[str | Table]":
    """What others published of their models on the same benchmarks, beside ours."""
    from affinage.evaluation.published import headline_metrics, of_other_items, published

    known = [task for task in tasks if task in headline_metrics()]
    if not known:
        return
    ours = (tasks[task]["metrics"].get(headline_metrics()[task], {}).get("value") for task in known)
    rows = [["this model", "", *(None if value is None else f"{100 * value:.1f}" for value in ours)]]
    for model in published():
        scores = (f"{100 * model.scores[task]:.1f}" if task in model.scores else None for task in known)
        rows.append([f"{model.name} (published)", model.tokens_as_stated, *scores])
    yield ""
    yield Table(("", "tokens", *known), rows, title="in percent; published, not measured here")
    others = of_other_items({task: tasks[task]["items"] for task in known})
    if others:
        counts = (f"{task} {counted(count, 'item')} (published {whole:,})" for task, (count, whole) in others.items())
        yield f"Not on the same items as the published scores: {', '.join(counts)}"
    for source in dict.fromkeys(model.source for model in published()):
        yield f"Published: {source}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if abs(value) < 1e5 else f"{value:.3g}"
