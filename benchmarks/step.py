"""Where the time of a training step goes on this machine, part by part, beside what the planner says of it.

    python benchmarks/step.py [RECIPE] [--set KEY=VALUE ...] [--steps 10] [--batch-size N] [--seq-len N] [--json]

Forward, loss (with its gradient, and the logits), backward and optimizer are a program each; the whole step, as a run
compiles it, stands beside them. Without a name it is FAX's 124M model; a CPU measures one sequence of 256 tokens of it.
"""

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

from breakdown import STEP, measure

from affinage.cli.output import Table, counted, emit
from affinage.config.load import load_recipe
from affinage.hardware.devices import acquire
from affinage.planning.plan import forecast, planned_graph
from affinage.plugins import load_plugins
from affinage.training.job import rows_per_step
from affinage.training.trainer import program_of, synthetic_batch

BAR = 40  # characters of the longest


def measured(
    recipe: str, overrides: list[str], steps: int, batch_size: int | None, seq_len: int | None
) -> dict[str, Any]:
    device, cpu = acquire()[0], acquire()[0].platform == "cpu"
    batch_size, seq_len = batch_size or (1 if cpu else None), seq_len or (256 if cpu else None)
    settings = [*overrides, "pretrain.gradient_accumulation_steps=1"]
    settings += ["pretrain.per_device_batch_size=null", f"pretrain.batch_size={batch_size}"] if batch_size else []
    loaded = load_recipe(recipe, [*settings, *([f"packing.seq_len={seq_len}"] if seq_len else [])])
    load_plugins(loaded)
    pretrain, length = loaded.recipe.pretrain, loaded.recipe.packing.seq_len
    if pretrain is None or (loaded.recipe.data is not None and loaded.recipe.data.arrays is not None):
        raise SystemExit(f"{recipe}: only the pretraining of a language model is measured")
    graph, mesh = planned_graph(loaded), {str(axis): size for axis, size in loaded.recipe.mesh.items()}
    rows = rows_per_step(pretrain, len(acquire()))
    batch = synthetic_batch(graph, rows, length)
    program = program_of(graph, pretrain, loaded.recipe.parallel, mesh, batch)
    if program.mesh.shape["pipeline"] > 1:
        raise SystemExit(f"{recipe}: the stages of a pipeline do not part into forward and backward")
    found = measure(program, batch, steps)
    planned = forecast(
        graph,
        pretrain,
        loaded.recipe.parallel,
        rows=rows,
        context=length,
        mesh=program.mesh.shape,
        device_kind=device.device_kind,
        devices=program.mesh.size,
    )
    return {
        "recipe": loaded.recipe.name,
        "device": device.device_kind,
        "devices": len(acquire()),
        "rows": rows,
        "seq_len": length,
        "repetitions": steps,
        "seconds": {name: {"mean": timing.mean, "deviation": timing.deviation} for name, timing in found.items()},
        "cpu_seconds": {name: statistics.fmean(timing.processor) for name, timing in found.items()} if cpu else None,
        "planned_seconds": planned and planned[1].phases(graph.loss) | {STEP: planned[1].seconds},
        "tokens_per_second": rows * length / found[STEP].mean,
        "flops_per_second": program.flops_per_step / found[STEP].mean,
    }


def view(facts: dict[str, Any]) -> Iterator[str | Table]:
    yield (
        f"{facts['recipe']}: {counted(facts['rows'], 'row')} of {facts['seq_len']:,} tokens on {facts['devices']} x "
        f"{facts['device']}, {counted(facts['repetitions'], 'repetition')} of each part as a program of its own"
    )
    seconds, cpu, planned = facts["seconds"], facts["cpu_seconds"], facts["planned_seconds"]
    parts = {name: each["mean"] for name, each in seconds.items() if name != STEP}
    rows = []
    for name, each in seconds.items():
        share = parts.get(name, 0.0) / sum(parts.values())
        bar = (f"{share:.0%}", "█" * max(1, round(share * BAR))) if name in parts else ("", "as a run compiles it")
        more = [f"{cpu[name]:.3f}" if cpu else None, f"{planned[name]:.4f}" if planned else None]
        rows.append((name, f"{each['mean']:.4f}", f"{each['deviation']:.4f}", *more, *bar))
    yield Table(("", "seconds", "±", "CPU s", "planned", "share", ""), rows, left=(0, 6))
    yield f"{facts['tokens_per_second']:,.0f} tokens/s, {facts['flops_per_second'] / 1e9:,.1f} GFLOP/s"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="fax-124m")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=10, help="repetitions of each part")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = measured(given.recipe, given.set, given.steps, given.batch_size, given.seq_len)
    emit(found, given.json, view(found))
