"""`affinage plan --search`: the fastest settings that fit, as a table with the lines to paste."""

import json
import sys
from typing import TYPE_CHECKING, Any

from affinage.cli.terminal import screen
from affinage.cli.working import Working

if TYPE_CHECKING:
    from affinage.config.load import LoadedRecipe
    from affinage.hardware.slices import Slice
    from affinage.model import Graph
    from affinage.planning.compiled import Verdict
    from affinage.planning.plan import Counted, Plan
    from affinage.planning.search import Candidate

Row = tuple["Candidate", "Plan", "Verdict | None"]


def search_and_show(
    recipe: str,
    overrides: list[str],
    loaded: "LoadedRecipe",
    graph: "Graph",
    where: "Slice",
    count: int,
    compiled_with: "Counted | None",
    as_json: bool,
) -> None:
    """Print the best `count` settings; with the compiler's verdict of each where `compiled_with` is what it needs."""
    from affinage.planning.compiled import compile_on
    from affinage.planning.plan import training_settings
    from affinage.planning.search import search

    with Working("searching", lines=True) as working:
        found = search(loaded.recipe, graph, where, count, working.progressed)
    section, _, _ = training_settings(loaded.recipe)
    if not as_json:
        ways = f"{found.candidates:,} ways to split it, in full: {found.estimated}"
        print(f"{loaded.recipe.name} on {where.name}: {ways}\n", flush=True)
    if compiled_with is not None and not as_json:
        _print_table([(candidate, made, None) for candidate, made in found.best])
        print(flush=True)
    rows: list[Row] = []
    for number, (candidate, made) in enumerate(found.best, start=1):
        verdict = None
        if compiled_with is not None:
            print(f"The compiler of {where.name} is at work: {number} of {len(found.best)}", file=sys.stderr)
            verdict = compile_on(
                recipe, [*overrides, *candidate.overrides(loaded.recipe, section)], where, compiled_with
            )
        rows.append((candidate, made, verdict))
    if as_json:
        told = {"candidates": found.candidates, "estimated": found.estimated}
        print(json.dumps(told | {"best": [_told(row, section) for row in rows]}, indent=1))
        return
    _print_table(rows)
    chosen = next((c for c, _, verdict in rows if verdict is None or verdict.fits), None)
    if chosen is None:
        print("\nThe compiler refused all of them. Look at more with --best.")
    else:
        fastest = min(made.time.seconds for _, made, _ in rows)
        if rows[0][1].time.seconds > fastest:
            print("\nA percent or two is within the estimate's error: of such settings the simpler one stands first.")
        print(f"\nThe best of them, to paste into the recipe:\n\n{chosen.lines(loaded.recipe, section)}")


def _told(row: Row, section: str) -> dict[str, Any]:
    candidate, made, verdict = row
    told: dict[str, Any] = {"settings": candidate.settings(section), "plan": made.to_dict()}
    return told | ({"compiled": vars(verdict)} if verdict else {})


def _print_table(rows: list[Row]) -> None:
    from rich.table import Table

    from affinage.hardware.slices import memory_text

    table = Table(box=None, pad_edge=False)
    table.add_column("mesh")
    for title in ("micro-batches", "remat", "moments", "step", "MFU", "of a device", "may take", "compiler"):
        table.add_column(title, justify="right")
    table.add_column("bound by")
    for candidate, made, verdict in rows:
        said = "" if verdict is None else f"{'fits' if verdict.fits else 'refuses'}, {memory_text(verdict.peak_bytes)}"
        table.add_row(
            ", ".join(f"{axis} {size}" for axis, size in candidate.sizes.items()),
            str(candidate.micro_batches),
            candidate.remat,
            candidate.moments,
            f"{made.time.seconds:.4g} s",
            f"{made.mfu:.0%}" if made.mfu else "",
            memory_text(made.memory.total),
            memory_text(made.capacity),
            said,
            made.time.bound,
        )
    console = screen()
    console.print(table, markup=False)
