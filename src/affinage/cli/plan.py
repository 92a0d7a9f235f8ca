"""`affinage plan`: whether a run fits a slice, how long it takes and what it costs, before the slice is rented."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from affinage.cli import completion
from affinage.cli.options import RUNS, JsonOption, RecipeOrRunArgument, RunsOption, SetOption, load, recipe_or_run
from affinage.cli.plan_tables import show_comparison, show_plan
from affinage.cli.working import Working
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.config.load import LoadedRecipe
    from affinage.hardware.slices import Slice
    from affinage.model import Graph
    from affinage.planning.compiled import Verdict
    from affinage.planning.plan import Counted, Plan, Training

_ROWS = {"pretrain": "rows", "sft": "conversations", "dpo": "preferences"}  # the stages that make a training's rows


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("plan")(plan)


def plan(
    recipe: RecipeOrRunArgument,
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="SLICE",
            help="By the cloud's name: v4-32, v5litepod-16, v6e-8, h100x8, cpu.",
            autocompletion=completion.slices,
        ),
    ] = None,
    stage: Annotated[
        Literal["pretrain", "sft", "dpo"] | None,
        typer.Option("--stage", help="The training to plan; by default the first that the recipe has."),
    ] = None,
    overrides: SetOption = None,
    compile_step: Annotated[
        bool, typer.Option("--compile", help="Let the slice's own compiler say what it needs: minutes.")
    ] = False,
    which: Annotated[bool, typer.Option("--which", help="Compare many slices: time and cost on each.")] = False,
    search: Annotated[
        bool, typer.Option("--search", help="Look for the fastest mesh, micro-batches, recomputation and moments.")
    ] = False,
    best: Annotated[int, typer.Option("--best", min=1, help="How many of the best --search prints.")] = 3,
    width: Annotated[
        int | None,
        typer.Option("--width", help="Find the most layers of this width that the slice's compiler lets train."),
    ] = None,
    tries: Annotated[int, typer.Option("--tries", min=1, help="Compilations at most for --width.")] = 6,
    curve: Annotated[
        Literal["weak", "strong"] | None,
        typer.Option("--curve", help="Scale from --on to 4,096 chips: the rows of a device stay (weak), or the batch."),
    ] = None,
    runs: RunsOption = RUNS,
    as_json: JsonOption = False,
) -> None:
    """Say whether a run fits a slice, how long it takes and what it costs, and which claims about it cannot be true.

    Example: affinage plan julian-600m --on v4-32 --compile

    affinage plan julian-600m --on v4-32 --search

    affinage plan julian-sft --stage sft --set sft.lora.r=16 --on h100

    affinage plan julian-600m --which

    affinage plan capacity --on v4-128 --width 10240
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # planning must not take the accelerator that something else trains on
    from affinage.hardware.slices import find_slice

    _one_question(which=which, width=width is not None, curve=curve is not None, search=search, compile=compile_step)
    if which and on:
        raise UserError("--which looks through all slices", where="--which", fix="Leave out --on.")
    named, recipe = find_slice(on) if on else None, recipe_or_run(recipe, runs)
    asked = _asked(recipe, overrides or [], stage, runs)
    from affinage.planning.left_out import left_out
    from affinage.planning.plan import compare, default_slice

    loaded = asked.loaded
    if which:
        with Working("planning"):
            found = compare(loaded.recipe, asked.graph)
        refused = [entry for entry in found if isinstance(entry, tuple)]
        if not as_json:
            print(f"{loaded.recipe.name}; {asked.extent}\n")
        show_comparison(found, as_json, left_out(loaded.recipe, refused))
        return
    where = named or default_slice(loaded.recipe)
    if width is not None:
        from affinage.cli.plan_capacity import capacity_and_show

        capacity_and_show(recipe, asked.overrides, where, width, tries, asked.counted, as_json)
    elif curve:
        from affinage.cli.plan_curve import show_curve
        from affinage.planning.curve import curve as scaled

        show_curve(scaled(loaded.recipe, asked.graph, curve, where), where, as_json)
    elif search:
        from affinage.cli.plan_search import search_and_show

        search_and_show(
            recipe, asked.overrides, loaded, asked.graph, where, best, asked.counted if compile_step else None, as_json
        )
    else:
        _plan_one(asked, where, compile_step, as_json)


def _one_question(**given: bool) -> None:
    """Refuse options of which one would go unheard: beside each other go --search and --compile, --width compiles."""
    said = [f"--{name}" for name, is_given in given.items() if is_given]
    if len(said) > 1 and said not in (["--search", "--compile"], ["--width", "--compile"]):
        raise UserError(f"{said[0]} and {said[1]} do not go together", where=said[0], fix=f"Leave out {said[1]}.")


class _Asked(NamedTuple):
    """What is planned."""

    recipe: str
    overrides: list[str]
    loaded: "LoadedRecipe"
    section: "Training"
    graph: "Graph"
    counted: "Counted"
    data_tokens: int | None
    data_rows: int | None
    others: list[str]  # its other trainings

    @property
    def extent(self) -> str:
        """What of the recipe is planned, and what is not."""
        beside = [f"{other} (--stage {other})" for other in self.others]
        data = self.loaded.recipe.data
        if data is not None and data.arrays is None and self.data_tokens is None:
            beside.insert(0, f"the data (affinage data {self.recipe}, without an accelerator)")
        return f"planned: {self.section}" + (f"; not planned: {', '.join(beside)}" if beside else "")


def _asked(recipe: str, overrides: list[str], stage: "Training | None", runs: Path) -> _Asked:
    loaded = load(recipe, overrides)  # before the imports of JAX, so that a mistake in it is told at once
    from affinage.config.plugins import load_plugins
    from affinage.planning.plan import Counted, only, planned_graph, training_settings
    from affinage.training.choices import check_choices

    trainings = loaded.recipe.trainings
    if stage:
        overrides = [*overrides, *only(stage, loaded.recipe)]
        loaded = load(recipe, overrides)
    load_plugins(loaded)
    section, settings, _ = training_settings(loaded.recipe)
    check_choices(settings, lambda path: loaded.locate((section, *path)))
    vocabulary = _summary(runs, loaded, "tokenizer").get("vocabulary")
    packed = _summary(runs, loaded, _ROWS[section]).get("train", {})
    tokens, rows = packed.get("tokens"), packed.get("rows")
    characters = loaded.recipe.tokenizer.kind == "char"
    counted = Counted(vocabulary if characters else None, _documents(runs, loaded, section))
    return _Asked(
        recipe,
        overrides,
        loaded,
        section,
        planned_graph(loaded, counted),
        counted,
        tokens,
        rows,
        [name for name in trainings if name != section],
    )


def _plan_one(asked: _Asked, where: "Slice", compile_step: bool, as_json: bool) -> None:
    from affinage.planning.plan import make_plan

    asked = _dividing(asked, where)
    made = make_plan(asked.loaded.recipe, asked.graph, where, asked.data_tokens, asked.data_rows)
    verdict = _verdict(asked, made) if compile_step else None
    if as_json:
        told: dict[str, Any] = made.to_dict()
        if verdict is not None:
            told["compiled"] = {**vars(verdict), "estimate_over_compiled": _ratio(made, verdict)}
        print(json.dumps(told, indent=1))
        return
    show_plan(made, verdict, asked.extent)


def _dividing(asked: _Asked, where: "Slice") -> _Asked:
    """The same with the nearest batch that divides over the mesh on a slice, which is said."""
    from affinage.planning.plan import dividing_batch, micro_batches_that_keep, training_settings

    recipe, section = asked.loaded.recipe, asked.section
    batch = dividing_batch(recipe, where)
    if batch is None:
        return asked
    _, settings, _ = training_settings(recipe)
    change = f"{batch / (settings.batch_size or batch):.3g} times the tokens in as many steps"
    keeps = micro_batches_that_keep(recipe, where)
    other = f", or --set {section}.gradient_accumulation_steps={keeps}, which keeps the batch" if keeps else ""
    print(
        f"Warning: batch_size {settings.batch_size} does not divide over the mesh on {where.name}; planned with "
        f"{batch}, the nearest that does, and {change}: --set {section}.batch_size={batch}{other}",
        file=sys.stderr,
    )
    overrides = [*asked.overrides, f"{section}.batch_size={batch}"]
    return asked._replace(overrides=overrides, loaded=load(asked.recipe, overrides))


def _verdict(asked: _Asked, made: "Plan") -> "Verdict":
    from affinage.planning.compiled import compile_on

    with Working(f"the compiler of {made.where.name}"):
        return compile_on(asked.recipe, asked.overrides, made.where, asked.counted)


def _summary(runs: Path, loaded: "LoadedRecipe", stage: str) -> dict[str, Any]:
    """What a data stage of this recipe's run found out, if it has run."""
    from affinage.pipeline.store import read_manifest

    found: dict[str, Any] = (read_manifest(runs / loaded.recipe.name / stage) or {}).get("summary", {})
    return found


def _documents(runs: Path, loaded: "LoadedRecipe", section: str) -> int | None:
    """Documents of a row of preferences, if there are such rows."""
    from affinage.data.preferences import documents_in_a_row

    found = section == "dpo" and _summary(runs, loaded, _ROWS[section])
    return documents_in_a_row(runs / loaded.recipe.name / _ROWS[section]) if found else None


def _ratio(made: "Plan", verdict: "Verdict") -> float | None:
    return made.memory.total / verdict.peak_bytes if verdict.peak_bytes else None
