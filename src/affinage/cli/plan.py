"""The verb `plan`: whether a run fits a slice, how long it takes and what it costs, before the slice is rented."""

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from affinage.cli import terminal
from affinage.cli.terminal import app, counted, described, emit, load, opt, table, working
from affinage.errors import UserError
from affinage.hardware.chips import Slice, find_slice, memory_text

if TYPE_CHECKING:
    from affinage.config.load import LoadedRecipe
    from affinage.model import Graph
    from affinage.planning.compiled import CompileReport
    from affinage.planning.plan import Plan, Training

_ON = "By the cloud's name: v4-32, v5litepod-16, v6e-8, h100x8, cpu."


@app.command()
def plan(
    recipe: terminal.RecipeArgument,
    on: Annotated[str | None, opt(_ON, "--on", metavar="SLICE")] = None,
    training: Annotated[terminal.TrainingName | None, opt("The training to plan; default: the first.")] = None,
    overrides: terminal.SetOption = None,
    compile_step: Annotated[bool, opt("Compile the step with the slice's own compiler: minutes.", "--compile")] = False,
    which: Annotated[bool, opt("Compare many slices: time and cost on each.", "--which")] = False,
    search: Annotated[bool, opt("Search for the fastest mesh, micro-batches and remat.", "--search")] = False,
    width: Annotated[int | None, opt("Find the most layers of this width that the slice's compiler accepts.")] = None,
    tries: Annotated[int, opt("Maximum number of compilations for --width.", min=1)] = 6,
    curve: Annotated[Literal["weak", "strong"] | None, opt("Scale to 4,096 chips; weak: rows per device stay.")] = None,
    runs: terminal.RunsOption = terminal.RUNS,
    as_json: terminal.JsonOption = False,
) -> None:
    """Plan a training: whether it fits a slice, its time and cost, and which claims about it cannot be true.

    A plan that does not fit is an answer, with exit status 0.

    Example: affinage plan julian-600m --on v4-32 --compile
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # planning must not take the accelerator that something else trains on
    modes: dict[str, Any] = {"--which": which, "--width": width, "--curve": curve, "--search": search}
    modes |= {"--compile": compile_step and not (search or width), "--on": which and on}
    names = [name for name, wanted in modes.items() if wanted]
    if len(names) > 1:
        fix = "A search takes minutes: one slice at a time, by --on." if which and search else f"Leave out {names[1]}."
        raise UserError(f"{' and '.join(names)} do not go together", where=names[0], fix=fix)
    named = None if on is None else find_slice(on)
    overrides = overrides or []
    if on and any(each.startswith("hardware.price=") for each in overrides):  # of the chips that are planned for
        overrides = [f"hardware.slice={on}", *overrides]
    planned = _planned(recipe, overrides, training, runs)
    from affinage.planning.plan import REMEMBERED, compare, default_slice
    from affinage.planning.search import curve as scaled

    where = named or default_slice(planned.loaded.recipe)
    if which:
        with working("planning"):
            plans, refused = compare(planned.loaded.recipe, planned.graph, planned.make)
        errors = [{"slice": slice.name, "error": error.what, "fix": error.fix} for slice, error in refused.items()]
        facts = {"plans": [made.row() for made in plans], "refused": errors}
        view: Any = [f"{planned.loaded.recipe.name}; price: US dollars per chip and hour{REMEMBERED}\n"]
        view.append(table([made.brief() for made in plans]))
        for _, (first, *others) in groupby(errors, lambda row: re.sub(r"\d+", "", row["error"])):
            alike = ", ".join(row["slice"] for row in (first, *others))
            view.append(f"\nrefused: {alike}\n  {first['slice']}: {first['error']}\n  {first['fix']}")
    elif curve:
        points = scaled(planned.loaded.recipe, planned.graph, curve, where)
        points = [(planned.make(made.recipe, planned.graph, made.where), efficiency) for made, efficiency in points]
        facts = {"curve": [made.row() | {"of_ideal": efficiency} for made, efficiency in points]}
        view = [table([made.brief() | {"of ideal": efficiency} for made, efficiency in points])]
    elif width is not None:
        facts, view = _capacity(planned, where, width, tries), None
    elif search:
        facts, view = _search(planned, where, compile_step)
    else:
        facts, view = _one(planned, where, compile_step)
    emit(facts, as_json, view)


@dataclass(frozen=True)
class _Planned:
    """A training that is to be planned."""

    name: str  # of the recipe, as the user gave it
    file: str
    overrides: list[str]
    loaded: "LoadedRecipe"
    graph: "Graph"
    make: "Callable[..., Plan]"  # `make_plan`, with what is known of its rows and of the steps that are made already
    extent: str  # what of the recipe is planned, and what is not

    def compiled(self, where: Slice, overrides: Sequence[str] = ()) -> "CompileReport":
        """The compiler's report of a step, with further overrides."""
        from affinage.planning.compiled import compile_on

        _compiling(where)
        with working(f"the compiler of {where.name}"):
            return compile_on(self.file, [*self.overrides, *overrides], where)


def _planned(name: str, overrides: list[str], training: "Training | None", runs: Path) -> _Planned:
    # Before JAX is imported, so that mistakes are found at once.
    loaded, of_run = load(name, overrides, runs, lenient=True)
    from affinage.config.load import load_recipe
    from affinage.pipeline.models import RECIPE, extended, feeds_of
    from affinage.planning.plan import make_plan, only, planned_graph, training_settings
    from affinage.registry import load_plugins
    from affinage.training.optimizer import check_choices

    run = of_run or runs / loaded.recipe.name
    file = str(loaded.path if of_run is None else run / RECIPE)
    changed = [*overrides, *(only(training, loaded.recipe) if training else ())]
    if vocabulary := terminal.characters_of(loaded, run):
        nodes = loaded.recipe.model.get("nodes")
        named_nodes = nodes.items() if isinstance(nodes, dict) else ()  # what is wrong with others is reported below
        automatic = [node for node, layer in named_nodes if isinstance(layer, dict) and layer.get("vocab") == "auto"]
        changed += [f"model.nodes.{node}.vocab={vocabulary}" for node in automatic]
    if changed != overrides:
        loaded = load_recipe(file, changed, left_out=None if of_run is None else [])
    load_plugins(loaded)
    section, settings, _ = training_settings(loaded.recipe)
    check_choices(settings, lambda path: loaded.locate((section, *path)))
    feeds, extends = feeds_of(loaded, section, run), extended(loaded, section)
    others = ["the data"] if loaded.recipe.data is not None and feeds is None else []
    others += [f"{each} (--training {each})" for each in loaded.recipe.trainings if each != section]
    extent = f"planned: {section}" + (f"; not planned: {', '.join(others)}" if others else "")
    make = partial(make_plan, feed_of=feeds, begun=extends[1] if extends else 0)
    return _Planned(name, file, changed, loaded, planned_graph(loaded), make, extent)


def _one(planned: _Planned, where: Slice, compile_step: bool) -> tuple[dict[str, Any], list[Any]]:
    """The plan for one slice, with the compiler's report where the step is compiled, and the text of both."""
    from affinage.pipeline.models import checkpoint_count
    from affinage.planning.plan import FITTING, heading

    made = planned.make(planned.loaded.recipe, planned.graph, where)
    report = planned.compiled(where) if compile_step else None
    fits, costs = made.fits if report is None else report.fits, ("cost", "cost_per_billion_tokens")
    facts = made.to_dict() | ({"compiled": vars(report)} if report else {}) | ({} if fits else dict.fromkeys(costs))
    where, memory, time = made.where, made.memory, made.time
    chips = f"{where.chips} × {where.chip.name}, {counted(where.devices, 'device')}, hosts: {where.hosts}"
    view: list[Any] = [f"{heading(made.recipe, where)}: {chips}; mesh: {made.mesh or 'one device'}"]
    if not fits:
        view.append(made.misfit or f"does not fit, by the compiler; {FITTING}")
    view.append(f"{planned.extent}\n")
    count = checkpoint_count(made.recipe.runtime.checkpoint, made.begun, made.facts.steps)
    disk = {"checkpoint_bytes": made.save_bytes, "all_checkpoints_bytes": count * made.save_bytes}
    view += described(asdict(made.facts) | disk)
    sizes, others = vars(memory).items(), {name: getattr(time, name) for name in ("update", "adding", "bubble")}
    parts = [{"part": name.replace("_", " "), "takes": memory_text(size)} for name, size in sizes if size]
    nodes = [vars(node) | {"takes": node.seconds} | dict.fromkeys(("seconds", "flops")) for node in time.nodes]
    nodes += [{"name": name, "takes": takes} for name, takes in others.items()]
    nodes = [node for node in nodes if node["takes"]] + [{"name": "step", "takes": time.seconds, "bound": time.bound}]
    view += described({"memory of a device": parts, "seconds of a step": nodes if fits else []})
    room = f"{memory_text(memory.total)} of the {memory_text(made.capacity)} that a program may take"
    view.append(f"\nestimate: {'fits' if made.fits else 'does not fit'}, {room}")
    if report is not None:
        off = f"the estimate is {memory.total / report.peak_bytes - 1:+.1%} off" if report.fits else report.message
        view.append(f"compiler: {_verdict(report)}; {off}")
        counts = {"collectives": report.collectives, "attention": report.attention}
        view += described({name: count or "none" for name, count in counts.items() if count is not None})
    view += [made.outcome] if fits else []
    view += [f"\nWarning: {warning}" for warning in made.warnings if warning != made.misfit]
    view += ["\nClaims that cannot be true:"] if made.contradictions else []
    return facts, view + [f"  {claim}: {what}" for claim, what in made.contradictions.items()]


def _compiling(where: Slice) -> None:
    print(f"compiling for {where.name}, which takes minutes", file=sys.stderr, flush=True)


def _verdict(report: "CompileReport") -> str:
    size = memory_text(report.peak_bytes) if report.peak_bytes else "memory unknown"
    return f"{'fits' if report.fits else 'does not fit'}, {size}"


def _search(planned: _Planned, where: Slice, compile_step: bool) -> tuple[dict[str, Any], list[Any]]:
    """The best settings, with the compiler's report of each where the step is compiled, and the text of both."""
    import yaml

    from affinage.planning.plan import heading
    from affinage.planning.search import search

    recipe, best, shown, paste = planned.loaded.recipe, list[dict[str, Any]](), list[dict[str, Any]](), ""
    with working("searching") as progress:
        found, candidates, estimated = search(recipe, planned.graph, where, progress=progress)
    for candidate, estimate in found:
        made = planned.make(estimate.recipe, planned.graph, where)
        parts = {"micro_batches": candidate.micro_batches, "remat": candidate.remat}
        report = planned.compiled(where, candidate.overrides(recipe)) if compile_step else None
        compiled = {"compiler": report and _verdict(report)}
        best.append(parts | made.row() | compiled | {"settings": candidate.settings(recipe)})
        shown.append(parts | made.brief() | compiled | dict.fromkeys(("slice", "tokens", "price", "per 1B")))
        if not paste and (report is None or report.fits):
            lines = yaml.safe_dump(best[-1]["settings"], sort_keys=False, default_flow_style=None).rstrip()
            paste = f"The best of them, to paste into the recipe:\n\n{lines}"
    view: list[Any] = [f"{heading(recipe, where)}: {candidates:,} ways to split it, in full: {estimated}\n"]
    view.append(table(shown))
    if found[0][1].nearly_full and not compile_step:
        view.append("\nMore than 90 % of a device's memory, by the estimate: check whether they fit, with --compile.")
    view.append("\n" + (paste or "The compiler refused all of them."))
    return {"candidates": candidates, "estimated": estimated, "best": best}, view


def _capacity(planned: _Planned, where: Slice, width: int, tries: int) -> dict[str, Any]:
    """The largest model with its predicted step and the command that plans it; prints every attempt as it comes."""
    from affinage.pipeline.models import command
    from affinage.planning.compiled import FAX, capacity, shape

    if "blocks" not in planned.loaded.recipe.model["nodes"]:
        fix = "affinage plan capacity --width ..."
        raise UserError(f"{planned.name} has no node `blocks`", where="--width", fix=fix)

    def progress(layers: int, parameters: int, report: "CompileReport") -> None:
        print(f"{layers} layers, {parameters / 1e9:.1f}B: {_verdict(report)}", file=sys.stderr, flush=True)

    settings = [*shape(width, where), *planned.overrides]
    _compiling(where)
    reports, layers, chosen, made = capacity(planned.file, settings, where, tries=tries, on_attempt=progress)
    facts: dict[str, Any] = {"layers": layers, "parameters": made.facts.parameters}
    facts["predicted_seconds"] = made.time.seconds
    if (where.name, width) in FAX:  # its feed-forward width and heads are not published
        parameters, seconds = FAX[where.name, width]
        facts["FAX"] = {"parameters": parameters, "seconds": seconds, "ratio": made.facts.parameters / parameters}
    words = [word for each in chosen for word in ("--set", each)]
    facts |= {"attempts": {tried: vars(report) for tried, report in reports.items()}, "overrides": chosen}
    return facts | {"command": command("plan", planned.name, "--on", where.name, *words)}
