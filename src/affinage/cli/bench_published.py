"""The parts of `affinage bench` that set the planner beside what others published."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

# A model of the same kind of a width at which a processor runs 8 devices.
_SMALL = (
    "model.nodes.embed.vocab=8192",
    "model.nodes.positions.length=128",
    "model.nodes.embed.width=128",
    "model.nodes.blocks.repeat=8",
    "model.nodes.blocks.attention.heads=4",
    "model.nodes.blocks.ffn.width=512",
    "packing.seq_len=128",
)
_SMALL_LAYOUTS = (
    {"data": 8},
    {"data": 2, "tensor": 4},
    {"data": 2, "pipeline": 4},
)


def chips() -> dict[str, Any]:
    """The step of FAX's figure 4 on the two kinds of chips."""
    from affinage.planning.phases import phases
    from affinage.planning.published import NEW, OLD, SPEED_UPS, speed_ups

    planned = [
        {"attention": each.attention, "speed_up": each.ratios}
        | {name: phases(plan.time, plan.split.graph.loss) for name, plan in ((OLD, each.old), (NEW, each.new))}
        for each in speed_ups()
    ]
    return {"old": OLD, "new": NEW, "published": SPEED_UPS, "planned": planned}


def _show_chips(console: "Console", told: dict[str, Any]) -> None:
    from rich.table import Table

    console.print("The same step by the planner, 32 rows of 2,048 tokens, against FAX's figure 4", markup=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("seconds")
    for each in told["planned"]:
        for title in (told["old"], told["new"], "faster"):
            table.add_column(f"{title}, {each['attention']}", justify="right")
    table.add_column("published", justify="right")
    for name in (*told["planned"][0][told["old"]], "step"):
        cells = []
        for each in told["planned"]:
            old, new = (
                sum(each[where].values()) if name == "step" else each[where][name]
                for where in (told["old"], told["new"])
            )
            cells += [f"{old:.4f}", f"{new:.4f}", f"{each['speed_up'][name]:.2f}x"]
        published = told["published"].get(name)
        table.add_row(name, *cells, f"{published}x" if published else "")
    console.print(table, markup=False)
    console.print("kernel: attention by Splash; plain: by products that keep all pairs\n", markup=False)


def trainings() -> list[dict[str, Any]]:
    """Hours of whole trainings."""
    from affinage.planning.published import trainings as planned

    return [
        {
            "recipe": plan.recipe,
            "slice": plan.where.name,
            "attention": attention,
            "tokens": plan.facts.tokens,
            "step_seconds": plan.time.seconds,
            "mfu": plan.mfu,
            "hours": plan.seconds / 3600,
            "published_hours": hours,
        }
        for plan, attention, hours in planned()
    ]


def _show_trainings(console: "Console", told: list[dict[str, Any]]) -> None:
    console.print("Trainings by the planner, against what was published", markup=False)
    for each in told:
        console.print(
            f"  {each['recipe']} on {each['slice']:<6} attention {each['attention']:<7} {each['tokens'] / 1e9:.2f}B "
            f"tokens, MFU {each['mfu']:.0%}: {each['hours']:.1f} hours; published: about {each['published_hours']:g}",
            markup=False,
        )
    console.print()


def layouts(steps: int) -> dict[str, Any]:
    """Tensor against pipeline parallelism, planned for a slice and measured on CPU devices with a small model."""
    from affinage.hardware.slices import find_slice
    from affinage.planning.layouts import DEVICES, idle_share, measured, planned
    from affinage.planning.published import LAYOUT_RECIPE, LAYOUT_SLICE, LAYOUTS, PADDED

    plans = planned(LAYOUT_RECIPE, [PADDED], LAYOUTS, find_slice(LAYOUT_SLICE))
    on_slice = []
    for plan in plans:
        stages = plan.split.sizes["pipeline"]
        parts = plan.split.pipeline_parts * plan.split.parallel.pipeline_rounds
        waited = sum(node.exposed for node in plan.time.nodes)
        on_slice.append(
            {
                "mesh": {axis: size for axis, size in plan.split.sizes.items() if size > 1},
                "pipeline_micro_batches": parts,
                "step_seconds": plan.time.seconds,
                "links_waited_for": waited,
                "bubble_seconds": plan.time.bubble,
                "idle_share_of_layers": idle_share(stages, parts) if stages > 1 else 0.0,
                "mfu": plan.mfu,
                "gibibytes": plan.memory.total / 2**30,
            }
        )
    found = measured(LAYOUT_RECIPE, _SMALL, _SMALL_LAYOUTS, steps)
    plain = sum(found[0].cpu_seconds) / len(found[0].cpu_seconds)
    here = [
        {
            "mesh": each.mesh,
            "pipeline_micro_batches": each.micro_batches,
            "cpu_seconds": list(each.cpu_seconds),
            "ratio": sum(each.cpu_seconds) / len(each.cpu_seconds) / plain,
            "idle_share_of_layers": each.bubble,
        }
        for each in found
    ]
    return {"recipe": LAYOUT_RECIPE, "slice": LAYOUT_SLICE, "planned": on_slice, "devices": DEVICES, "measured": here}


def _show_layouts(console: "Console", told: dict[str, Any]) -> None:
    from rich.table import Table

    console.print(f"Tensor against pipeline: {told['recipe']} on {told['slice']}, planned", markup=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("mesh")
    for title in ("step", "waiting for links", "bubble", "M", "(P-1)/(M+P-1)", "MFU", "memory"):
        table.add_column(title, justify="right")
    for each in told["planned"]:
        table.add_row(
            _mesh(each["mesh"]),
            f"{each['step_seconds']:.4f} s",
            f"{each['links_waited_for']:.4f} s",
            f"{each['bubble_seconds']:.4f} s",
            f"{each['pipeline_micro_batches']}" if each["idle_share_of_layers"] else "",
            f"{each['idle_share_of_layers']:.0%}" if each["idle_share_of_layers"] else "",
            f"{each['mfu']:.0%}",
            f"{each['gibibytes']:.1f} GiB",
        )
    console.print(table, markup=False)
    console.print(
        f"\nThe same kind of model, 8 layers of width 128, on {told['devices']} CPU devices, measured", markup=False
    )
    for each in told["measured"]:
        mean = sum(each["cpu_seconds"]) / len(each["cpu_seconds"])
        share, parts = each["idle_share_of_layers"], each["pipeline_micro_batches"]
        idle = f"; idle by the formula {share:.0%} (M {parts})" if share else ""
        console.print(f"  {_mesh(each['mesh']):<20} {mean:.3f} CPU s a step, {each['ratio']:.2f}x{idle}", markup=False)
    console.print(
        "\nP stages work on M micro-batches (up to 4 a stage, if the rows divide into so many) in M + P - 1 ticks, and"
        "\neach waits in P - 1 of them: of the layers' time (P-1)/(M+P-1) is idle. More of them make that smaller,"
        "\nuntil they are too small.",
        markup=False,
    )


def _mesh(sizes: dict[str, int]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items())


SHOWN: dict[str, Callable[["Console", Any], None]] = {
    "chips": _show_chips,
    "trainings": _show_trainings,
    "layouts": _show_layouts,
}
