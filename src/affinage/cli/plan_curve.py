"""`affinage plan --curve`: weak or strong scaling as a table."""

import json
from typing import TYPE_CHECKING

from affinage.cli.terminal import screen

if TYPE_CHECKING:
    from affinage.hardware.slices import Slice
    from affinage.planning.curve import Point


def show_curve(points: "list[Point]", first: "Slice", as_json: bool) -> None:
    """Print a line for each slice, and one where the curve does not begin at `first`, the slice that was asked for."""
    from rich.table import Table

    if as_json:
        told = [point.plan.to_dict() | {"efficiency": point.efficiency, "why": point.why} for point in points]
        print(json.dumps({"curve": told}, indent=1))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("slice")
    for title in ("chips", "rows", "mesh", "step", "tokens/s", "MFU", "of ideal", "days", "cost", "a step is"):
        table.add_column(title, justify="right")
    for point in points:
        made = point.plan
        table.add_row(
            made.where.name,
            str(made.where.chips),
            f"{made.split.rows:,}",
            ", ".join(f"{axis} {size}" for axis, size in made.split.sizes.items() if size > 1),
            f"{made.time.seconds:.3g} s",
            f"{made.tokens_per_second:,.0f}",
            f"{made.mfu:.0%}" if made.mfu else "",
            f"{point.efficiency:.0%}",
            f"{made.seconds / 86_400:.2f}",
            f"${made.cost:,.0f}" if made.cost is not None else "",
            point.why,
        )
    console = screen()
    console.print(table, markup=False)
    begin = points[0].plan.where
    if begin.name != first.name:
        console.print(f"The curve begins at {begin.name}: on {first.name} the recipe fits with no mesh that was tried.")
