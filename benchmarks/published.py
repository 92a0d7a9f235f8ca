"""The planner beside what others published: a step on two kinds of chips, whole trainings, layouts of a model.

    python benchmarks/published.py [chips|trainings|layouts ...] [--repetitions 5] [--json]

`chips` plans the step of FAX's figure 4 for TPU v3 and v4; `trainings` plans GPT-2's on a TPU v3-8 and a v6e-8;
`layouts` sets tensor against pipeline parallelism, planned for a slice and measured on CPU devices with a small model.
"""

import argparse
from collections.abc import Iterator
from typing import Any

from affinage.cli.output import Table, emit
from affinage.hardware.slices import find_slice
from affinage.planning import published
from affinage.planning.layouts import DEVICES, idle_share, measured, planned
from affinage.planning.phases import phases

# A model of the same kind of a width at which a CPU runs 8 devices.
SMALL = (
    "model.nodes.embed.vocab=8192",
    "model.nodes.positions.length=128",
    "model.nodes.embed.width=128",
    "model.nodes.blocks.repeat=8",
    "model.nodes.blocks.attention.heads=4",
    "model.nodes.blocks.ffn.width=512",
    "packing.seq_len=128",
)
SMALL_LAYOUTS = ({"data": 8}, {"data": 2, "tensor": 4}, {"data": 2, "pipeline": 4})


def chips() -> dict[str, Any]:
    found = [
        {"attention": each.attention, "speed_up": each.ratios}
        | {
            name: phases(plan.time, plan.split.graph.loss)
            for name, plan in ((published.OLD, each.old), (published.NEW, each.new))
        }
        for each in published.speed_ups()
    ]
    return {"old": published.OLD, "new": published.NEW, "published": published.SPEED_UPS, "planned": found}


def chips_view(facts: dict[str, Any]) -> Iterator[str | Table]:
    yield "The same step by the planner, 32 rows of 2,048 tokens, against FAX's figure 4"
    both, rows = (facts["old"], facts["new"]), []
    columns = [f"{title}, {each['attention']}" for each in facts["planned"] for title in (*both, "faster")]
    for name in (*facts["planned"][0][facts["old"]], "step"):
        cells: list[str | None] = []
        for each in facts["planned"]:
            seconds = (sum(each[where].values()) if name == "step" else each[where][name] for where in both)
            cells += [*(f"{one:.4f}" for one in seconds), f"{each['speed_up'][name]:.2f}x"]
        known = facts["published"].get(name)
        rows.append((name, *cells, f"{known}x" if known else None))
    yield Table(("seconds", *columns, "published"), rows)
    yield "kernel: attention by Splash; plain: by products that keep all pairs\n"


def trainings() -> list[dict[str, Any]]:
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
        for plan, attention, hours in published.trainings()
    ]


def trainings_view(facts: list[dict[str, Any]]) -> Iterator[str | Table]:
    columns = ("trainings", "slice", "attention", "tokens", "MFU", "hours", "published, about")
    rows = [
        (
            *(each[name] for name in ("recipe", "slice", "attention")),
            f"{each['tokens'] / 1e9:.2f}B",
            f"{each['mfu']:.0%}",
            f"{each['hours']:.1f}",
            f"{each['published_hours']:g}",
        )
        for each in facts
    ]
    yield Table(columns, rows, left=(0, 1, 2))


def layouts(repetitions: int) -> dict[str, Any]:
    plans = planned(published.LAYOUT_RECIPE, [published.PADDED], published.LAYOUTS, find_slice(published.LAYOUT_SLICE))
    on_slice = []
    for plan in plans:
        stages, parts = plan.split.sizes["pipeline"], plan.split.pipeline_parts * plan.split.parallel.pipeline_rounds
        facts = {
            "mesh": {axis: size for axis, size in plan.split.sizes.items() if size > 1},
            "pipeline_micro_batches": parts,
            "step_seconds": plan.time.seconds,
            "links_waited_for": sum(node.exposed for node in plan.time.nodes),
            "bubble_seconds": plan.time.bubble,
            "idle_share_of_layers": idle_share(stages, parts) if stages > 1 else 0.0,
            "mfu": plan.mfu,
            "gibibytes": plan.memory.total / 2**30,
        }
        on_slice.append(facts)
    found = measured(published.LAYOUT_RECIPE, SMALL, SMALL_LAYOUTS, repetitions)
    means = [sum(each.cpu_seconds) / len(each.cpu_seconds) for each in found]
    here = [
        {
            "mesh": each.mesh,
            "pipeline_micro_batches": each.micro_batches,
            "cpu_seconds": list(each.cpu_seconds),
            "ratio": mean / means[0],
            "idle_share_of_layers": each.bubble,
        }
        for each, mean in zip(found, means)
    ]
    where = {"recipe": published.LAYOUT_RECIPE, "slice": published.LAYOUT_SLICE}
    return {**where, "planned": on_slice, "devices": DEVICES, "measured": here}


def layouts_view(facts: dict[str, Any]) -> Iterator[str | Table]:
    yield f"Tensor against pipeline: {facts['recipe']} on {facts['slice']}, planned"
    rows = []
    for each in facts["planned"]:
        idle = each["idle_share_of_layers"]
        seconds = (f"{each[name]:.4f} s" for name in ("step_seconds", "links_waited_for", "bubble_seconds"))
        of_pipeline = (each["pipeline_micro_batches"], f"{idle:.0%}") if idle else (None, None)
        rows.append((mesh(each), *seconds, *of_pipeline, f"{each['mfu']:.0%}", f"{each['gibibytes']:.1f} GiB"))
    columns = ("mesh", "step", "waiting for links", "bubble", "M", "(P-1)/(M+P-1)", "MFU", "memory")
    yield Table(columns, rows)
    yield f"\nThe same kind of model, 8 layers of width 128, on {facts['devices']} CPU devices, measured"
    rows = [
        (mesh(each), f"{sum(each['cpu_seconds']) / len(each['cpu_seconds']):.3f}", f"{each['ratio']:.2f}x")
        for each in facts["measured"]
    ]
    yield Table(("mesh", "CPU s a step", "ratio"), rows)
    yield (
        "\nP stages work on M micro-batches in M + P - 1 ticks, and each waits in P - 1 of them: (P-1)/(M+P-1) of the "
        "layers' time is idle."
    )


def mesh(facts: dict[str, Any]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in facts["mesh"].items())


VIEWS = {"chips": chips_view, "trainings": trainings_view, "layouts": layouts_view}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*VIEWS, []], help="all of them by default")
    parser.add_argument("--repetitions", type=int, default=5, help="of the measured layouts")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    made = {"chips": chips, "trainings": trainings, "layouts": lambda: layouts(given.repetitions)}
    found = {part: made[part]() for part in given.parts or VIEWS}
    emit(found, given.json, (each for part in found for each in VIEWS[part](found[part])))
