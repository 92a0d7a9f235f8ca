"""`affinage plan`: whether a run fits a slice, how long it takes and what it costs, before the slice is rented."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from affinage.cli import completion
from affinage.cli.options import RUNS, JsonOption, RecipeArgument, RunsOption, SetOption, load
from affinage.cli.terminal import screen
from affinage.cli.working import Working
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.planning.compiled import Verdict
    from affinage.planning.plan import Plan
    from affinage.recipe.load import LoadedRecipe

_ROWS = {"pretrain": "rows", "sft": "conversations", "dpo": "preferences"}  # the stages that make a training's rows
_DAY, _HOUR = 86_400, 3600


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("plan")(plan)


def plan(
    recipe: RecipeArgument,
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

    affinage plan julian-sft --stage sft --set sft.lora.rank=16 --on h100

    affinage plan julian-600m --which

    affinage plan capacity --on v4-128 --width 10240
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # planning must not take the accelerator that something else trains on
    from affinage.hardware.slices import find_slice
    from affinage.planning.plan import (
        TRAININGS,
        compare,
        default_slice,
        dividing_batch,
        make_plan,
        micro_batches_that_keep,
        only,
        planned_graph,
        training_settings,
    )
    from affinage.stages.plugins import load_plugins
    from affinage.training.choices import check_choices

    loaded = load(recipe, overrides)
    if stage:
        overrides = [*(overrides or []), *only(stage, loaded.recipe)]
        loaded = load(recipe, overrides)
    load_plugins(loaded)
    section, settings, _ = training_settings(loaded.recipe)
    check_choices(settings, lambda path: loaded.locate((section, *path)))
    if width is not None:
        from affinage.cli.plan_capacity import capacity_and_show

        where = find_slice(on) if on else default_slice(loaded.recipe)
        capacity_and_show(recipe, overrides or [], where, width, tries, as_json)
        return
    vocabulary = _summary(runs, loaded, "tokenizer").get("vocabulary")
    data_tokens = _summary(runs, loaded, _ROWS[section]).get("train", {}).get("tokens")
    characters = loaded.recipe.tokenizer.kind == "characters"
    graph = planned_graph(loaded, vocabulary if characters else None, _documents(runs, loaded, section))
    if which:
        if on or compile_step or search:
            fix = "Leave out --on, --compile and --search."
            raise UserError("--which looks through all slices", where="--which", fix=fix)
        with Working("planning"):
            plans = compare(loaded.recipe, graph)
        _show_comparison(plans, as_json)
        return
    where = find_slice(on) if on else default_slice(loaded.recipe)
    if curve:
        from affinage.cli.plan_curve import show_curve
        from affinage.planning.curve import curve as scaled

        show_curve(scaled(loaded.recipe, graph, curve, where), as_json)
        return
    if search:
        from affinage.cli.plan_search import search_and_show

        search_and_show(recipe, overrides or [], loaded, graph, where, best, compile_step, as_json)
        return
    overrides = overrides or []
    batch = dividing_batch(loaded.recipe, where)
    if batch is not None:
        what = f"batch {settings.batch} does not divide over the mesh on {where.name}"
        change = f"{batch / (settings.batch or batch):.3g} times the tokens in as many steps"
        keeps = micro_batches_that_keep(loaded.recipe, where)
        other = f", or --set {section}.micro_batches={keeps}, which keeps the batch" if keeps else ""
        print(
            f"Warning: {what}; planned with {batch}, the nearest that does, and {change}: "
            f"--set {section}.batch={batch}{other}",
            file=sys.stderr,
        )
        overrides = [*overrides, f"{section}.batch={batch}"]
        loaded = load(recipe, overrides)
    made = make_plan(loaded.recipe, graph, where, data_tokens)
    verdict = _verdict(recipe, overrides, made) if compile_step else None
    if as_json:
        told: dict[str, Any] = made.to_dict()
        if verdict is not None:
            told["compiled"] = {**vars(verdict), "estimate_over_compiled": _ratio(made, verdict)}
        print(json.dumps(told, indent=1))
    else:
        _show(made, verdict)
        for later in TRAININGS[TRAININGS.index(section) + 1 :]:
            if getattr(loaded.recipe, later) is not None:
                print(f"\nNot in it: {later}; see affinage plan {recipe} --stage {later}")


def _verdict(recipe: str, overrides: list[str] | None, made: "Plan") -> "Verdict":
    from affinage.planning.compiled import compile_on

    with Working(f"the compiler of {made.where.name}"):
        return compile_on(recipe, overrides or (), made.where)


def _summary(runs: Path, loaded: "LoadedRecipe", stage: str) -> dict[str, Any]:
    """What a data stage of this recipe's run found out, if it has run."""
    from affinage.stages.store import read_manifest

    found: dict[str, Any] = (read_manifest(runs / loaded.recipe.name / stage) or {}).get("summary", {})
    return found


def _documents(runs: Path, loaded: "LoadedRecipe", section: str) -> int | None:
    """Documents of a row of preferences, if there are such rows."""
    from affinage.data.preferences import documents_in_a_row

    found = section == "dpo" and _summary(runs, loaded, _ROWS[section])
    return documents_in_a_row(runs / loaded.recipe.name / _ROWS[section]) if found else None


def _ratio(made: "Plan", verdict: "Verdict") -> float | None:
    return made.memory.total / verdict.peak_bytes if verdict.peak_bytes else None


def _show(made: "Plan", verdict: "Verdict | None") -> None:

    console = screen()
    for line in (*_heading(made), "", *_facts(made)):
        console.print(line, markup=False)
    console.print()
    console.print(_memory_table(made), markup=False)
    for line in _verdict_lines(made, verdict) if verdict else ():
        console.print(line, markup=False)
    console.print()
    console.print(_time_table(made), markup=False)
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
    chips = f"{where.chips} × {where.chip.name} ({shape}), {where.devices} devices, hosts: {where.hosts}"
    return [f"{made.recipe} on {where.name}: {chips}; mesh: {mesh}", *chosen]


def _facts(made: "Plan") -> list[str]:
    facts = made.facts
    lines = [
        f"{made.section}: {facts.steps:,} steps × {facts.rows:,} rows × {facts.context:,} tokens = "
        f"{facts.tokens:,} tokens, {facts.tokens_per_parameter:.3g} for each of {facts.active:,} parameters"
        + (f" ({facts.parameters:,} in all)" if facts.active != facts.parameters else ""),
        f"{facts.flops:.3g} FLOPs to train, counted node by node; 6·N·D = {facts.flops_by_rule:.3g}",
        f"warm-up: {facts.warmup:,} steps, {facts.warmup / facts.steps:.1%}",
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
        "of the layer or logits at hand": memory.working,
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
    found = verdict.collectives
    counts = "could not be read" if found is None else ", ".join(f"{n} {name}" for name, n in found.items()) or "none"
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
    table.add_row("update of the weights", "", f"{made.time.update:.4f}", "", "", f"{made.time.update:.4f}", "memory")
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
    return [f"{speed}; {_duration(made.seconds)} in all{cost}"]


def _duration(seconds: float) -> str:
    if seconds >= 2 * _DAY:
        return f"{seconds / _DAY:.1f} days"
    return f"{seconds / _HOUR:.1f} hours" if seconds >= _HOUR else f"{seconds / 60:.1f} minutes"


def _show_comparison(found: list[Any], as_json: bool) -> None:
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
            "yes" if made.fits else "no",
            memory_text(made.memory.total),
            memory_text(made.capacity),
            f"{made.time.seconds:.3g} s",
            f"{made.tokens_per_second:,.0f}",
            f"{made.mfu:.0%}" if made.mfu else "",
            _duration(made.seconds),
            *(f"${cost:,.2f}" if cost is not None else "" for cost in (made.cost, made.cost_per_billion)),
            made.time.bound,
        )
    console = screen()
    console.print(table, markup=False)
    for source in dict.fromkeys(made.price_source for made in plans):
        chips = ", ".join(dict.fromkeys(made.where.chip.name for made in plans if made.price_source == source))
        console.print(f"Cost of {chips}: {source or 'hardware.price of the recipe'}", markup=False)
    for made in plans:
        if not made.fits:
            console.print(f"{made.where.name}: {made.warnings[0]}", markup=False)
    for where, error in refused:
        console.print(f"{where.name}: {error.what}. {error.fix}", markup=False)
