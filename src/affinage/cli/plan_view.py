"""What `affinage plan` prints: what a step needs and takes, slices side by side, the best settings, a curve."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from affinage.cli.output import Table, counted
from affinage.durations import duration
from affinage.hardware.slices import memory_text

if TYPE_CHECKING:
    from affinage.config.recipe import Recipe
    from affinage.errors import UserError
    from affinage.hardware.slices import Slice
    from affinage.planning.capacity import Capacity
    from affinage.planning.compiled import CompileReport
    from affinage.planning.curve import Point
    from affinage.planning.plan import Plan
    from affinage.planning.search import Candidate

    View = Iterator[str | Table]
    SearchRow = tuple[Candidate, Plan, CompileReport | None]

_CELLS: "dict[str, Callable[[Plan], Any]]" = {  # column of a table of plans -> what is in it
    "slice": lambda made: made.where.name,
    "chips": lambda made: str(made.where.chips),
    "rows": lambda made: made.device.rows,
    "mesh": lambda made: _mesh(made.device.sizes),
    "fits": lambda made: "nearly" if made.nearly_full else "yes" if made.fits else "no",
    "of a device": lambda made: memory_text(made.memory.total),
    "may take": lambda made: memory_text(made.capacity),
    "step": lambda made: f"{made.time.seconds:.4g} s",
    "tokens/s": lambda made: f"{made.tokens_per_second:,.0f}",
    "MFU": lambda made: f"{made.mfu:.0%}" if made.mfu else "",
    "total": lambda made: duration(made.seconds),
    "days": lambda made: f"{made.seconds / 86_400:.2f}",
    "cost": lambda made: _dollars(made.cost),
    "of 1e9 tokens": lambda made: _dollars(made.cost_per_billion),
    "bound by": lambda made: made.time.bound,
}


def _dollars(amount: float | None) -> str:
    return "" if amount is None else f"${amount:,.2f}" if amount < 1000 else f"${amount:,.0f}"


def _cells(made: "Plan", columns: Sequence[str]) -> tuple[Any, ...]:
    return tuple(_CELLS[column](made) for column in columns)


def _mesh(sizes: Any) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)


def plan_view(made: "Plan", report: "CompileReport | None", extent: str) -> "View":
    """What a training needs and takes, part by part, and the compiler's report; `extent` is the part of the recipe."""
    where, facts, memory, time, chip = made.where, made.facts, made.memory, made.time, made.where.chip
    shape = "x".join(map(str, where.shape)) + (f" in each of {where.slices} slices" if where.slices > 1 else "")
    chips = f"{where.chips} × {chip.name} ({shape}), {counted(where.devices, 'device')}, hosts: {where.hosts}"
    yield f"{made.recipe} on {where.name}: {chips}; mesh: {_mesh(made.device.sizes) or 'one device'}"
    if where.platform == "cpu" and chip.float32_flops and chip.memory_bandwidth:
        flops, bandwidth = chip.float32_flops / 1e9, chip.memory_bandwidth / 1e9
        assumed = f"{chip.achievable:.0%} of the former is assumed to be reached"
        yield f"measured just now: {flops:,.0f} GFLOP/s in products, {bandwidth:,.0f} GB/s of memory; {assumed}"
    yield from [str(made.choice)] if made.choice else []
    yield f"{extent}\n"
    whole = f" ({facts.parameters:,} in total)" if facts.active != facts.parameters else ""
    steps = f"{counted(facts.steps, 'step')} × {counted(facts.rows, 'row')} × {facts.context:,} tokens"
    ratio = f"{facts.tokens_per_parameter:,.1f} for each of {facts.active:,} parameters{whole}"
    yield f"{made.section}: {steps} = {facts.tokens:,} tokens, {ratio}"
    yield f"{facts.flops:.3g} FLOPs to train, counted node by node; 6·N·D = {facts.flops_by_rule:.3g}"
    yield f"warm-up: {counted(facts.warmup, 'step')}, {facts.warmup / facts.steps:.1%}"
    if facts.epochs is not None:
        yield f"{facts.epochs:.2f} epochs over {facts.data_tokens:,} tokens of training data"
    disk = memory_text(made.save_bytes * (made.saves + 1))
    yield f"a checkpoint takes {memory_text(made.save_bytes)}; those that are kept and the next take {disk} of disk\n"
    parts = {name.replace("_", " "): size for name, size in asdict(memory).items() if size and name != "host"}
    parts |= {f"estimate: {'fits' if made.fits else 'does not fit'}": memory.total, "a program may take": made.capacity}
    parts |= {"beside it, in the host's memory": memory.host} if memory.host else {}
    yield Table(("memory of a device", ""), [(name, memory_text(size)) for name, size in parts.items()])
    yield from _report_lines(made, report) if report else ()
    yield ""
    rows: list[Sequence[Any]] = []
    for node in time.nodes:
        seconds = (node.compute, node.memory, node.hidden, node.exposed, node.seconds)
        rows += [(node.name, *(f"{part:.4f}" for part in seconds), node.bound)] if node.seconds else []
    others = {"sums over micro-batches": time.adding, "update of the weights": time.update, "bubble": time.bubble}
    rows += [(name, "", "", "", "", f"{spent:.4f}", "") for name, spent in others.items() if spent]
    rows.append(("step", "", "", "", "", f"{time.seconds:.4f}", time.bound))
    columns = ("seconds of a step", "compute", "memory", "links, hidden", "links, waited for", "takes", "bound by")
    yield Table(columns, rows, left=(0, 6))
    if time.collectives:
        along = ", ".join(f"{axis} {spent:.4f}" for axis, spent in time.collectives.items())
        yield f"seconds of collectives along each axis of the mesh: {along}"
    speed = f"\n{'' if made.fits else 'if it fitted: '}{made.tokens_per_second:,.0f} tokens/s"
    speed += "" if made.mfu is None else f", an MFU of {made.mfu:.0%}"
    source = f" ({made.price_source})" if made.price_source else ""
    cost = "" if made.cost is None else f", ${made.cost:,.0f} at ${made.price:,.2f} per chip and hour{source}"
    yield f"{speed}; {duration(made.seconds)} in total{cost}"
    yield from (f"\nWarning: {warning}" for warning in made.warnings)
    yield from ["\nClaims that cannot be true:"] if made.contradictions else []
    for found in made.contradictions:
        yield f"  {found.claim}: {found.what}" + (f"; {found.reading}" if found.reading else "")


def _report_lines(made: "Plan", report: "CompileReport") -> Iterator[str]:
    if report.fits:
        off = f"the estimate is {made.memory.total / report.peak_bytes - 1:+.1%} off"
        yield f"compiler: fits, {memory_text(report.peak_bytes)} after {report.seconds:.0f} s; {off}"
    else:
        needed = f" It would need {memory_text(report.peak_bytes)}." if report.peak_bytes else ""
        yield f"compiler: does not fit, after {report.seconds:.0f} s.{needed} {report.message}".rstrip()
    if report.collectives is not None:
        looped = report.looped or {}
        each = [
            f"{count} {name}" + (f" ({looped[name]} in loops)" if name in looped else "")
            for name, count in report.collectives.items()
        ]
        yield f"  collectives in the program (a loop's count once): {', '.join(each) or 'none'}"
    if report.attention is not None and made.where.platform != "cpu":
        kernels = ", ".join(f"{count} {name}" for name, count in report.attention.items())
        yield f"  attention in the program: {kernels or 'matrix products over all pairs, without a kernel'}"


def comparison_view(plans: "Sequence[Plan]", refused: "Sequence[tuple[Slice, UserError]]" = ()) -> "View":
    """A line for every slice, and why others are left out."""
    columns = ("slice", "chips", "fits", "of a device", "may take", "step", "tokens/s", "MFU", "total", "cost")
    whole = (*columns, "of 1e9 tokens", "bound by")
    yield Table(whole, [_cells(made, whole) for made in plans], left=(0, 11))
    if any(made.nearly_full for made in plans):
        yield "nearly: it takes more than 90 % of what it may; the estimate can be off by as much"
    tokens = [made.facts.tokens for made in plans]
    if len(set(tokens)) > 1:
        yield f"Rows are given per device: {min(tokens):,} to {max(tokens):,} tokens in total. Compare the last cost."
    for source in dict.fromkeys(made.price_source for made in plans):
        chips = ", ".join(dict.fromkeys(made.where.chip.name for made in plans if made.price_source == source))
        yield f"Cost of {chips}: {source or 'hardware.price of the recipe'}"
    reasons: dict[str, list[tuple[Slice, UserError]]] = {}
    for where, error in refused:
        reasons.setdefault(str(error.where), []).append((where, error))
    for same in reasons.values():
        names, (where, error) = ", ".join(each.name for each, _ in same), same[0]
        yield f"Left out: {names}\n  on {where.name}: {error.what}. {error.fix}"


def curve_view(points: "Sequence[Point]", first: "Slice") -> "View":
    """A line for each slice, and one if the curve does not begin at `first`, the requested slice."""
    before, after = ("slice", "chips", "rows", "mesh", "step", "tokens/s", "MFU"), ("days", "cost")
    rows = [(*_cells(p.plan, before), f"{p.efficiency:.0%}", *_cells(p.plan, after), p.why) for p in points]
    yield Table((*before, "of ideal", *after, "a step is"), rows)
    begin = points[0].plan.where.name
    if begin != first.name:
        yield f"The curve begins at {begin}: on {first.name} the recipe fits with no mesh that was tried."


def search_view(rows: "Sequence[SearchRow]", recipe: "Recipe", section: str) -> "View":
    """The settings that a search found, and the best of them as lines for a recipe."""
    of_plan = ("step", "MFU", "of a device", "may take")
    lines = [
        (
            _mesh(candidate.sizes),
            str(candidate.micro_batches),
            candidate.remat,
            candidate.moments,
            *_cells(made, of_plan),
            "" if report is None else f"{'fits' if report.fits else 'refuses'}, {memory_text(report.peak_bytes)}",
            made.time.bound,
        )
        for candidate, made, report in rows
    ]
    yield Table(("mesh", "micro-batches", "remat", "moments", *of_plan, "compiler", "bound by"), lines, left=(0, 9))
    chosen = next((candidate for candidate, _, report in rows if report is None or report.fits), None)
    if chosen is None:
        yield "\nThe compiler refused all of them. Try more with --best."
        return
    if rows[0][1].time.seconds > min(made.time.seconds for _, made, _ in rows):
        yield "\nA percent or two is within the estimate's error: among such settings the simpler one comes first."
    yield f"\nThe best of them, to paste into the recipe:\n\n{chosen.lines(recipe, section)}"


def capacity_view(found: "Capacity", recipe: str, where: "Slice", width: int) -> "View":
    """The largest model of a width that trains on a slice, and the command that plans it."""
    from affinage.pipeline.models import command

    largest, fax = found.largest, found.fax
    yield f"\n{where.name}: {largest.parameters / 1e9:.1f}B parameters, {largest.layers} layers of width {width}"
    if fax:
        times = f"{largest.parameters / fax.parameters:.2f} times as many"
        assumed = "Its feed-forward width and heads are not published; those below are assumed."
        yield f"FAX reached {fax.parameters / 1e9:.1f}B at {fax.seconds:.2f} s a step: {times}. {assumed}"
    yield f"predicted: {found.plan.time.seconds:.2f} s a step, bound by {found.plan.time.bound}"
    settings = [word for override in found.overrides for word in ("--set", override)]
    yield "\n" + command("plan", recipe, "--on", where.name, *settings)
