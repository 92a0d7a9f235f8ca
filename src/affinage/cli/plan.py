"""The verb `plan`: whether a run fits a slice, how long it takes and what it costs, before the slice is rented."""

import os
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from affinage.cli import options
from affinage.cli.options import load, opt, verb, warn
from affinage.cli.output import emit, working
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.config.load import LoadedRecipe
    from affinage.hardware.slices import Slice
    from affinage.model import Graph
    from affinage.planning.capacity import Attempt
    from affinage.planning.compiled import CompileReport
    from affinage.planning.plan import Counted, Training

_DATA = {"pretrain": "tokenize", "sft": "sft-data", "dpo": "preference-data"}  # the steps that prepare training data
_ON = "By the cloud's name: v4-32, v5litepod-16, v6e-8, h100x8, cpu."
TrainingName = Literal["pretrain", "sft", "dpo"]


@verb()
def plan(
    recipe: options.RecipeArgument,
    on: Annotated[str | None, opt(_ON, "--on", metavar="SLICE", autocompletion=options.complete_slice)] = None,
    training: Annotated[TrainingName | None, opt("The training to plan; default: the recipe's first.")] = None,
    overrides: options.SetOption = None,
    compile_step: Annotated[bool, opt("Compile the step with the slice's own compiler: minutes.", "--compile")] = False,
    which: Annotated[bool, opt("Compare many slices: time and cost on each.", "--which")] = False,
    search: Annotated[
        bool, opt("Search for the fastest mesh, micro-batches, remat and optimizer state.", "--search")
    ] = False,
    best: Annotated[int, opt("How many of the best --search prints.", min=1)] = 3,
    width: Annotated[int | None, opt("Find the most layers of this width that the slice's compiler accepts.")] = None,
    tries: Annotated[int, opt("Maximum number of compilations for --width.", min=1)] = 6,
    curve: Annotated[
        Literal["weak", "strong"] | None,
        opt("Scale from --on to 4,096 chips at a constant batch per device (weak) or batch."),
    ] = None,
    runs: options.RunsOption = options.RUNS,
    as_json: options.JsonOption = False,
) -> None:
    """Plan a training: whether it fits a slice, its time and cost, and which claims about it cannot be true.

    Example: affinage plan julian-600m --on v4-32 --compile

    affinage plan julian-600m --on v4-32 --search

    affinage plan julian-sft --training sft --set sft.lora.r=16 --on h100

    affinage plan julian-600m --which

    affinage plan capacity --on v4-128 --width 10240
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # planning must not take the accelerator that something else trains on
    from affinage.hardware.slices import find_slice

    modes = {"--which": which, "--width": width is not None, "--curve": curve, "--search": search}
    wanted = [name for name, is_given in {**modes, "--compile": compile_step}.items() if is_given]
    if len(wanted) > 1 and wanted not in (["--search", "--compile"], ["--width", "--compile"]):
        raise UserError(f"{' and '.join(wanted)} do not go together", where=wanted[0], fix=f"Leave out {wanted[1]}.")
    if which and on:
        raise UserError("--which plans for all slices", where="--which", fix="Leave out --on.")
    named = None if on is None else find_slice(on)
    planned = _planned(recipe, overrides or [], training, runs)
    if which:
        _which(planned, as_json)
        return
    from affinage.planning.plan import default_slice

    where = named or default_slice(planned.loaded.recipe)
    if width is not None:
        _capacity(planned, where, width, tries, as_json)
    elif curve:
        from affinage.cli.plan_view import curve_view
        from affinage.planning.curve import curve as scaled

        points = scaled(planned.loaded.recipe, planned.graph, curve, where)
        rows = [point.plan.to_dict() | {"efficiency": point.efficiency, "why": point.why} for point in points]
        emit({"curve": rows}, as_json, curve_view(points, where))
    elif search:
        _search(planned, where, best, compile_step, as_json)
    else:
        _plan_one(planned, where, compile_step, as_json)


@dataclass(frozen=True)
class _Planned:
    """A training that is to be planned."""

    name: str  # of the recipe, as it was given
    recipe: str  # its file
    overrides: list[str]
    loaded: "LoadedRecipe"
    section: "Training"
    graph: "Graph"
    counted: "Counted"
    data_tokens: int | None
    data_rows: int | None
    runs: Path

    @property
    def extent(self) -> str:
        """What of the recipe is planned, and what is not."""
        from affinage.pipeline.models import command

        others = [f"{each} (--training {each})" for each in self.loaded.recipe.trainings if each != self.section]
        data = self.loaded.recipe.data
        if data is not None and self.data_tokens is None:
            others.insert(0, f"the data ({command('data', self.name)}, without an accelerator)")
        return f"planned: {self.section}" + (f"; not planned: {', '.join(others)}" if others else "")

    def compiled(self, where: "Slice", overrides: list[str]) -> "CompileReport":
        """The compiler's report of a step, with further overrides."""
        from affinage.planning.compiled import compile_on

        return compile_on(self.recipe, [*self.overrides, *overrides], where, self.counted)


def _planned(name: str, overrides: list[str], training: "Training | None", runs: Path) -> _Planned:
    loaded = load(name, overrides, runs, lenient=True)  # before JAX is imported, so that mistakes are found at once
    from affinage.config.load import load_recipe, load_saved
    from affinage.data.tuning_data import documents_in_a_row
    from affinage.pipeline.models import RECIPE, resolve
    from affinage.planning.plan import Counted, only, planned_graph, training_settings
    from affinage.plugins import load_plugins
    from affinage.results import ChatDataResult, TokenizeResult, TokenizerResult, read_result
    from affinage.training.optimizer import check_choices

    target = resolve(name, runs)
    run = target.run or runs / loaded.recipe.name
    file = str(loaded.path if target.run is None else run / RECIPE)
    if training:
        overrides = [*overrides, *only(training, loaded.recipe)]
        loaded = load_recipe(file, overrides) if target.run is None else load_saved(Path(file), overrides)[0]
    load_plugins(loaded)
    section, settings, _ = training_settings(loaded.recipe)
    check_choices(settings, lambda path: loaded.locate((section, *path)))

    kind: type[TokenizeResult | ChatDataResult] = TokenizeResult if section == "pretrain" else ChatDataResult
    packed, tokenizer = read_result(run / _DATA[section], kind), read_result(run / "train-tokenizer", TokenizerResult)
    characters = loaded.recipe.tokenizer.kind == "char"
    documents = documents_in_a_row(run / _DATA[section]) if section == "dpo" and packed else None
    counted = Counted(tokenizer.vocabulary if tokenizer and characters else None, documents)
    facts = (packed.train.tokens, packed.train.rows) if packed and packed.train else (None, None)
    return _Planned(name, file, overrides, loaded, section, planned_graph(loaded, counted), counted, *facts, runs)


def _which(planned: _Planned, as_json: bool) -> None:
    from affinage.cli.plan_view import comparison_view
    from affinage.planning.plan import compare

    recipe = planned.loaded.recipe
    with working("planning"):
        found = compare(recipe, planned.graph)
    refused = [entry for entry in found if isinstance(entry, tuple)]
    plans = [entry for entry in found if not isinstance(entry, tuple)]
    no = [{"slice": where.name, "error": error.what, "fix": error.fix} for where, error in refused]
    view = [f"{recipe.name}; {planned.extent}\n", *comparison_view(plans, refused)]
    emit({"plans": [made.to_dict() for made in plans], "refused": no}, as_json, view)


def _plan_one(planned: _Planned, where: "Slice", compile_step: bool, as_json: bool) -> None:
    from affinage.cli.plan_view import plan_view
    from affinage.hardware.slices import memory_text
    from affinage.planning.plan import make_plan

    planned = _dividing(planned, where)
    made = make_plan(planned.loaded.recipe, planned.graph, where, planned.data_tokens, planned.data_rows)
    disk = made.save_bytes * (made.saves + 1)
    folder = next(path for path in (planned.runs, *planned.runs.absolute().parents) if path.exists())
    if where.platform == "cpu" and (free := shutil.disk_usage(folder).free) < disk:
        warn(f"the disk of {planned.runs} has {memory_text(free)} free, and checkpoints take {memory_text(disk)}")
    facts: dict[str, Any] = made.to_dict()
    report = None
    if compile_step:
        with working(f"the compiler of {where.name}"):
            report = planned.compiled(where, [])
        ratio = made.memory.total / report.peak_bytes if report.peak_bytes else None
        facts["compiled"] = {**vars(report), "estimate_over_compiled": ratio}
    emit(facts, as_json, plan_view(made, report, planned.extent))


def _dividing(planned: _Planned, where: "Slice") -> _Planned:
    """The same with the nearest batch that divides over the mesh on a slice, with a warning if it is another one."""
    from affinage.config.load import load_recipe
    from affinage.planning.plan import dividing_batch, training_settings

    recipe, section = planned.loaded.recipe, planned.section
    batch, before = dividing_batch(recipe, where), training_settings(recipe)[1].batch_size
    if batch is None:
        return planned
    warn(
        f"batch_size {before} does not divide over the mesh on {where.name}; planned with {batch}, the nearest that "
        f"does, and so {batch / (before or batch):.3g} times the tokens: --set {section}.batch_size={batch}"
    )
    overrides = [*planned.overrides, f"{section}.batch_size={batch}"]
    return replace(planned, overrides=overrides, loaded=load_recipe(planned.recipe, overrides))


def _search(planned: _Planned, where: "Slice", count: int, compile_step: bool, as_json: bool) -> None:
    """Print the best `count` settings, with the compiler's report of each where the step is compiled."""
    from affinage.cli.plan_view import search_view
    from affinage.planning.search import search

    recipe, section = planned.loaded.recipe, planned.section
    with working("searching", lines=True) as progressed:
        found = search(recipe, planned.graph, where, count, progressed)
    rows: list[Any] = []
    for number, (candidate, made) in enumerate(found.best, 1):
        report = None
        if compile_step:
            print(f"Compiling for {where.name}: {number} of {len(found.best)}", file=sys.stderr)
            report = planned.compiled(where, candidate.overrides(recipe, section))
        rows.append((candidate, made, report))
    best = [
        {"settings": candidate.settings(section), "plan": made.to_dict()}
        | ({"compiled": vars(report)} if report else {})
        for candidate, made, report in rows
    ]
    facts = {"candidates": found.candidates, "estimated": found.estimated, "best": best}
    ways = f"{recipe.name} on {where.name}: {found.candidates:,} ways to split it, in full: {found.estimated}\n"
    emit(facts, as_json, [ways, *search_view(rows, recipe, section)])


def _capacity(planned: _Planned, where: "Slice", width: int, tries: int, as_json: bool) -> None:
    """Print every attempt as it comes, and the largest model with its settings and its predicted step."""
    from affinage.cli.plan_view import capacity_view
    from affinage.config.load import load_recipe
    from affinage.hardware.slices import memory_text
    from affinage.planning.capacity import capacity, shape

    if "blocks" not in load_recipe(planned.recipe).recipe.model["nodes"]:
        fix = "affinage plan capacity --width ..."
        raise UserError(f"{planned.name} has no node `blocks`", where="--width", fix=fix)

    def progress(attempt: "Attempt") -> None:
        report, parameters = attempt.report, f"{attempt.parameters / 1e9:.1f}B"
        fits = f"{'fits' if report.fits else 'refused'}, {memory_text(report.peak_bytes)}"
        line = f"{attempt.layers} layers, {parameters}: {fits}, after {report.seconds:.0f} s"
        print(line, file=sys.stderr, flush=True)

    settings = [*shape(width, where), *planned.overrides]
    found = capacity(planned.recipe, settings, where, tries=tries, on_attempt=progress, counted=planned.counted)
    fax = found.fax
    facts = {
        "layers": found.largest.layers,
        "parameters": found.largest.parameters,
        "overrides": list(found.overrides),
        "seconds": found.plan.time.seconds,
        "fax": vars(fax) | {"ratio": found.largest.parameters / fax.parameters} if fax else None,
        "attempts": [
            {"layers": one.layers, "parameters": one.parameters, "compiled": vars(one.report)} for one in found.attempts
        ],
    }
    emit(facts, as_json, capacity_view(found, planned.name, where, width))
