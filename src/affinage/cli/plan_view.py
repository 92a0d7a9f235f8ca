"""What `affinage plan` prints: what a step needs and takes, slices beside each other, the best settings, a curve."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from affinage.cli.output import Table, counted
from affinage.durations import duration
from affinage.hardware.slices import memory_text

if TYPE_CHECKING:
    from affinage.config.recipe import Recipe
    from affinage.hardware.chips import Chip
    from affinage.hardware.slices import Slice
    from affinage.planning.capacity import Capacity
    from affinage.planning.compiled import Verdict
    from affinage.planning.curve import Point
    from affinage.planning.left_out import LeftOut
    from affinage.planning.plan import Plan
    from affinage.planning.search import Candidate

    View = Iterator[str | Table]
    SearchRow = tuple[Candidate, Plan, Verdict | None]

_MENTIONED = 0.02  # share of a step above which sums that are repeated in every micro-batch are mentioned
_CELLS: "dict[str, Callable[[Plan], Any]]" = {  # column of a table of plans -> what is in it
    "slice": lambda made: made.where.name,
    "chips": lambda made: str(made.where.chips),
    "rows": lambda made: made.split.rows,
    "mesh": lambda made: _mesh(made.split.sizes),
    "fits": lambda made: "nearly" if made.nearly_full else "yes" if made.fits else "no",
    "of a device": lambda made: memory_text(made.memory.total),
    "may take": lambda made: memory_text(made.capacity),
    "step": lambda made: f"{made.time.seconds:.4g} s",
    "tokens/s": lambda made: f"{made.tokens_per_second:,.0f}",
    "MFU": lambda made: f"{made.mfu:.0%}" if made.mfu else "",
    "in all": lambda made: duration(made.seconds),
    "days": lambda made: f"{made.seconds / 86_400:.2f}",
    "cost": lambda made: _dollars(made.cost),
    "of 1e9 tokens": lambda made: _dollars(made.cost_per_billion),
    "bound by": lambda made: made.time.bound,
}


def _dollars(amount: float | None) -> str:
    return "" if amount is None else f"${amount:,.2f}" if amount < 1000 else f"${amount:,.0f}"


def _cells(made: "Plan", columns: Sequence[str]) -> tuple[Any, ...]:
    return tuple(_CELLS[column](made) for column in columns)


def plan_view(made: "Plan", verdict: "Verdict | None", extent: str) -> "View":
    """What a training needs and takes, part by part, and the compiler's verdict; `extent` is the part of the recipe."""
    yield from (*_heading(made), extent, "", *_facts(made), "")
    yield _memory_table(made)
    yield from _verdict_lines(made, verdict) if verdict else ()
    yield ""
    yield _time_table(made)
    if made.time.collectives:
        along = ", ".join(f"{axis} {seconds:.4f}" for axis, seconds in made.time.collectives.items())
        yield f"seconds of collectives along each axis of the mesh: {along}"
    if made.time.again > _MENTIONED * made.time.seconds:
        beyond = f"{made.time.again:.4f} s of it ({made.time.again / made.time.seconds:.0%})"
        yield f"gradients are summed over devices in every micro-batch or tick: {beyond}"
    speed = f"\n{'' if made.fits else 'if it fitted: '}{made.tokens_per_second:,.0f} tokens/s"
    speed += "" if made.mfu is None else f", an MFU of {made.mfu:.0%}"
    source = f" ({made.price_source})" if made.price_source else ""
    cost = "" if made.cost is None else f", ${made.cost:,.0f} at ${made.price:,.2f} per chip and hour{source}"
    yield f"{speed}; {duration(made.seconds)} in all{cost}"
    yield from (f"\nWarning: {warning}" for warning in made.warnings)
    if made.contradictions:
        yield "\nClaims that cannot be true:"
    for found in made.contradictions:
        yield f"  {found.claim}: {found.what}" + (f"; {found.reading}" if found.reading else "")


def _heading(made: "Plan") -> list[str]:
    where = made.where
    mesh = _mesh(made.split.sizes) or "one device"
    shape = "x".join(map(str, where.shape)) + (f" in each of {where.slices} slices" if where.slices > 1 else "")
    chosen = [f"{made.choice}"] if made.choice else []
    chips = f"{where.chips} × {where.chip.name} ({shape}), {counted(where.devices, 'device')}, hosts: {where.hosts}"
    return [f"{made.recipe} on {where.name}: {chips}; mesh: {mesh}", *_measured(where.chip), *chosen]


def _mesh(sizes: Any) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)


def _measured(chip: "Chip") -> list[str]:
    """What was measured of a processor: no datasheet has it, and another day or machine gives another plan."""
    if not chip.float32_flops or not chip.memory_bandwidth or chip.bfloat16_flops:
        return []
    rates = f"{chip.float32_flops / 1e9:,.0f} GFLOP/s in products, {chip.memory_bandwidth / 1e9:,.0f} GB/s of memory"
    return [f"measured just now: {rates}; {chip.achievable:.0%} of the products' rate is assumed to be reached"]


def _facts(made: "Plan") -> "Iterator[str]":
    facts = made.facts
    whole = f" ({facts.parameters:,} in all)" if facts.active != facts.parameters else ""
    yield (
        f"{made.section}: {counted(facts.steps, 'step')} × {counted(facts.rows, 'row')} × {facts.context:,} tokens = "
        f"{facts.tokens:,} tokens, {facts.tokens_per_parameter:.3g} for each of {facts.active:,} parameters{whole}"
    )
    yield f"{facts.flops:.3g} FLOPs to train, counted node by node; 6·N·D = {facts.flops_by_rule:.3g}"
    yield f"warm-up: {counted(facts.warmup, 'step')}, {facts.warmup / facts.steps:.1%}"
    if facts.epochs is not None:
        yield f"{facts.epochs:.2f} epochs over {facts.data_tokens:,} tokens of training data"


def _memory_table(made: "Plan") -> Table:
    memory = made.memory
    sizes = {
        "weights": memory.weights,
        "weights that are not trained": memory.frozen,
        "optimizer": memory.optimizer,
        "averages": memory.averages,
        "batch": memory.batch,
        "weights in the products' dtype": memory.weight_copies,
        "gradients": memory.gradients,
        "activations": memory.activations,
        "logits at hand": memory.logits,
        "buffers of collectives": memory.buffers,
        "of the layer at hand": memory.working,
    }
    rows = [(name, memory_text(size)) for name, size in sizes.items() if size]
    rows.append((f"estimate: {'fits' if made.fits else 'does not fit'}", memory_text(memory.total)))
    rows.append(("a program may take", memory_text(made.capacity)))
    rows += [("beside it, in the host's memory", memory_text(memory.host))] if memory.host else []
    return Table(("memory of a device", ""), rows)


def _verdict_lines(made: "Plan", verdict: "Verdict") -> "Iterator[str]":
    if not verdict.fits:
        needed = f" It would need {memory_text(verdict.peak_bytes)}." if verdict.peak_bytes else ""
        yield f"compiler: does not fit, after {verdict.seconds:.0f} s.{needed}"
        yield f"  {verdict.message}"
        return
    looped = verdict.looped or {}
    each = [
        f"{count} {name}" + (f" ({looped[name]} in loops)" if name in looped else "")
        for name, count in (verdict.collectives or {}).items()
    ]
    counts = "could not be read" if verdict.collectives is None else ", ".join(each) or "none"
    off = f"the estimate is {made.memory.total / verdict.peak_bytes - 1:+.1%} off"
    yield f"compiler: fits, {memory_text(verdict.peak_bytes)} after {verdict.seconds:.0f} s; {off}"
    yield f"  collectives in the program (a loop's count once): {counts}"
    if verdict.attention is not None and made.where.platform != "cpu":
        kernels = ", ".join(f"{count} {name}" for name, count in verdict.attention.items())
        yield f"  attention in the program: {kernels or 'matrix products over all pairs, without a kernel'}"


def _time_table(made: "Plan") -> Table:
    rows: list[Sequence[str]] = []
    for node in made.time.nodes:
        parts = (node.compute, node.memory, node.hidden, node.exposed, node.seconds)
        rows.append((node.name, *(f"{part:.4f}" for part in parts), node.bound))
    for name, seconds in (("sums over micro-batches", made.time.adding), ("update of the weights", made.time.update)):
        if seconds:
            rows.append((name, "", f"{seconds:.4f}", "", "", f"{seconds:.4f}", "memory"))
    if made.time.bubble:
        rows.append(("pipeline bubble", "", "", "", "", f"{made.time.bubble:.4f}", ""))
    rows.append(("step", "", "", "", "", f"{made.time.seconds:.4f}", made.time.bound))
    columns = ("seconds of a step", "compute", "memory", "links, hidden", "links, waited for", "takes", "bound by")
    return Table(columns, rows, left=(0, 6))


def comparison_view(plans: "Sequence[Plan]", left_out: "Sequence[LeftOut]" = ()) -> "View":
    """A line for every slice, and what would make those do that do not."""
    columns = ("slice", "chips", "fits", "of a device", "may take", "step", "tokens/s", "MFU", "in all", "cost")
    whole = (*columns, "of 1e9 tokens", "bound by")
    yield Table(whole, [_cells(made, whole) for made in plans], left=(0, 11))
    if any(made.nearly_full for made in plans):
        yield "nearly: it takes more than 90 % of what it may; the estimate can be off by as much"
    tokens = [made.facts.tokens for made in plans]
    if len(set(tokens)) > 1:
        yield f"Rows are given per device: in all, {min(tokens):,} to {max(tokens):,} tokens. Compare the last cost."
    for source in dict.fromkeys(made.price_source for made in plans):
        chips = ", ".join(dict.fromkeys(made.where.chip.name for made in plans if made.price_source == source))
        yield f"Cost of {chips}: {source or 'hardware.price of the recipe'}"
    remedies: dict[str, list[str]] = {}
    for made in plans:
        if not made.fits:
            remedies.setdefault(made.warnings[0].partition("; ")[2], []).append(made.where.name)
    for remedy, names in remedies.items():
        yield f"Too small: {', '.join(names)}\n  {remedy}"
    for one in left_out:
        yield f"Left out: {', '.join(one.slices)}\n  {one.what}; {one.fix}"


def curve_view(points: "Sequence[Point]", first: "Slice") -> "View":
    """A line for each slice, and one where the curve does not begin at `first`, the slice that was asked for."""
    before, after = ("slice", "chips", "rows", "mesh", "step", "tokens/s", "MFU"), ("days", "cost")
    rows = [(*_cells(p.plan, before), f"{p.efficiency:.0%}", *_cells(p.plan, after), p.why) for p in points]
    yield Table((*before, "of ideal", *after, "a step is"), rows)
    begin = points[0].plan.where.name
    if begin != first.name:
        yield f"The curve begins at {begin}: on {first.name} the recipe fits with no mesh that was tried."


def search_rows(rows: "Sequence[SearchRow]") -> Table:
    """A line for each of the settings that a search found."""
    settings, of_plan = ("mesh", "micro-batches", "remat", "moments"), ("step", "MFU", "of a device", "may take")
    lines = [
        (
            ", ".join(f"{axis} {size}" for axis, size in candidate.sizes.items()),
            str(candidate.micro_batches),
            candidate.remat,
            candidate.moments,
            *_cells(made, of_plan),
            "" if verdict is None else f"{'fits' if verdict.fits else 'refuses'}, {memory_text(verdict.peak_bytes)}",
            made.time.bound,
        )
        for candidate, made, verdict in rows
    ]
    return Table((*settings, *of_plan, "compiler", "bound by"), lines, left=(0, 9))


def search_view(rows: "Sequence[SearchRow]", recipe: "Recipe", section: str) -> "View":
    """The settings that a search found, and the best of them as lines for a recipe."""
    yield search_rows(rows)
    chosen = next((candidate for candidate, _, verdict in rows if verdict is None or verdict.fits), None)
    if chosen is None:
        yield "\nThe compiler refused all of them. Look at more with --best."
        return
    if rows[0][1].time.seconds > min(made.time.seconds for _, made, _ in rows):
        yield "\nA percent or two is within the estimate's error: of such settings the simpler one stands first."
    yield f"\nThe best of them, to paste into the recipe:\n\n{chosen.lines(recipe, section)}"


def capacity_view(found: "Capacity", recipe: str, where: "Slice", width: int) -> "View":
    """The largest model of a width that trains on a slice, and the command that plans it."""
    from affinage.pipeline.names import command

    largest, fax = found.largest, found.fax
    yield f"\n{where.name}: {largest.parameters / 1e9:.1f}B parameters, {largest.layers} layers of width {width}"
    if fax:
        yield (
            f"FAX reached {fax.parameters / 1e9:.1f}B at {fax.seconds:.2f} s a step: "
            f"{largest.parameters / fax.parameters:.2f} times as many. Its feed-forward width and heads are not "
            "published; those below are assumed."
        )
    yield f"predicted: {found.plan.time.seconds:.2f} s a step, bound by {found.plan.time.bound}"
    settings = [word for override in found.overrides for word in ("--set", override)]
    yield "\n" + command("plan", recipe, "--on", where.name, *settings)
