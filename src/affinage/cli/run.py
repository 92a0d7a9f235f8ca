"""Verbs that run the steps of a recipe: `run`, and those that stop at one of them."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from affinage.cli.options import PipelineOptions, RecipeArgument, UntilOption, load, opt, warn, with_options
from affinage.cli.output import only_data_on_stdout, screen
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.config.load import LoadedRecipe

DATA = ("tokenize", "compare-tokenizers", "sft-data", "preference-data")  # the last of the data steps
SampleOption = Annotated[float | None, opt("Use a share of each source only, e.g. 0.001.", "--sample", metavar="SHARE")]
ShowOption = Annotated[
    int | None, opt("Only prepare the data, and show N examples of it.", "--show", min=1, metavar="N")
]


def add_to(app: typer.Typer) -> None:
    """Register the verbs."""
    for verb in (run, train, sft, dpo, world):
        app.command(verb.__name__)(verb)


@with_options(how=PipelineOptions)
def run(recipe: RecipeArgument, until: UntilOption = None, *, how: PipelineOptions) -> None:
    """Run a recipe, from raw text to the report. What is complete is not run again.

    Example: affinage run quickstart --set pretrain.steps=200
    """
    run_pipeline(recipe, how, until or ())


@with_options(how=PipelineOptions)
def train(recipe: RecipeArgument, *, how: PipelineOptions) -> None:
    """Run up to the end of pretraining: `run --until pretrain`.

    Example: affinage train quickstart --set pretrain.steps=200
    """
    run_pipeline(recipe, how, ("pretrain",))


@with_options(how=PipelineOptions)
def sft(recipe: RecipeArgument, show: ShowOption = None, sample: SampleOption = None, *, how: PipelineOptions) -> None:
    """Run up to the end of supervised fine-tuning: `run --until sft`; or show what it would be trained on.

    Example: affinage sft quickstart --show 3
    """
    _tune(recipe, sampled(how, "sft", sample), "sft", "sft-data", show)


@with_options(how=PipelineOptions)
def dpo(recipe: RecipeArgument, show: ShowOption = None, *, how: PipelineOptions) -> None:
    """Run up to the end of direct preference optimization: `run --until dpo`; or show its pairs.

    Example: affinage dpo quickstart --set dpo.beta=0.3
    """
    _tune(recipe, how, "dpo", "preference-data", show, documents=2)


def _tune(recipe: str, how: PipelineOptions, training: str, data: str, show: int | None, documents: int = 1) -> None:
    folder = run_pipeline(recipe, how, (training if show is None else data,))
    if show is not None and not how.dry_run:
        with only_data_on_stdout(how.as_json):
            _show_examples(folder / data, show, documents)


def _show_examples(rows: Path, count: int, documents: int) -> None:
    from affinage.data.sft import show_examples
    from affinage.data.tokenizer import Tokenizer
    from affinage.pipeline.models import made_from

    tokenizer = made_from(rows.resolve(), "train-tokenizer")
    if tokenizer is None:
        raise UserError("the tokenizer of this data is gone", where=str(rows), fix="Run the recipe again.")
    for name, example in show_examples(rows, Tokenizer.load(tokenizer), count, documents=documents):
        screen().print(f"\n[bold]{name}[/bold]: what is trained on stands between ⟦ and ⟧")
        screen().print(example, markup=False, highlight=False)


def world(
    folder: Annotated[Path, typer.Argument(help="Where to write; must be empty or not there.", show_default=False)],
    megabytes: Annotated[float, opt("How much text, in 1e6 bytes.", min=0.01)] = 3.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Write the pocket world into a folder: documents, conversations, preference pairs and benchmarks.

    Example: affinage world my_world --megabytes 10
    """
    from affinage.cli.working import Working
    from affinage.data.synthetic import write_world

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError("this is not an empty folder", where=str(folder), fix="Name one that is not there yet.")
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of one that was interrupted
    try:
        part.mkdir(parents=True)
        with Working("the pocket world"):
            write_world(part, megabytes=megabytes, seed=seed)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    typer.echo(f"The pocket world is in {folder}.")


def sampled(how: PipelineOptions, section: str, share: float | None) -> PipelineOptions:
    """The same options, with a share of the section's sources only, if one is given."""
    setting = [] if share is None else [f"{section}.sample={share:.12f}".rstrip("0")]
    return replace(how, overrides=[*(how.overrides or ()), *setting])


def run_pipeline(
    name: str,
    how: PipelineOptions,
    until: Sequence[str],
    *,
    any_of: bool = False,
    only: Sequence[str] | None = None,
    quiet: bool = False,
) -> Path:
    """Run the steps of a recipe up to the steps `until`, to its end if there are none. Returns the run's folder.

    Args:
        name: a recipe file, a run, or a packaged recipe.
        how: options of the command line.
        until: names of steps.
        any_of: leave out those of `until` that the recipe does not have, as long as it has one of them.
        only: the steps that may run; if others are not complete, the command that runs them is the error's fix.
        quiet: print no result at the end.
    """
    from affinage.stopping import StopSignals, without_readers

    with StopSignals(), without_readers():  # a signal that comes while the recipe is read has nothing to save
        from affinage.pipeline.models import resolve

        loaded = load(name, how.overrides, how.runs)
        if (made := resolve(name, how.runs).run) is not None:  # one that is named by its path is run where it is
            how = replace(how, runs=made.parent)
        if how.profile is not None:
            loaded = load(name, [*(how.overrides or ()), f"runtime.profile={how.profile}"], how.runs)
        return _run(loaded, name, how, until, any_of=any_of, only=only, quiet=quiet)


def _run(
    loaded: "LoadedRecipe",
    name: str,
    how: PipelineOptions,
    until: Sequence[str],
    *,
    any_of: bool,
    only: Sequence[str] | None,
    quiet: bool,
) -> Path:
    from affinage.api import prepare_process, write_report
    from affinage.cli.watch import Watch, show_plan, show_result, unchecked
    from affinage.cluster.processes import init_distributed
    from affinage.pipeline.build import build_steps, warnings
    from affinage.pipeline.models import command
    from affinage.pipeline.plan import check
    from affinage.pipeline.runner import PipelineRunner, Runs

    steps = build_steps(loaded, write_report)
    if not steps:
        fix = f"`{command('graph', name)}` shows its model."
        raise UserError(
            "this recipe has no `data` section, so there is nothing to run", where=str(loaded.path), fix=fix
        )
    if any_of:
        until = [step for step in until if step in {each.name for each in steps}] or until
    runner = PipelineRunner(loaded, Runs(how.runs), steps, until=until, force=how.force or ())
    if how.dry_run:
        plan = runner.plan()
        prepare_process(loaded)
        check(loaded, plan)
        show_plan(plan, as_json=how.as_json)
        for line in (*unchecked(plan), *warnings(loaded)):
            warn(line)
        return runner.folder
    prepare_process(loaded)
    runtime = loaded.recipe.runtime
    with (
        init_distributed(runtime.heartbeat_timeout) as processes,
        only_data_on_stdout(how.as_json),
    ):
        if not processes.first:
            runner.follow()
            return runner.folder
        plan = runner.plan()
        waiting = [step.name for step in plan if not step.complete]
        if only is not None and (first := [step for step in waiting if step not in only]):
            settings = [word for setting in how.overrides or () for word in ("--set", setting)]
            ends = [word for step in until for word in ("--until", step)]
            fix = f"Run them: {command('run', name, *settings, *ends, runs=how.runs)}"
            raise UserError(f"steps that come before are not complete: {', '.join(first)}", where=name, fix=fix)
        with processes.all_at_work():  # the mesh is of all their devices
            check(loaded, plan)
        for line in (*unchecked(plan), *(warnings(loaded) if waiting else ())):
            warn(line)
        pretrain, tokens = loaded.recipe.pretrain, loaded.recipe.pretrain_tokens
        if pretrain is not None and tokens is not None and "pretrain" in waiting:
            screen().print(f"pretrain: {pretrain.steps:,} steps, {tokens:,} tokens", highlight=False)
        with Watch(plan) as watch:
            runner.run(watch)
    if not quiet:
        show_result(runner, plan, watch.seconds, as_json=how.as_json)
    return runner.folder
