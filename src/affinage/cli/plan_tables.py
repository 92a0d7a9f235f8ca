"""A plan as tables: what a step needs and takes, and slices beside each other."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from affinage.cli.terminal import counted, screen
from affinage.durations import duration

if TYPE_CHECKING:
    from affinage.hardware.chips import Chip
    from affinage.planning.compiled import Verdict
    from affinage.planning.left_out import LeftOut
    from affinage.planning.plan import Plan

_MENTIONED = 0.02  # share of a step above which it is said that sums are made again in every micro-batch


def show_plan(made: "Plan", verdict: "Verdict | None", extent: str) -> None:
    """Print what a training needs and takes, part by part, and what the compiler said of it.

    `extent` says what of the recipe that is.
    """
    console = screen()
    for line in (*_heading(made), extent, "", *_facts(made)):
        console.print(line, markup=False)
    console.print()
    console.print(_memory_table(made), markup=False)
    for line in _verdict_lines(made, verdict) if verdict else ():
        console.print(line, markup=False)
    console.print()
    console.print(_time_table(made), markup=False)
    if made.time.collectives:
        along = ", ".join(f"{axis} {seconds:.4f}" for axis, seconds in made.time.collectives.items())
        console.print(f"seconds of collectives along each axis of the mesh: {along}", markup=False)
    if made.time.again > _MENTIONED * made.time.seconds:
        beyond = f"{made.time.again:.4f} s of it ({made.time.again / made.time.seconds:.0%})"
        console.print(f"gradients are summed over devices in every micro-batch or tick: {beyond}", markup=False)
    for line in _outcome(made):
        console.print(line, markup=False)
    for warning in made.warnings:
        console.print(f"\nWarning: {warning}", markup=False)
    if made.contradictions:
        console.print("\nClaims that cannot be true:", markup=False)
    for found in made.contradictions:
        console.print(f"  {found.claim}: {found.what}" + (f"; {found.reading}" if found.reading else ""), markup=False)


def _heading(made: "Plan") -> list[str]:
    where = made.where
    mesh = ", ".join(f"{axis} {size}" for axis, size in made.split.sizes.items() if size > 1) or "one device"
    shape = "x".join(map(str, where.shape)) + (f" in each of {where.slices} slices" if where.slices > 1 else "")
    chosen = [f"{made.choice}"] if made.choice else []
    chips = f"{where.chips} × {where.chip.name} ({shape}), {counted(where.devices, 'device')}, hosts: {where.hosts}"
    return [f"{made.recipe} on {where.name}: {chips}; mesh: {mesh}", *_measured(where.chip), *chosen]


def _measured(chip: "Chip") -> list[str]:
    """What was measured of a processor: no datasheet has it, and another day or machine gives another plan."""
    if not chip.float32_flops or not chip.memory_bandwidth or chip.bfloat16_flops:
        return []
    rates = f"{chip.float32_flops / 1e9:,.0f} GFLOP/s in products, {chip.memory_bandwidth / 1e9:,.0f} GB/s of memory"
    return [f"measured just now: {rates}; {chip.achievable:.0%} of the products' rate is taken to be reached"]


def _facts(made: "Plan") -> list[str]:
    facts = made.facts
    lines = [
        f"{made.section}: {counted(facts.steps, 'step')} × {counted(facts.rows, 'row')} × {facts.context:,} tokens = "
        f"{facts.tokens:,} tokens, {facts.tokens_per_parameter:.3g} for each of {facts.active:,} parameters"
        + (f" ({facts.parameters:,} in all)" if facts.active != facts.parameters else ""),
        f"{facts.flops:.3g} FLOPs to train, counted node by node; 6·N·D = {facts.flops_by_rule:.3g}",
        f"warm-up: {counted(facts.warmup, 'step')}, {facts.warmup / facts.steps:.1%}",
    ]
    if facts.epochs is not None:
        lines.append(f"{facts.epochs:.2f} epochs over {facts.data_tokens:,} tokens of training data")
    return lines


def _memory_table(made: "Plan") -> Any:
    from rich.table import Table

    from affinage.hardware.slices import memory_text

    memory = made.memory
    table = Table(box=None, pad_edge=False)
    table.add_column("memory of a device")
    table.add_column("", justify="right")
    rows = {
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
    for name, size in rows.items():
        if size:
            table.add_row(name, memory_text(size))
    table.add_row(f"estimate: {'fits' if made.fits else 'does not fit'}", memory_text(memory.total))
    table.add_row("a program may take", memory_text(made.capacity))
    if memory.host:
        table.add_row("beside it, in the host's memory", memory_text(memory.host))
    return table


def _verdict_lines(made: "Plan", verdict: "Verdict") -> list[str]:
    from affinage.hardware.slices import memory_text

    if not verdict.fits:
        needed = f" It would need {memory_text(verdict.peak_bytes)}." if verdict.peak_bytes else ""
        return [f"compiler: does not fit, after {verdict.seconds:.0f} s.{needed}", f"  {verdict.message}"]
    found, looped = verdict.collectives, verdict.looped or {}
    each = [
        f"{n} {name}" + (f" ({looped[name]} in loops)" if name in looped else "") for name, n in (found or {}).items()
    ]
    counts = "could not be read" if found is None else ", ".join(each) or "none"
    return [
        f"compiler: fits, {memory_text(verdict.peak_bytes)} after {verdict.seconds:.0f} s; "
        f"the estimate is {made.memory.total / verdict.peak_bytes - 1:+.1%} off",
        f"  collectives in the program (a loop's count once): {counts}",
    ]


def _time_table(made: "Plan") -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("seconds of a step")
    for title in ("compute", "memory", "links, hidden", "links, waited for", "takes"):
        table.add_column(title, justify="right")
    table.add_column("bound by")
    for node in made.time.nodes:
        parts = (node.compute, node.memory, node.hidden, node.exposed, node.seconds)
        table.add_row(node.name, *(f"{part:.4f}" for part in parts), node.bound)
    for name, seconds in (("sums over micro-batches", made.time.adding), ("update of the weights", made.time.update)):
        if seconds:
            table.add_row(name, "", f"{seconds:.4f}", "", "", f"{seconds:.4f}", "memory")
    if made.time.bubble:
        table.add_row("pipeline bubble", "", "", "", "", f"{made.time.bubble:.4f}", "")
    table.add_row("step", "", "", "", "", f"{made.time.seconds:.4f}", made.time.bound)
    return table


def _outcome(made: "Plan") -> list[str]:
    speed = f"\n{'' if made.fits else 'if it fitted: '}{made.tokens_per_second:,.0f} tokens/s"
    if made.mfu is not None:
        speed += f", an MFU of {made.mfu:.0%}"
    cost = ""
    if made.cost is not None:
        source = f" ({made.price_source})" if made.price_source else ""
        cost = f", ${made.cost:,.0f} at ${made.price:,.2f} per chip and hour{source}"
    return [f"{speed}; {duration(made.seconds)} in all{cost}"]


def show_comparison(found: list[Any], as_json: bool, left_out: "Sequence[LeftOut]" = ()) -> None:
    """Print a line for every slice, and what would make those do that do not; or all as JSON."""
    from rich.table import Table

    from affinage.hardware.slices import memory_text

    refused = [entry for entry in found if isinstance(entry, tuple)]
    plans = [entry for entry in found if not isinstance(entry, tuple)]
    if as_json:
        no = [{"slice": where.name, "error": error.what, "fix": error.fix} for where, error in refused]
        print(json.dumps({"plans": [made.to_dict() for made in plans], "refused": no}, indent=1))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("slice")
    for title in (
        "chips",
        "fits",
        "of a device",
        "may take",
        "step",
        "tokens/s",
        "MFU",
        "in all",
        "cost",
        "of 1e9 tokens",
    ):
        table.add_column(title, justify="right")
    table.add_column("bound by")
    for made in plans:
        table.add_row(
            made.where.name,
            str(made.where.chips),
            "nearly" if made.nearly_full else "yes" if made.fits else "no",
            memory_text(made.memory.total),
            memory_text(made.capacity),
            f"{made.time.seconds:.3g} s",
            f"{made.tokens_per_second:,.0f}",
            f"{made.mfu:.0%}" if made.mfu else "",
            duration(made.seconds),
            *(f"${cost:,.2f}" if cost is not None else "" for cost in (made.cost, made.cost_per_billion)),
            made.time.bound,
        )
    console = screen()
    console.print(table, markup=False)
    if any(made.nearly_full for made in plans):
        console.print(
            "nearly: it takes more than 90 % of what it may; the estimate can be off by as much", markup=False
        )
    tokens = [made.facts.tokens for made in plans]
    if len(set(tokens)) > 1:
        text = f"Rows are given per device: in all, {min(tokens):,} to {max(tokens):,} tokens. Compare the last cost."
        console.print(text, markup=False)
    for source in dict.fromkeys(made.price_source for made in plans):
        chips = ", ".join(dict.fromkeys(made.where.chip.name for made in plans if made.price_source == source))
        console.print(f"Cost of {chips}: {source or 'hardware.price of the recipe'}", markup=False)
    remedies: dict[str, list[str]] = {}
    for made in plans:
        if not made.fits:
            remedies.setdefault(made.warnings[0].partition("; ")[2], []).append(made.where.name)
    for remedy, names in remedies.items():
        console.print(f"Too small: {', '.join(names)}\n  {remedy}", markup=False)
    for one in left_out:
        console.print(f"Left out: {', '.join(one.slices)}\n  {one.what}; {one.fix}", markup=False)
