"""The verb `plan`: whether a run fits a slice, how long it takes and what it costs, before the slice is rented."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from affinage.cli import terminal
from affinage.cli.terminal import app, counted, emit, load, opt, table, working
from affinage.durations import duration
from affinage.errors import UserError
from affinage.hardware.chips import Slice, find_slice, memory_text

if TYPE_CHECKING:
    from affinage.config.load import LoadedRecipe
    from affinage.model import Graph
    from affinage.planning.compiled import CompileReport
    from affinage.planning.plan import Plan, Training

_Answer = tuple[dict[str, Any], Iterable[Any]]  # the facts, and lines and tables for people
_BEST = 3  # settings that --search prints
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

    affinage plan capacity --on v4-128 --width 10240
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # planning must not take the accelerator that something else trains on
    modes: dict[str, Any] = {"--which": which, "--width": width, "--curve": curve, "--search": search}
    modes |= {"--compile": compile_step and not (search or width), "--on": which and on}
    names = [name for name, wanted in modes.items() if wanted]
    if len(names) > 1:
        raise UserError(f"{' and '.join(names)} do not go together", where=names[0], fix=f"Leave out {names[1]}.")
    named = None if on is None else find_slice(on)
    overrides = overrides or []
    if on and any(each.startswith("hardware.price=") for each in overrides):  # of the chips that are planned for
        overrides = [f"hardware.slice={on}", *overrides]
    planned = _planned(recipe, overrides, training, runs)
    from affinage.planning.plan import default_slice, make_plan

    where = named or default_slice(planned.loaded.recipe)
    facts: dict[str, Any]
    view: Iterable[Any]
    if which:
        facts, view = _which(planned)
    elif width is not None:
        facts, view = _capacity(planned, where, width, tries)
    elif curve:
        from affinage.planning.search import curve as scaled

        facts, rows = {"curve": []}, []
        for made, efficiency in scaled(planned.loaded.recipe, planned.graph, curve, where):
            facts["curve"].append(made.to_dict() | {"efficiency": efficiency})
            columns = ("slice", "chips", "rows", "mesh", "step", "tokens/s", "MFU", "total", "cost", "bound by")
            rows.append(_row(made, *columns) | {"of ideal": f"{efficiency:.0%}"})
        view = [table(rows)]
    elif search:
        facts, view = _search(planned, where, compile_step)
    else:
        made = make_plan(planned.loaded.recipe, planned.graph, where, planned.data_tokens)
        report = planned.compiled(where) if compile_step else None
        facts = made.to_dict() | ({"compiled": vars(report)} if report else {})
        view = _plan_view(made, report, planned.extent)
    emit(facts, as_json, view)


@dataclass(frozen=True)
class _Planned:
    """A training that is to be planned."""

    name: str  # of the recipe, as the user gave it
    file: str
    overrides: list[str]
    loaded: "LoadedRecipe"
    graph: "Graph"
    data_tokens: int | None
    extent: str  # what of the recipe is planned, and what is not

    def compiled(self, where: Slice, overrides: Sequence[str] = ()) -> "CompileReport":
        """The compiler's report of a step, with further overrides."""
        from affinage.planning.compiled import compile_on

        with working(f"the compiler of {where.name}"):
            return compile_on(self.file, [*self.overrides, *overrides], where)


def _planned(name: str, overrides: list[str], training: "Training | None", runs: Path) -> _Planned:
    # Before JAX is imported, so that mistakes are found at once.
    loaded, of_run = load(name, overrides, runs, lenient=True)
    from affinage.config.load import load_recipe
    from affinage.pipeline.models import RECIPE, ROWS
    from affinage.planning.plan import only, planned_graph, training_settings
    from affinage.registry import load_plugins
    from affinage.results import SequencesResult, TokenizerResult, read_result
    from affinage.training.optimizer import check_choices

    run = of_run or runs / loaded.recipe.name
    file = str(loaded.path if of_run is None else run / RECIPE)
    changed = [*overrides, *(only(training, loaded.recipe) if training else ())]
    tokenizer = read_result(run / "train-tokenizer", TokenizerResult)
    if tokenizer and tokenizer.vocabulary and loaded.recipe.tokenizer.kind == "char":  # one id for each character
        nodes = loaded.recipe.model.get("nodes")
        named = nodes.items() if isinstance(nodes, dict) else ()  # what is wrong with others is reported below
        automatic = [node for node, layer in named if isinstance(layer, dict) and layer.get("vocab") == "auto"]
        changed += [f"model.nodes.{node}.vocab={tokenizer.vocabulary}" for node in automatic]
    if changed != overrides:
        loaded = load_recipe(file, changed, left_out=None if of_run is None else [])
    load_plugins(loaded)
    section, settings, _ = training_settings(loaded.recipe)
    check_choices(settings, lambda path: loaded.locate((section, *path)))
    packed = read_result(run / ROWS[section], SequencesResult)
    tokens = packed.train.tokens if packed else None
    others = ["the data"] if loaded.recipe.data is not None and tokens is None else []
    others += [f"{each} (--training {each})" for each in loaded.recipe.trainings if each != section]
    extent = f"planned: {section}" + (f"; not planned: {', '.join(others)}" if others else "")
    return _Planned(name, file, changed, loaded, planned_graph(loaded), tokens, extent)


def _plan_view(made: "Plan", report: "CompileReport | None", extent: str) -> Iterator[Any]:
    """What a training needs and takes, part by part, and the compiler's report; `extent` is the part of the recipe."""
    from affinage.data.dataloader import repetition

    where, facts, memory, time = made.where, made.facts, made.memory, made.time
    shape = "x".join(map(str, where.shape))
    chips = f"{where.chips} × {where.chip.name} ({shape}), {counted(where.devices, 'device')}, hosts: {where.hosts}"
    yield f"{made.recipe.name} on {where.name}: {chips}; mesh: {_mesh(made.device.sizes) or 'one device'}"
    yield f"{extent}\n"
    whole = f" ({facts.parameters:,} in total)" if facts.active != facts.parameters else ""
    steps = f"{counted(facts.steps, 'step')} × {counted(facts.rows, 'row')} × {facts.context:,} tokens"
    ratio = f"{facts.tokens_per_parameter:,.1f} for each of {facts.active:,} parameters{whole}"
    yield f"{made.section}: {steps} = {facts.tokens:,} tokens, {ratio}"
    yield f"{facts.flops:.3g} FLOPs to train, counted node by node; 6·N·D = {facts.flops_by_rule:.3g}"
    if facts.epochs is not None:
        yield f"{facts.epochs:.2f} epochs over {facts.data_tokens:,} tokens of training data"
        yield from [f"{made.section} {advice}"] if (advice := repetition(facts.epochs)) else []
    disk = memory_text(made.save_bytes * (made.recipe.runtime.checkpoint.keep_last + 1))
    yield f"a checkpoint takes {memory_text(made.save_bytes)}; those that are kept and the next take {disk} of disk\n"
    parts = {name.replace("_", " "): size for name, size in asdict(memory).items() if size}
    parts |= {f"estimate: {'fits' if made.fits else 'does not fit'}": memory.total, "a program may take": made.capacity}
    yield table([{"memory of a device": name, "": memory_text(size)} for name, size in parts.items()])
    if report is not None:
        peak = memory_text(report.peak_bytes) if report.peak_bytes else "memory unknown"
        off = f"the estimate is {memory.total / report.peak_bytes - 1:+.1%} off" if report.fits else report.message
        yield f"compiler: {'fits' if report.fits else 'does not fit'}, {peak}; {off}"
        for name, counts in (("collectives", report.collectives), ("attention", report.attention)):
            if counts is not None:
                yield f"  {name} in the program: {', '.join(f'{n} {kind}' for kind, n in counts.items()) or 'none'}"
    yield ""
    columns = {"compute": "compute", "memory": "memory", "launches": "launches", "hidden": "links, hidden"}
    columns |= {"exposed": "links, waited for", "seconds": "takes"}
    if where.platform != "gpu":
        columns.pop("launches")
    rows = [
        {"seconds of a step": node.name}
        | {title: f"{getattr(node, part):.4f}" for part, title in columns.items()}
        | {"bound by": node.bound}
        for node in time.nodes
        if node.seconds
    ]
    others = [("update of the weights", time.update, "memory"), ("sums over micro-batches", time.adding, "")]
    others += [("bubble", time.bubble, ""), ("step", time.seconds, time.bound)]
    blank = dict.fromkeys(["seconds of a step", *columns.values()], "")
    rows += [
        blank | {"seconds of a step": name, "takes": f"{seconds:.4f}", "bound by": bound}
        for name, seconds, bound in others
        if seconds
    ]
    yield table(rows)
    mfu = "" if made.mfu is None else f", an MFU of {made.mfu:.0%}"
    cost = "" if made.cost is None else f", ${made.cost:,.0f} at ${made.price:,.2f} per chip and hour"
    if cost and made.price != made.recipe.hardware.price:
        cost += " (remembered in 2025; set hardware.price)"
    speed = f"{made.tokens_per_second:,.0f} tokens/s{mfu}; {duration(made.seconds)} in total{cost}"
    yield "\n" + ("" if made.fits else "if it fitted: ") + speed
    yield from (f"\nWarning: {warning}" for warning in made.warnings)
    yield from ["\nClaims that cannot be true:"] if made.contradictions else []
    yield from (f"  {claim}: {what}" for claim, what in made.contradictions.items())


def _mesh(sizes: Any) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)


def _row(made: "Plan", *columns: str) -> dict[str, Any]:
    """The cells of a plan in a table of plans, for some columns."""
    cells = {
        "slice": made.where.name,
        "chips": made.where.chips,
        "mesh": _mesh(made.device.sizes),
        "rows": made.device.rows,
        "fits": "nearly" if made.nearly_full else "yes" if made.fits else "no",
        "of a device": memory_text(made.memory.total),
        "may take": memory_text(made.capacity),
        "step": f"{made.time.seconds:.4g} s",
        "tokens/s": f"{made.tokens_per_second:,.0f}",
        "MFU": f"{made.mfu:.0%}" if made.mfu else "",
        "total": duration(made.seconds),
        "cost": "" if made.cost is None else f"${made.cost:,.2f}",
        "of 1e9 tokens": "" if made.cost_per_billion is None else f"${made.cost_per_billion:,.2f}",
        "bound by": made.time.bound,
    }
    return {column: cells[column] for column in columns}


def _which(planned: _Planned) -> _Answer:
    """The plan on every slice, those that fit first, and the slices that the recipe cannot be split over."""
    from affinage.planning.plan import compare

    with working("planning"):
        plans, refused = compare(planned.loaded.recipe, planned.graph)
    columns = ("slice", "chips", "fits", "of a device", "may take", "step", "tokens/s", "MFU", "total", "cost")
    rows = [_row(made, *columns, "of 1e9 tokens", "bound by") for made in plans]
    view = [f"{planned.loaded.recipe.name}; {planned.extent}\n", table(rows)]
    view += [f"\nLeft out: {len(refused)} of {len(plans) + len(refused)} slices."] if refused else []
    for setting in dict.fromkeys(error.where for _, error in refused):
        names, errors = zip(*((where.name, error) for where, error in refused if error.where == setting))
        view.append(f"  {setting}: {', '.join(names)}. The first of them: {errors[0].what}. {errors[0].fix}")
    facts = [{"slice": where.name, "error": error.what, "fix": error.fix} for where, error in refused]
    return {"plans": [made.to_dict() for made in plans], "refused": facts}, view


def _search(planned: _Planned, where: Slice, compile_step: bool) -> _Answer:
    """The best settings, with the compiler's report of each where the step is compiled."""
    import yaml

    from affinage.planning.search import search

    recipe = planned.loaded.recipe
    with working("searching") as progress:
        best, candidates, estimated = search(recipe, planned.graph, where, _BEST, progress)
    rows: list[dict[str, Any]] = []
    facts: list[dict[str, Any]] = []
    paste = ""
    for candidate, made in best:
        facts.append({"settings": candidate.settings(recipe), "plan": made.to_dict()})
        rows.append({"mesh": _mesh(candidate.sizes), "micro-batches": candidate.micro_batches})
        rows[-1] |= {"remat": candidate.remat} | _row(made, "step", "MFU", "of a device", "may take", "bound by")
        report = planned.compiled(where, candidate.overrides(recipe)) if compile_step else None
        if report is not None:
            facts[-1]["compiled"] = vars(report)
            rows[-1]["compiler"] = f"{'fits' if report.fits else 'refuses'}, {memory_text(report.peak_bytes)}"
        if not paste and (report is None or report.fits):
            lines = yaml.safe_dump(facts[-1]["settings"], sort_keys=False, default_flow_style=None)
            paste = f"The best of them, to paste into the recipe:\n\n{lines.rstrip()}"
    ways = f"{recipe.name} on {where.name}: {candidates:,} ways to split it, in full: {estimated}\n"
    view = [ways, table(rows)]
    if best[0][1].nearly_full and not compile_step:
        view.append("\nMore than 90 % of a device's memory, by the estimate: check whether they fit, with --compile.")
    view.append("\n" + (paste or "The compiler refused all of them."))
    return {"candidates": candidates, "estimated": estimated, "best": facts}, view


def _capacity(planned: _Planned, where: Slice, width: int, tries: int) -> _Answer:
    """The largest model with its predicted step and the command that plans it; prints every attempt as it comes."""
    from affinage.pipeline.models import command
    from affinage.planning.compiled import FAX, capacity, shape

    if "blocks" not in planned.loaded.recipe.model["nodes"]:
        fix = "affinage plan capacity --width ..."
        raise UserError(f"{planned.name} has no node `blocks`", where="--width", fix=fix)

    def progress(layers: int, parameters: int, report: "CompileReport") -> None:
        fits = f"{'fits' if report.fits else 'refused'}, {memory_text(report.peak_bytes)}"
        print(f"{layers} layers, {parameters / 1e9:.1f}B: {fits}", file=sys.stderr, flush=True)

    settings = [*shape(width, where), *planned.overrides]
    reports, layers, chosen, made = capacity(planned.file, settings, where, tries=tries, on_attempt=progress)
    facts: dict[str, Any] = {"layers": layers, "parameters": made.facts.parameters, "seconds": made.time.seconds}
    model = f"{made.facts.parameters / 1e9:.1f}B parameters, {layers} layers of width {width}"
    view = [f"\n{where.name}: {model}; predicted: {made.time.seconds:.2f} s a step"]
    if (where.name, width) in FAX:  # its feed-forward width and heads are not published
        parameters, seconds = FAX[where.name, width]
        facts["times_fax"] = made.facts.parameters / parameters
        times = f"{facts['times_fax']:.2f} times as many"
        view.append(f"FAX reached {parameters / 1e9:.1f}B at {seconds:.2f} s a step: {times}.")
    words = [word for each in chosen for word in ("--set", each)]
    view.append("\n" + command("plan", planned.name, "--on", where.name, *words))
    facts |= {"overrides": chosen, "attempts": {tried: vars(report) for tried, report in reports.items()}}
    return facts, view
