"""The verb `plan`: whether a run fits a slice, how long it takes and what it costs, before the slice is rented."""

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Never

import typer

from affinage.cli import completion
from affinage.cli.options import RUNS, JsonOption, RecipeArgument, RunsOption, SetOption, load, opt, warn
from affinage.cli.output import emit
from affinage.cli.working import Working
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.config.load import LoadedRecipe
    from affinage.hardware.slices import Slice
    from affinage.model import Graph
    from affinage.planning.capacity import Attempt
    from affinage.planning.compiled import CompileReport
    from affinage.planning.plan import Counted, Training

_DATA = {"pretrain": "tokenize", "sft": "sft-data", "dpo": "preference-data"}  # the steps that prepare training data


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("plan")(plan)


def plan(
    recipe: RecipeArgument,
    on: Annotated[
        str | None,
        opt(
            "By the cloud's name: v4-32, v5litepod-16, v6e-8, h100x8, cpu.",
            "--on",
            metavar="SLICE",
            autocompletion=completion.slices,
        ),
    ] = None,
    training: Annotated[
        Literal["pretrain", "sft", "dpo"] | None,
        opt("The training to plan; by default the first that the recipe has.", "--training"),
    ] = None,
    overrides: SetOption = None,
    compile_step: Annotated[bool, opt("Compile the step with the slice's own compiler: minutes.", "--compile")] = False,
    which: Annotated[bool, opt("Compare many slices: time and cost on each.", "--which")] = False,
    search: Annotated[
        bool, opt("Search for the fastest mesh, micro-batches, remat and optimizer state.", "--search")
    ] = False,
    best: Annotated[int, opt("How many of the best --search prints.", "--best", min=1)] = 3,
    width: Annotated[
        int | None, opt("Find the most layers of this width that the slice's compiler lets train.", "--width")
    ] = None,
    tries: Annotated[int, opt("Maximum number of compilations for --width.", "--tries", min=1)] = 6,
    curve: Annotated[
        Literal["weak", "strong"] | None,
        opt("Scale from --on to 4,096 chips at a constant batch per device (weak) or batch.", "--curve"),
    ] = None,
    runs: RunsOption = RUNS,
    as_json: JsonOption = False,
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

    _one_question(which=which, width=width is not None, curve=curve is not None, search=search, compile=compile_step)
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


def _one_question(**wanted: bool) -> None:
    """Refuse options that exclude each other; --search and --compile go together, and --width compiles."""
    given = [f"--{name}" for name, is_given in wanted.items() if is_given]
    if len(given) > 1 and given not in (["--search", "--compile"], ["--width", "--compile"]):
        raise UserError(f"{given[0]} and {given[1]} do not go together", where=given[0], fix=f"Leave out {given[1]}.")


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
        others = [name for name in self.loaded.recipe.trainings if name != self.section]
        beside = [f"{other} (--training {other})" for other in others]
        data = self.loaded.recipe.data
        if data is not None and data.arrays is None and self.data_tokens is None:
            from affinage.pipeline.models import command

            beside.insert(0, f"the data ({command('data', self.name)}, without an accelerator)")
        return f"planned: {self.section}" + (f"; not planned: {', '.join(beside)}" if beside else "")


def _planned(name: str, overrides: list[str], training: "Training | None", runs: Path) -> _Planned:
    loaded = load(name, overrides, runs, lenient=True)  # before JAX is imported, so that mistakes are found at once
    from affinage.config.load import load_recipe, load_saved
    from affinage.data.preferences import documents_in_a_row
    from affinage.pipeline.models import RECIPE, resolve, run_folder
    from affinage.planning.plan import Counted, only, planned_graph, training_settings
    from affinage.plugins import load_plugins
    from affinage.results import ChatDataResult, TokenizeResult, TokenizerResult, read_result
    from affinage.training.optimizer import check_choices

    target = resolve(name, runs)
    run = run_folder(target, loaded, runs)
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
    graph, train = planned_graph(loaded, counted), packed.train if packed else None
    facts = (train.tokens, train.rows) if train else (None, None)
    return _Planned(name, file, overrides, loaded, section, graph, counted, *facts, runs)


def _which(planned: _Planned, as_json: bool) -> None:
    from affinage.cli.plan_view import comparison_view
    from affinage.planning.plan import compare

    recipe = planned.loaded.recipe
    with Working("planning"):
        found = compare(recipe, planned.graph)
    refused = [entry for entry in found if isinstance(entry, tuple)]
    plans = [entry for entry in found if not isinstance(entry, tuple)]
    no = [{"slice": where.name, "error": error.what, "fix": error.fix} for where, error in refused]
    head = f"{recipe.name}; {planned.extent}\n"
    view = comparison_view(plans, refused)
    emit({"plans": [made.to_dict() for made in plans], "refused": no}, as_json, (part for part in (head, *view)))


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
        with Working(f"the compiler of {where.name}"):
            report = _compiled(planned, [], where)
        ratio = made.memory.total / report.peak_bytes if report.peak_bytes else None
        facts["compiled"] = {**vars(report), "estimate_over_compiled": ratio}
    emit(facts, as_json, plan_view(made, report, planned.extent))


def _compiled(planned: _Planned, overrides: list[str], where: "Slice") -> "CompileReport":
    from affinage.planning.compiled import compile_on

    return compile_on(planned.recipe, [*planned.overrides, *overrides], where, planned.counted)


def _dividing(planned: _Planned, where: "Slice") -> _Planned:
    """The same with the nearest batch that divides over the mesh on a slice, with a warning if it is another one."""
    from affinage.config.load import load_recipe
    from affinage.planning.plan import dividing_batch, training_settings

    recipe, section = planned.loaded.recipe, planned.section
    batch = dividing_batch(recipe, where)
    if batch is None:
        return planned
    _, settings, _ = training_settings(recipe)
    warn(
        f"batch_size {settings.batch_size} does not divide over the mesh on {where.name}; planned with {batch}, the "
        f"nearest that does, and so {batch / (settings.batch_size or batch):.3g} times the tokens: "
        f"--set {section}.batch_size={batch}"
    )
    overrides = [*planned.overrides, f"{section}.batch_size={batch}"]
    return replace(planned, overrides=overrides, loaded=load_recipe(planned.recipe, overrides))


@contextmanager
def _one_interrupt() -> Iterator[None]:
    """Ctrl-C ends what is inside; another one, while it ends, is ignored: it would be answered by a traceback."""

    def interrupted(*_: object) -> Never:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupted)
    yield
    signal.signal(signal.SIGINT, before)


def _search(planned: _Planned, where: "Slice", count: int, compile_step: bool, as_json: bool) -> None:
    """Print the best `count` settings, with the compiler's report of each where the step is compiled."""
    from affinage.cli.plan_view import search_rows, search_view
    from affinage.planning.search import search

    recipe, section = planned.loaded.recipe, planned.section
    with _one_interrupt(), Working("searching", lines=True) as working:
        found = search(recipe, planned.graph, where, count, working.progressed)
    if not as_json:
        ways = f"{found.candidates:,} ways to split it, in full: {found.estimated}"
        print(f"{recipe.name} on {where.name}: {ways}\n", flush=True)
    rows: list[Any] = [(candidate, made, None) for candidate, made in found.best]
    if compile_step:
        emit({}, False, [] if as_json else [search_rows(rows), ""])
        for number, (candidate, made, _) in enumerate(rows):
            print(f"Compiling for {where.name}: {number + 1} of {len(rows)}", file=sys.stderr)
            rows[number] = (candidate, made, _compiled(planned, candidate.overrides(recipe, section), where))
    best = [
        {"settings": candidate.settings(section), "plan": made.to_dict()}
        | ({"compiled": vars(report)} if report else {})
        for candidate, made, report in rows
    ]
    facts = {"candidates": found.candidates, "estimated": found.estimated, "best": best}
    emit(facts, as_json, search_view(rows, recipe, section))


def _capacity(planned: _Planned, where: "Slice", width: int, tries: int, as_json: bool) -> None:
    """Print every attempt as it comes, and the largest model with its settings and its predicted step."""
    from affinage.cli.plan_view import capacity_view
    from affinage.config.load import load_recipe
    from affinage.hardware.slices import memory_text
    from affinage.planning.capacity import capacity, shape

    if "blocks" not in load_recipe(planned.recipe).recipe.model["nodes"]:
        raise UserError(
            f"{planned.name} has no node `blocks`", where="--width", fix="affinage plan capacity --width ..."
        )

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
