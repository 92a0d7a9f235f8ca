"""Verbs that walk the road of a recipe: `run`, and those that stop at a stage of it."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import rich
import typer

from affinage.cli.options import RecipeArgument, Walking, load, walks
from affinage.cli.terminal import only_data_on_stdout, screen
from affinage.cli.working import Working
from affinage.errors import UserError
from affinage.hardware.joining import joined
from affinage.stopping import OwnProcess

if TYPE_CHECKING:
    from affinage.config.load import LoadedRecipe


def add_to(app: typer.Typer) -> None:
    """Register the verbs."""
    app.command("run")(run)
    app.command("train")(train)
    app.command("sft")(sft)
    app.command("dpo")(dpo)
    app.command("world")(world)


@walks
def run(
    recipe: RecipeArgument,
    until: Annotated[list[str] | None, typer.Option("--until", metavar="STAGE", help="Stop after this stage.")] = None,
    *,
    how: Walking,
) -> None:
    """Run a recipe, from raw text to the report. What is complete is not run again.

    Example: affinage run quickstart --set pretrain.steps=200
    """
    walk(recipe, how, until or (), strict=True)


@walks
def train(recipe: RecipeArgument, *, how: Walking) -> None:
    """Run up to the end of pretraining.

    Example: affinage train quickstart --set pretrain.steps=200
    """
    walk(recipe, how, ("pretrain",))


@walks
def sft(
    recipe: RecipeArgument,
    show: Annotated[
        int | None,
        typer.Option("--show", min=1, metavar="N", help="Only make the rows, and show N conversations of them."),
    ] = None,
    sample: Annotated[
        float | None, typer.Option("--sample", metavar="SHARE", help="Of each source's conversations, e.g. 0.001.")
    ] = None,
    *,
    how: Walking,
) -> None:
    """Run up to the end of supervised fine-tuning; or show what would be trained on.

    Example: affinage sft quickstart --show 3
    """
    if sample is not None:
        how = sampled(how, "sft", sample)
    until = ("sft",) if show is None else ("conversations",)
    folder = walk(recipe, how, until)
    if show is not None and not how.dry_run:
        with only_data_on_stdout(how.as_json):
            _show_conversations(folder / "conversations", show)


@walks
def dpo(
    recipe: RecipeArgument,
    show: Annotated[
        int | None,
        typer.Option("--show", min=1, metavar="N", help="Only make the rows, and show N pairs of them."),
    ] = None,
    *,
    how: Walking,
) -> None:
    """Run up to the end of direct preference optimisation; or show the pairs that it would learn from.

    Example: affinage dpo quickstart --set dpo.beta=0.3
    """
    until = ("dpo",) if show is None else ("preferences",)
    folder = walk(recipe, how, until)
    if show is not None and not how.dry_run:
        with only_data_on_stdout(how.as_json):
            _show_conversations(folder / "preferences", show, documents=2)


def _show_conversations(rows: Path, count: int, documents: int = 1) -> None:
    from affinage.data.conversations import show_examples
    from affinage.data.tokenizer import Tokenizer
    from affinage.pipeline.models import made_from

    tokenizer = made_from(rows.resolve(), "tokenizer")
    if tokenizer is None:
        raise UserError("the tokenizer of these rows is gone", where=str(rows), fix="Run the recipe again.")
    for name, example in show_examples(rows, Tokenizer.load(tokenizer), count, documents=documents):
        rich.print(f"\n[bold]{name}[/bold]: what is trained on stands between ⟦ and ⟧")
        screen().print(example, markup=False, highlight=False)


def world(
    folder: Annotated[Path, typer.Argument(help="Where to write; must be empty or not there.", show_default=False)],
    megabytes: Annotated[float, typer.Option(min=0.01, help="How much text, in 1e6 bytes.")] = 3.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Write the pocket world into a folder: documents, conversations, preference pairs and benchmarks.

    Example: affinage world my_world --megabytes 10
    """
    from affinage.data.synthetic import write_world

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError("this is not an empty folder", where=str(folder), fix="Name one that is not there yet.")
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of one that was interrupted
    part.mkdir(parents=True)
    try:
        with Working("the pocket world"):
            write_world(part, megabytes=megabytes, seed=seed)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    typer.echo(f"The pocket world is in {folder}.")


def sampled(how: Walking, section: str, share: float) -> Walking:
    """The same, with a share of the section's sources only."""
    setting = f"{section}.sample={share:.12f}".rstrip("0")
    return replace(how, overrides=[*(how.overrides or ()), setting])


def walk(recipe: str, how: Walking, until: Sequence[str], *, strict: bool = False) -> Path:
    """Walk the road of a recipe up to the stages `until`, to its end if there are none. Returns the run's folder.

    If not `strict`, those of `until` that the recipe leaves out are not missed, as long as it has one of them.
    """
    with OwnProcess():  # told to stop while it reads its recipe it has nothing to lose
        from affinage.hardware.pulse import guarded

        loaded = load(recipe, how.overrides)
        if how.profile is not None:
            loaded = load(recipe, [*(how.overrides or ()), f"runtime.profile={how.profile}"])
        with guarded(loaded.recipe.name, loaded.recipe.runtime):
            return _walk(loaded, recipe, how, until, strict)


def _walk(loaded: "LoadedRecipe", recipe: str, how: Walking, until: Sequence[str], strict: bool) -> Path:
    from affinage.api import prepare_process, write_report
    from affinage.cli.watch import Watch, show_plan, show_result
    from affinage.hardware.standstill import Standstill
    from affinage.pipeline.flow import Flow, Runs
    from affinage.pipeline.foresight import check, doubts
    from affinage.pipeline.road import road_of

    road = road_of(loaded, write_report)
    if not road:
        raise UserError(
            "this recipe has no `data` section, so there is nothing to run",
            where=str(loaded.path),
            fix=f"`affinage graph {recipe}` shows its model.",
        )
    names = [stage.name for stage in road]
    if not strict:
        until = [name for name in until if name in names] or until
    flow = Flow(loaded, Runs(how.runs), road, until=until, force=how.force or (), any_code=how.any_code)
    if how.dry_run:
        steps = flow.plan()
        prepare_process(loaded)
        check(loaded, [step.stage.name for step in steps if not step.complete])
        show_plan(steps, as_json=how.as_json)
        _tell(doubts(loaded))
        return flow.folder
    prepare_process(loaded)
    runtime = loaded.recipe.runtime
    with (
        joined(runtime.heartbeat_timeout) as hosts,
        Standstill(loaded.recipe.name, flow.folder, runtime),
        only_data_on_stdout(how.as_json),
    ):
        if not hosts.first:
            flow.follow()
            return flow.folder
        steps = flow.plan()
        with hosts.all_at_work():  # the mesh is of all their devices
            check(loaded, [step.stage.name for step in steps if not step.complete])
        if not all(step.complete for step in steps):
            _tell(doubts(loaded))
        with Watch(steps) as watch:
            flow.run(watch)
    show_result(flow, steps, watch.seconds, as_json=how.as_json)
    return flow.folder


def _tell(doubts: Sequence[str]) -> None:
    for doubt in doubts:
        typer.echo(f"Warning: {doubt}", err=True)
