"""Verbs that run the steps of a recipe, `run` and those that stop at one of them; and the report of what they made."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from affinage.cli import options
from affinage.cli.options import PipelineOptions, RecipeArgument, app, arg, find, load, opt, warn
from affinage.cli.output import emit, only_data_on_stdout, screen, working
from affinage.errors import UserError


@app.command()
def run(
    recipe: RecipeArgument,
    until: options.UntilOption = None,
    overrides: options.SetOption = None,
    runs: options.RunsOption = options.RUNS,
    force: options.ForceOption = None,
    dry_run: options.DryRunOption = False,
    as_json: options.JsonOption = False,
) -> None:
    """Run a recipe, from raw text to the report. Steps that are complete are not run again.

    Example: affinage run quickstart --set pretrain.steps=200
    """
    run_pipeline(recipe, PipelineOptions(overrides, runs, force, dry_run, as_json), until or ())


def verb_until(steps: Sequence[str], data: str, name: str, help: str, group: typer.Typer = app) -> None:
    """Register a verb that runs a recipe up to those of `steps` that it has, or shows the rows of its step `data`."""

    @group.command(name, help=help)
    def verb(
        recipe: RecipeArgument,
        show: Annotated[int | None, opt("Only prepare the data, and show N examples.", min=1, metavar="N")] = None,
        overrides: options.SetOption = None,
        runs: options.RunsOption = options.RUNS,
        force: options.ForceOption = None,
        dry_run: options.DryRunOption = False,
        as_json: options.JsonOption = False,
    ) -> None:
        settings = PipelineOptions(overrides, runs, force, dry_run, as_json)
        folder = run_pipeline(recipe, settings, (data,) if show else steps, any_of=True)
        if show and not dry_run:
            with only_data_on_stdout(as_json):
                _show_examples(folder / data, show)


verb_until(
    ("pretrain",),
    "tokenize",
    "train",
    "Run up to the end of pretraining: `run --until pretrain`; or show what it would be trained on.\n\n"
    "Example: affinage train quickstart --set pretrain.steps=200",
)
verb_until(
    ("sft",),
    "sft-data",
    "sft",
    "Run up to the end of supervised fine-tuning: `run --until sft`; or show what it would be trained on.\n\n"
    "Example: affinage sft quickstart --show 3",
)
verb_until(
    ("dpo",),
    "preference-data",
    "dpo",
    "Run up to the end of direct preference optimization: `run --until dpo`; or show its pairs.\n\n"
    "Example: affinage dpo quickstart --set dpo.beta=0.3",
)


def _show_examples(rows: Path, count: int) -> None:
    from affinage.data.tokenizer import Tokenizer
    from affinage.data.tuning_data import show_examples
    from affinage.pipeline.models import made_from

    folder = made_from(rows.resolve(), "train-tokenizer")
    if folder is None:
        raise UserError("the tokenizer of this data is gone", where=str(rows), fix="Run the recipe again.")
    for name, example in show_examples(rows, Tokenizer(folder), count):
        screen().print(f"\n[bold]{name}[/bold]: what is trained on stands between ⟦ and ⟧")
        screen().print(example, markup=False, highlight=False)


@app.command()
def world(
    folder: Annotated[Path, arg("FOLDER", "Where to write; must not be there.")],
    megabytes: Annotated[float, opt("How much text, in 1e6 bytes.", min=0.01)] = 3.0,
    seed: Annotated[int, opt("Seed of the texts.", min=0)] = 0,
) -> None:
    """Write the pocket world into a folder: documents, conversations, preference pairs and benchmarks.

    Example: affinage world my_world --megabytes 10
    """
    from affinage.data.synthetic import write_world

    if folder.exists():
        raise UserError("this is there already", where=str(folder), fix="Name a folder that is not there yet.")
    folder.mkdir(parents=True)
    try:
        with working("the pocket world"):
            write_world(folder, megabytes=megabytes, seed=seed)
    except BaseException:  # also when it is interrupted
        shutil.rmtree(folder)
        raise
    print(f"The pocket world is in {folder}.")


@app.command()
def report(
    run: options.RunArgument,
    runs: options.RunsOption = options.RUNS,
    lang: options.LangOption = None,
    out: Annotated[
        Path | None, opt("Where to write; default: report.html in the run.", "--out", metavar="FILE")
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Write the report of a run, one HTML file. With --out, a run that is not complete has a report of what there is.

    Examples: affinage report quickstart

    affinage report quickstart --lang fr --out rapport.html
    """
    from affinage.pipeline.models import check_complete, run_of, untrained

    target = find(run, runs)
    folder = run_of(target, runs)
    if out is None:
        check_complete(target, runs, instead="For a report of what there is, name a file: --out report.html")
    elif missing := untrained(folder):
        warn(f"`{run}` is not complete; to train: {', '.join(missing)}")
    os.environ["JAX_PLATFORMS"] = "cpu"  # only shapes are computed: the accelerator is not taken
    from affinage.report import write_report

    file = out or folder / "report.html"
    facts = write_report(folder, file, lang)
    emit({"report": str(file), **facts}, as_json, [facts["summary"], f"The report is in {file}."])


def run_pipeline(
    name: str, settings: PipelineOptions, until: Sequence[str], *, any_of: bool = False, only: Sequence[str] = ()
) -> Path:
    """Run the steps of a recipe, or of a run's recipe, and show them as they run. Returns the run's folder.

    Args:
        name: a recipe file, a run, or a packaged recipe.
        settings: options of the command line.
        until: names of steps.
        any_of: leave out those of `until` that the recipe does not have, as long as it has one of them.
        only: the steps that may run, and print no result at the end, if any are named; if others are not complete, the
            command that runs them is the error's fix.
    """
    from affinage.stopping import StopSignals, without_readers

    with StopSignals(), without_readers():  # a signal that comes while the recipe is read has nothing to save
        loaded, run_folder = load(name, settings.overrides, settings.runs)
        runs = settings.runs if run_folder is None else run_folder.parent  # a run named by its path is run where it is
        from affinage.cli.watch import Watch, show_plan, show_result
        from affinage.cluster.processes import init_distributed
        from affinage.hardware.devices import prepare
        from affinage.pipeline.build import build_steps
        from affinage.pipeline.models import command
        from affinage.pipeline.runner import PipelineRunner

        steps, recipe = build_steps(loaded), loaded.recipe
        if not steps:
            what = "this recipe has no `data` section, so there is nothing to run"
            raise UserError(what, where=str(loaded.path), fix=f"`{command('graph', name)}` shows its model.")
        if any_of:
            until = [step for step in until if step in {each.name for each in steps}] or until
        runner = PipelineRunner(loaded, runs, steps, until=until, force=settings.force or ())
        prepare()
        if settings.dry_run:
            plan = runner.plan()
            runner.check(plan)
            show_plan(plan, settings.as_json)
            return runner.folder
        heartbeat = recipe.runtime.heartbeat_timeout
        with init_distributed(heartbeat) as processes, only_data_on_stdout(settings.as_json):
            if not processes.first:
                runner.follow()
                return runner.folder
            plan = runner.plan()
            waiting = [step.name for step in plan if not step.complete]
            if only and (before := [step for step in waiting if step not in only]):
                words = [word for setting in settings.overrides or () for word in ("--set", setting)]
                words += [word for step in until for word in ("--until", step)]
                fix = f"Run them: {command('run', name, *words, runs=runs)}"
                raise UserError(f"steps that come before are not complete: {', '.join(before)}", where=name, fix=fix)
            with processes.all_at_work():  # the mesh is of all their devices
                runner.check(plan)
            if recipe.pretrain is not None and recipe.pretrain_tokens is not None and "pretrain" in waiting:
                tokens = f"pretrain: {recipe.pretrain.steps:,} steps, {recipe.pretrain_tokens:,} tokens"
                screen().print(tokens, highlight=False)
            seconds = runner.run(Watch())
        if not only:
            show_result(runner, plan, seconds, settings.as_json)
        return runner.folder


def run_own_steps(name: str, settings: PipelineOptions, section: str, steps: Sequence[str], instead: str) -> Path:
    """Run those of a run's last steps that are missing, and nothing before them. Returns the run's folder.

    `steps` carry out a `section` of the recipe; `instead` is what to do where the recipe of the run does not have it.
    """
    from affinage.pipeline.models import check_complete, recorded, resolve, run_of

    target = resolve(name, settings.runs)
    if not settings.overrides:
        check_complete(target, settings.runs)
        if recorded(run_of(target, settings.runs)).get(section) is None:
            raise UserError(f"the recipe of this run has no `{section}`", where=name, fix=instead)
    return run_pipeline(name, settings, steps, any_of=True, only=steps)
