"""Verbs that run the steps of a recipe: `run`, and those that stop at one of them."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from affinage.cli.options import PipelineOptions, RecipeArgument, UntilOption, arg, load, opt, verb, with_options
from affinage.cli.output import only_data_on_stdout, screen, working
from affinage.errors import UserError

SampleOption = Annotated[float | None, opt("Use a share of each source only, e.g. 0.001.", "--sample", metavar="SHARE")]
ShowOption = Annotated[int | None, opt("Only prepare the data, and show N examples of it.", min=1, metavar="N")]


@verb()
@with_options(how=PipelineOptions)
def run(recipe: RecipeArgument, until: UntilOption = None, *, how: PipelineOptions) -> None:
    """Run a recipe, from raw text to the report. Steps that are complete are not run again.

    Example: affinage run quickstart --set pretrain.steps=200
    """
    run_pipeline(recipe, how, until or ())


@verb()
@with_options(how=PipelineOptions)
def train(recipe: RecipeArgument, *, how: PipelineOptions) -> None:
    """Run up to the end of pretraining: `run --until pretrain`.

    Example: affinage train quickstart --set pretrain.steps=200
    """
    run_pipeline(recipe, how, ("pretrain",))


@verb()
@with_options(how=PipelineOptions)
def sft(recipe: RecipeArgument, show: ShowOption = None, sample: SampleOption = None, *, how: PipelineOptions) -> None:
    """Run up to the end of supervised fine-tuning: `run --until sft`; or show what it would be trained on.

    Example: affinage sft quickstart --show 3
    """
    how = sampled(how, "sft", sample)
    folder = run_pipeline(recipe, how, ("sft-data" if show else "sft",))
    if show and not how.dry_run:
        _show_examples(folder / "sft-data", show, how)


@verb()
@with_options(how=PipelineOptions)
def dpo(recipe: RecipeArgument, show: ShowOption = None, *, how: PipelineOptions) -> None:
    """Run up to the end of direct preference optimization: `run --until dpo`; or show its pairs.

    Example: affinage dpo quickstart --set dpo.beta=0.3
    """
    folder = run_pipeline(recipe, how, ("preference-data" if show else "dpo",))
    if show and not how.dry_run:
        _show_examples(folder / "preference-data", show, how)


def _show_examples(rows: Path, count: int, how: PipelineOptions) -> None:
    from affinage.data.tokenizer import Tokenizer
    from affinage.data.tuning_data import show_examples
    from affinage.pipeline.models import made_from

    tokenizer = made_from(rows.resolve(), "train-tokenizer")
    if tokenizer is None:
        raise UserError("the tokenizer of this data is gone", where=str(rows), fix="Run the recipe again.")
    with only_data_on_stdout(how.as_json):
        for name, example in show_examples(rows, Tokenizer(tokenizer), count):
            screen().print(f"\n[bold]{name}[/bold]: what is trained on stands between ⟦ and ⟧")
            screen().print(example, markup=False, highlight=False)


@verb()
def world(
    folder: Annotated[Path, arg("FOLDER", "Where to write; must be empty or not there.")],
    megabytes: Annotated[float, opt("How much text, in 1e6 bytes.", min=0.01)] = 3.0,
    seed: Annotated[int, opt("Seed of the texts.", min=0)] = 0,
) -> None:
    """Write the pocket world into a folder: documents, conversations, preference pairs and benchmarks.

    Example: affinage world my_world --megabytes 10
    """
    from affinage.data.synthetic import write_world

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError("this is not an empty folder", where=str(folder), fix="Name one that is not there yet.")
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of one that was interrupted
    try:
        part.mkdir(parents=True)
        with working("the pocket world"):
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
        from affinage.pipeline.models import command, resolve

        profile = [] if how.profile is None else [f"runtime.profile={how.profile}"]
        loaded = load(name, [*(how.overrides or ()), *profile], how.runs)
        made = resolve(name, how.runs).run
        runs = how.runs if made is None else made.parent  # a run that is named by its path is run where it is
        from affinage.api import prepare_process, write_report
        from affinage.cli.watch import Watch, show_plan, show_result, warn_of
        from affinage.cluster.processes import init_distributed
        from affinage.pipeline.build import build_steps
        from affinage.pipeline.runner import PipelineRunner

        steps = build_steps(loaded, write_report)
        if not steps:
            what = "this recipe has no `data` section, so there is nothing to run"
            raise UserError(what, where=str(loaded.path), fix=f"`{command('graph', name)}` shows its model.")
        if any_of:
            until = [step for step in until if step in {each.name for each in steps}] or until
        runner = PipelineRunner(loaded, runs, steps, until=until, force=how.force or ())
        prepare_process(loaded)
        if how.dry_run:
            plan = runner.plan()
            runner.check(plan)
            show_plan(plan, how.as_json)
            warn_of(loaded, plan)
            return runner.folder
        with init_distributed(loaded.recipe.runtime.heartbeat_timeout) as processes, only_data_on_stdout(how.as_json):
            if not processes.first:
                runner.follow()
                return runner.folder
            plan = runner.plan()
            waiting = [step.name for step in plan if not step.complete]
            if only is not None and (first := [step for step in waiting if step not in only]):
                words = [word for setting in how.overrides or () for word in ("--set", setting)]
                words += [word for step in until for word in ("--until", step)]
                fix = f"Run them: {command('run', name, *words, runs=runs)}"
                raise UserError(f"steps that come before are not complete: {', '.join(first)}", where=name, fix=fix)
            with processes.all_at_work():  # the mesh is of all their devices
                runner.check(plan)
            warn_of(loaded, plan)
            pretrain, tokens = loaded.recipe.pretrain, loaded.recipe.pretrain_tokens
            if pretrain is not None and tokens is not None and "pretrain" in waiting:
                screen().print(f"pretrain: {pretrain.steps:,} steps, {tokens:,} tokens", highlight=False)
            with Watch() as watch:
                runner.run(watch)
        if not quiet:
            show_result(runner, plan, watch.seconds, how.as_json)
        return runner.folder


def run_own_steps(name: str, how: PipelineOptions, section: str, steps: Sequence[str], instead: str) -> Path:
    """Run those of a run's last steps that are missing, and nothing before them. Returns the run's folder.

    Args:
        name: the run, or its recipe.
        how: options of the command line.
        section: of the recipe, that these steps carry out.
        steps: names of steps, of which the recipe has one at least.
        instead: what to do where the recipe of the run does not have the section.
    """
    from affinage.pipeline.models import check_complete, recorded, resolve, run_of

    target = resolve(name, how.runs)
    if not how.overrides:
        check_complete(target, how.runs)
        if recorded(run_of(target, how.runs)).get(section) is None:
            raise UserError(f"the recipe of this run has no `{section}`", where=name, fix=instead)
    return run_pipeline(name, how, steps, any_of=True, only=steps, quiet=True)
