"""`affinage bench`: where the time of a step goes, measured here and planned for chips that others measured."""

import json
import statistics
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from affinage.cli.options import JsonOption, SetOption, load
from affinage.cli.terminal import counted, screen
from affinage.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

Part = Literal["step", "chips", "trainings", "layouts"]
_PARTS: tuple[Part, ...] = ("step", "chips", "trainings", "layouts")
_BAR = 40  # characters of the longest
# Of the recipe's rows, what a processor does in seconds.
_ROWS_OF_CPU, _CONTEXT_OF_CPU = 1, 256


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("bench")(bench)


def bench(
    recipe: Annotated[
        str, typer.Argument(metavar="[RECIPE]", help="Whose step is measured; without a name FAX's 124M model.")
    ] = "fax-124m",
    overrides: SetOption = None,
    steps: Annotated[int, typer.Option("--steps", min=2, help="Repetitions of every measurement.")] = 10,
    rows: Annotated[int | None, typer.Option("--rows", min=1, help="Of the measured step; on a processor 1.")] = None,
    context: Annotated[
        int | None, typer.Option("--context", min=2, help="Tokens of a measured row; on a processor 256.")
    ] = None,
    part: Annotated[
        list[str] | None, typer.Option("--part", metavar="PART", help=f"Only {', '.join(_PARTS)}. May be repeated.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a training step by its parts on this machine, and print what the planner says of published ones.

    `step` measures forward, loss, backward and optimizer; `chips` plans the same step for TPU v3 and v4; `trainings`
    plans GPT-2's on a TPU v3-8 and a v6e-8; `layouts` sets tensor against pipeline parallelism.

    Example: affinage bench

    affinage bench gpt2-124m --rows 4 --context 1024 --part step
    """
    for name in part or ():
        if name not in _PARTS:
            raise UserError(
                f"`{name}` is no part of the benchmark", where="--part", fix=f"There are {', '.join(_PARTS)}."
            )
    wanted = part or list(_PARTS)
    from affinage.cli import bench_published as published

    told: dict[str, Any] = {}
    if "step" in wanted:
        told["step"] = _step(recipe, overrides or [], steps, rows, context)
    if "chips" in wanted:
        told["chips"] = published.chips()
    if "trainings" in wanted:
        told["trainings"] = published.trainings()
    if "layouts" in wanted:
        told["layouts"] = published.layouts(max(steps // 2, 3))
    if as_json:
        print(json.dumps(told, indent=1))
        return

    console = screen()
    if "step" in told:
        _show_step(console, told.pop("step"))
    for name, facts in told.items():
        published.SHOWN[name](console, facts)


def _step(recipe: str, overrides: list[str], steps: int, rows: int | None, context: int | None) -> dict[str, Any]:
    from affinage.hardware.devices import acquire

    device = acquire()[0]
    small = device.platform == "cpu"
    sized = {
        "batch": rows or (_ROWS_OF_CPU if small else None),
        "context": context or (_CONTEXT_OF_CPU if small else None),
    }
    settings = [*overrides, "pretrain.gradient_accumulation_steps=1"]
    settings += (
        ["pretrain.per_device_batch_size=null", f"pretrain.batch_size={sized['batch']}"] if sized["batch"] else []
    )
    settings += [f"packing.seq_len={sized['context']}"] if sized["context"] else []
    loaded = load(recipe, settings)
    pretrain = loaded.recipe.pretrain
    images = loaded.recipe.data is not None and loaded.recipe.data.arrays is not None
    if pretrain is None or images:
        raise UserError("only the pretraining of a language model is measured", where=str(loaded.path))
    from affinage.config.plugins import load_plugins
    from affinage.planning.forecast import forecast
    from affinage.planning.plan import planned_graph
    from affinage.training.breakdown import STEP, measure, program_of, synthetic_batch
    from affinage.training.job import rows_per_step

    load_plugins(loaded)
    graph = planned_graph(loaded)
    mesh = {str(axis): size for axis, size in loaded.recipe.mesh.items()}
    number = rows_per_step(pretrain, len(acquire()))
    batch = synthetic_batch(graph, number, loaded.recipe.packing.seq_len)
    program = program_of(graph, pretrain, loaded.recipe.parallel, mesh, batch)
    if program.mesh.shape["pipeline"] > 1:
        raise UserError("the stages of a pipeline do not part into forward and backward", where="mesh")
    found = measure(program, batch, steps)
    tokens = number * loaded.recipe.packing.seq_len
    planned = forecast(
        graph,
        pretrain,
        loaded.recipe.parallel,
        rows=number,
        context=loaded.recipe.packing.seq_len,
        mesh=program.mesh.shape,
        device_kind=device.device_kind,
        devices=program.mesh.size,
    )
    return {
        "recipe": loaded.recipe.name,
        "device": device.device_kind,
        "devices": len(acquire()),
        "rows": number,
        "context": loaded.recipe.packing.seq_len,
        "repetitions": steps,
        "seconds": {name: {"mean": timing.mean, "deviation": timing.deviation} for name, timing in found.items()},
        "cpu_seconds": {name: statistics.fmean(timing.processor) for name, timing in found.items()} if small else None,
        "planned_seconds": planned and planned.phases | {STEP: planned.time.seconds},
        "tokens_per_second": tokens / found[STEP].mean,
        "flops_per_second": program.flops_per_step / found[STEP].mean,
    }


def _show_step(console: "Console", told: dict[str, Any]) -> None:
    from rich.table import Table

    console.print(
        f"{told['recipe']}: {counted(told['rows'], 'row')} of {told['context']:,} tokens on {told['devices']} x "
        f"{told['device']}, {counted(told['repetitions'], 'repetition')} of each part as a program of its own",
        markup=False,
    )
    seconds, processor, planned = told["seconds"], told["cpu_seconds"], told["planned_seconds"]
    parts = {name: each["mean"] for name, each in seconds.items() if name != "step"}
    whole = sum(parts.values())
    table = Table(box=None, pad_edge=False)
    for title in ("", "seconds", "±", *(["CPU s"] if processor else []), *(["planned"] if planned else []), "share"):
        table.add_column(title, justify="right" if title else "left")
    table.add_column("")
    for name, each in seconds.items():
        cells = [f"{each['mean']:.4f}", f"{each['deviation']:.4f}"]
        cells += [f"{processor[name]:.3f}"] if processor else []
        cells += [f"{planned[name]:.4f}"] if planned else []
        share = parts.get(name, 0.0) / whole
        bar = [f"{share:.0%}", "█" * max(1, round(share * _BAR))] if name in parts else ["", "as a run compiles it"]
        table.add_row(name, *cells, *bar)
    console.print(table, markup=False)
    console.print(
        f"{told['tokens_per_second']:,.0f} tokens/s, {told['flops_per_second'] / 1e9:,.1f} GFLOP/s\n", markup=False
    )
