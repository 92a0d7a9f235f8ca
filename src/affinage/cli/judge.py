"""The verb `eval`: models on benchmarks."""

import contextlib
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from affinage.cli.opening import ContextOption, MeshOption, Opening, opened
from affinage.cli.options import (
    RUNS,
    ForceOption,
    JsonOption,
    RunsOption,
    SetOption,
    TargetArgument,
    Walking,
    is_recipe,
    made_with,
)
from affinage.cli.run import walk
from affinage.cli.terminal import counted, screen
from affinage.cli.working import Working
from affinage.errors import UserError

_NUMBERS = 12  # of items, that are listed on the terminal
STAGES = ("evaluate-base", "evaluate-sft", "evaluate-dpo")
# Of `evaluate` in a recipe.
_USES: dict[str, str | bool] = {"auto": "auto", "true": True, "false": False}
_SETTINGS = (
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
    target: TargetArgument,
    overrides: SetOption = None,
    runs: RunsOption = RUNS,
    force: ForceOption = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks",
            "--task",
            metavar="TASK",
            help="julian, french, quickstart, a name of lm-evaluation-harness, a task file; several with commas. "
            "A recipe and a run have their own.",
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option("--data-dir", metavar="DIR", help="Items as NAME.jsonl or .jsonl.gz; default: from the hub."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Items per task; default all.")] = None,
    shots: Annotated[
        int | None, typer.Option(min=0, help="Examples before each question; default: as many as the task says.")
    ] = None,
    chat_template: Annotated[
        Literal["auto", "true", "false"] | None,
        typer.Option(help="Ask in the model's chat template: what is made for chat (auto), everything, or nothing."),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Whole rows at once; default: what fits, to 64.")] = None,
    contamination: Annotated[
        bool | None,
        typer.Option(help="Look for the items in the text it was trained on, where that is here; default yes."),
    ] = None,
    mesh: MeshOption = None,
    context: ContextOption = None,
    as_json: JsonOption = False,
) -> None:
    """Judge models on benchmarks: those of a recipe, as stages of its run, or any model on any task.

    Examples: affinage eval quickstart

    affinage eval quickstart/pretrain --tasks julian --data-dir my_benchmarks --limit 100
    """
    chosen = [name for names in tasks or () for name in names.split(",") if name]
    asked: dict[str, Any] = {"tasks": chosen or None, "data_dir": data_dir and str(data_dir)}
    asked |= {"limit": limit, "num_fewshot": shots, "apply_chat_template": chat_template and _USES[chat_template]}
    asked |= {"batch_size": batch, "contamination": contamination}
    given = {name: value for name, value in asked.items() if value is not None}
    if is_recipe(target, runs):
        if context is not None:
            raise UserError("--context is of models", where=target, fix="A recipe's is `packing.seq_len`.")
        settings = [f"evaluate.{name}={json.dumps(value)}" for name, value in given.items()]
        settings += [f"mesh={json.dumps(mesh)}"] if mesh else []
        folder = walk(target, Walking([*(overrides or ()), *settings], runs, force, as_json=as_json), STAGES)
        from affinage.hardware.hosts import place

        here = place()
        silent = as_json or (here is not None and here.host > 0)  # of many hosts the first one says it
        for stage in () if silent else STAGES:
            if (folder / stage / "results.json").is_file():
                typer.echo(f"\n{stage.removeprefix('evaluate-')}")
                _show(json.loads((folder / stage / "results.json").read_text(encoding="utf-8")))
        return
    if not chosen:
        as_made = made_with(target, runs).get("evaluate") or {}
        given = {name: as_made[name] for name in _SETTINGS if as_made.get(name) is not None} | given
        chosen = given.get("tasks", [])
    if not chosen:
        raise UserError("no task was named", fix="For example: --tasks julian, or --task my_task.yaml")
    if overrides or force:
        raise UserError("--set and --force are of recipes", where=target, fix="Leave them out for a model.")
    from affinage.config.runtime import RuntimeSettings
    from affinage.evaluation.tasks import check_names
    from affinage.hardware.joining import joined
    from affinage.hardware.standstill import Standstill
    from affinage.stopping import OwnProcess

    worlds = _world_of(target, runs)
    check_names(chosen, worlds, given.get("data_dir"), where="--tasks")
    folder = folder_of(target, runs)
    with joined() as hosts, contextlib.ExitStack() as watched, hosts.all_at_work():
        if hosts.count > 1:
            watched.enter_context(OwnProcess())  # one that waits for a host that stands still is left
        watched.enter_context(Standstill(target, folder, RuntimeSettings()))
        results = _evaluate_model(target, Opening(mesh, context, runs), chosen, given, worlds)
        hosts.meet("the end of the evaluation")
    if not hosts.first:
        return
    if as_json:
        print(json.dumps(results, ensure_ascii=False, indent=1))
    else:
        _show(results)


def _world_of(target: str, runs: Path) -> dict[str, Path]:
    """The benchmarks of the pocket world that a model was trained on, by its name; {} of a model of no such world."""
    from affinage.config.data import POCKET_WORLD
    from affinage.pipeline.models import locate_model, made_from

    world = made_from(locate_model(target, runs)[0], "world")
    return {POCKET_WORLD: world / "tasks"} if world else {}


def _evaluate_model(
    target: str, opening: Opening, tasks: list[str], settings: dict[str, Any], worlds: dict[str, Path]
) -> dict[str, Any]:
    from affinage.evaluation.run import evaluate
    from affinage.hardware.hosts import Hosts
    from affinage.pipeline.judged import state_of, training_of
    from affinage.pipeline.models import is_chat, locate_model
    from affinage.pipeline.seen import seen_by

    training, _ = locate_model(target, opening.runs)
    folder = folder_of(target, opening.runs)
    state = state_of(target, opening.runs)
    model = opened(target, opening, sets_aside=True)
    lines: list[str] = []
    with Working(target) as working:
        results = evaluate(
            model,
            tasks,
            folder=folder if Hosts.current.first else None,
            state=state,
            training=training_of(target, opening.runs),
            keep=folder / "answers.jsonl",
            task_folders=worlds,
            chat=is_chat(training),
            seen=seen_by(training) if settings.get("contamination", True) else None,
            progress=working.progressed,
            say=lines.append,
            **{name: value for name, value in settings.items() if name not in ("tasks", "contamination")},
        )
    for said in lines:
        typer.echo(said, err=True)
    return results


def folder_of(target: str, runs: Path) -> Path:
    """Where the results of a model are kept that no recipe judges: a folder for each path and step.

    It is called as the run or, of any other model, as its folder, with a hash of the path.
    """
    from affinage.pipeline.models import meant

    name, at, step = target.partition("@")
    place, root = Path(os.path.abspath(meant(name, runs) or name)), Path(os.path.abspath(runs))
    inside = place.is_relative_to(root)
    path = place.relative_to(root) if inside else place
    told = re.sub(r"[^A-Za-z0-9._-]+", "-", str(path) if inside else path.name)
    if told != str(path):
        told = f"{told}-{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    return runs / "evaluations" / f"{told}{at}{step}"


def _show(results: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("task", "metric"):
        table.add_column(title)
    for title in ("value", "±", "chance", "items"):
        table.add_column(title, justify="right")
    for task, entry in results["tasks"].items():
        for metric, score in entry["metrics"].items():
            value, error = (_shown(score[part]) for part in ("value", "stderr"))
            chance = _shown(entry.get("chance") if metric.startswith("acc") else None)
            table.add_row(task, metric, value, error, chance, f"{entry['items']:,}")
    console = screen()
    console.print(table, highlight=False, markup=False)
    templated = [task for task, entry in results["tasks"].items() if entry.get("chat_template")]
    if templated:
        console.print(f"Asked in the chat template: {', '.join(templated)}", highlight=False, markup=False)
    longer = {task: entry for task, entry in results["tasks"].items() if entry.get("longer")}
    if longer:
        counts = (
            f"{entry['longer']:,} of {task}'s {counted(entry['items'], 'item')}" for task, entry in longer.items()
        )
        what = f"Longer than the context of {results['context']:,} tokens, and cut or scored in pieces"
        said = f"{what}: {', '.join(counts)}"
        console.print(said, highlight=False, markup=False)
    _show_contamination(results, console)
    _show_published(results["tasks"], console)
    if results.get("missing"):
        console.print(f"Not there, so left out: {', '.join(results['missing'])}", highlight=False, markup=False)
    if results.get("skipped"):
        said = f"For chat models alone, so left out: {', '.join(results['skipped'])}"
        console.print(said, highlight=False, markup=False)


def _show_contamination(results: dict[str, Any], console: Any) -> None:
    """The items that stand in the training text, and the scores without them."""
    told = results.get("contamination")
    if not told:
        return
    found = {task: entry for task, entry in told["tasks"].items() if entry["found"] or entry.get("common")}
    console.print(
        f"\n{counted(told['texts'], 'text')} that it was trained on {'was' if told['texts'] == 1 else 'were'} "
        "looked through for the items.",
        highlight=False,
    )
    for task, entry in found.items():
        common = entry.get("common", [])  # results of older versions have none
        lists = [_listed(entry["found"])] if entry["found"] else []
        if common:
            lists.append(f"in more than {told['boilerplate']:,} texts each: {_listed(common)}")
        count = len(entry["found"]) + len(common)
        said = f"{task}: {count:,} of {entry['items']:,} stand there: {'; '.join(lists)}"
        console.print(said, highlight=False, markup=False)
        for metric, without in entry["without"].items():
            value = results["tasks"][task]["metrics"][metric]["value"]
            left = (
                f"{_shown(without['value'])} ± {_shown(without['stderr'])}" if without["value"] is not None else "none"
            )
            console.print(f"  {metric} {_shown(value)}; without them {left}", highlight=False, markup=False)
    if not found:
        console.print("None stands there.", highlight=False)
    short = [_short_of(task, entry) for task, entry in told["tasks"].items() if entry.get("too_short")]
    if short:
        said = f"Too short to be looked for, asked or not: {', '.join(short)}"
        console.print(said, highlight=False, markup=False)


def _short_of(task: str, entry: dict[str, Any]) -> str:
    whole = entry.get("too_short_of")  # results of older versions do not say
    return f"{entry['too_short']:,} of {task}" + (f"'s {counted(whole, 'item')}" if whole else "")


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:_NUMBERS])) + (" ..." if len(numbers) > _NUMBERS else "")


def _show_published(tasks: dict[str, Any], console: Any) -> None:
    """Beside ours, what others state of their models on the same benchmarks."""
    from rich.table import Table

    from affinage.evaluation.published import headline_metrics, of_other_items, published

    known = [task for task in tasks if task in headline_metrics()]
    if not known:
        return
    table = Table(box=None, pad_edge=False, title="in percent; published, not measured here", title_justify="left")
    for title in ("", "tokens", *known):
        table.add_column(title, justify="right" if title else "left")
    ours = (tasks[task]["metrics"].get(headline_metrics()[task], {}).get("value") for task in known)
    table.add_row("this model", "", *("–" if value is None else f"{100 * value:.1f}" for value in ours))
    for model in published():
        scores = (f"{100 * model.scores[task]:.1f}" if task in model.scores else "–" for task in known)
        table.add_row(f"{model.name} (published)", model.tokens_as_stated, *scores)
    console.print("")
    console.print(table, highlight=False, markup=False)
    others = of_other_items({task: tasks[task]["items"] for task in known})
    if others:
        told = (f"{task} {counted(count, 'item')} (published {whole:,})" for task, (count, whole) in others.items())
        said = f"Not on the same items as the published scores: {', '.join(told)}"
        console.print(said, highlight=False, markup=False)
    for source in dict.fromkeys(model.source for model in published()):
        console.print(f"Published: {source}", highlight=False, markup=False)


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if abs(value) < 1e5 else f"{value:.3g}"
