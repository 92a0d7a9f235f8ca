"""Verbs that look and change nothing: `graph`, `doctor`."""

import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from affinage.cli import doctor
from affinage.cli.options import RUNS, JsonOption, RecipeOrRunArgument, RunsOption, SetOption, load, recipe_or_run
from affinage.cli.terminal import counted, screen
from affinage.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from affinage.config.load import LoadedRecipe
    from affinage.config.parallel import Remat, RematChoice
    from affinage.config.recipe import Recipe
    from affinage.model.graph import Graph

_WITH_INPUTS = 100  # columns from which on there is room for what a node reads
_UNKNOWN_CHARACTERS = 256  # what `vocab: auto` is taken as before the characters of the text have been counted


def add_to(app: typer.Typer) -> None:
    """Register the verbs."""
    app.command("graph")(graph)
    app.command("doctor")(doctor.doctor)


def graph(
    recipe: RecipeOrRunArgument,
    overrides: SetOption = None,
    runs: RunsOption = RUNS,
    as_json: JsonOption = False,
    as_mermaid: Annotated[bool, typer.Option("--mermaid", help="Print a Mermaid flowchart.")] = False,
    as_svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Draw it into an SVG file.")] = None,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Draw the learning rate over the steps instead.")
    ] = False,
) -> None:
    """Print the model graph: the shape, parameters and FLOPs of every node.

    Example: affinage graph julian-600m

    affinage graph gpt2-124m --svg gpt2.svg
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # only shapes are computed: no accelerator is taken, or looked for
    from affinage.config.plugins import load_plugins
    from affinage.model.analysis import mermaid, parameters, summary_table
    from affinage.model.graph import parse
    from affinage.model.shape import SEQUENCE
    from affinage.pipeline.trainings import with_vocabulary

    if as_json + as_mermaid + (as_svg is not None) > 1:
        raise UserError("--json, --mermaid and --svg are three outputs", fix="Ask for one at a time.")
    loaded = load(recipe_or_run(recipe, runs), overrides)
    load_plugins(loaded)
    if schedule:
        _show_schedules(loaded, as_json)
        return
    model = parse(with_vocabulary(loaded.recipe.model, _vocabulary(loaded.recipe, runs)), loaded.locate)
    if as_mermaid:
        print(mermaid(model), end="")
        return
    if as_svg:
        from affinage.model.picture import svg

        as_svg.write_text(svg(model), encoding="utf-8")
        return
    batch, context = _rows_per_step(loaded.recipe), loaded.recipe.packing.seq_len
    of_tokens = any(SEQUENCE in shape.dims for _, shape in model.inputs)
    facts = {
        "batch": batch,
        "context": context if of_tokens else None,
        "parameters": asdict(parameters(model)),
        "nodes": summary_table(model, batch, context),
        "memory": _memory(model, batch, context, loaded.recipe.parallel.remat),
    }
    if as_json:
        print(json.dumps(facts, indent=1))
    else:
        _show(facts)


def _show_schedules(loaded: "LoadedRecipe", as_json: bool) -> None:
    from affinage.cli.schedules import drawn, learning_rates

    rates = learning_rates(loaded)
    print(json.dumps(rates, indent=1) if as_json else "\n\n".join(drawn(*pair) for pair in rates.items()))


def _memory(model: "Graph", batch: int, context: int, remat: "RematChoice") -> dict[str, Any]:
    """Bytes in bfloat16: the cache of one row, and what a step keeps for its backward pass, all devices together."""
    import jax.numpy as jnp

    from affinage.model.activations import POLICIES, activations
    from affinage.model.analysis import cache_bytes

    settings: dict[str, Remat] = dict(zip(POLICIES, POLICIES, strict=True))
    if not isinstance(remat, str):
        settings["by name"] = remat
    nodes = {policy: activations(model, batch, context, setting) for policy, setting in settings.items()}
    return {
        "cache_of_a_row": cache_bytes(model, 1, context, jnp.bfloat16),
        "activations": {policy: sum(node.kept for node in found) for policy, found in nodes.items()},
        "activations_by_node": {policy: {n.name: n.kept for n in found} for policy, found in nodes.items()},
        "offloaded": {policy: sum(node.offloaded for node in found) for policy, found in nodes.items()},
        "recomputed_at_once": {policy: max(node.recomputed for node in found) for policy, found in nodes.items()},
    }


def _show(facts: dict[str, Any]) -> None:

    console = screen()
    console.print(_table(facts["nodes"], wide=console.width >= _WITH_INPUTS), highlight=False, markup=False)
    console.print("\n" + "\n".join(_facts_in_words(facts)), highlight=False, markup=False, soft_wrap=True)


def _table(rows: list[dict[str, Any]], *, wide: bool) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("node", "kind", "value"):
        table.add_column(title, no_wrap=True)
    for title in ("parameters", "forward", "training"):
        table.add_column(title, justify="right", no_wrap=True)
    if wide:
        table.add_column("reads")
    for row in rows:
        kind = f"{row['kind']} × {row['repeat']}" if row["repeat"] > 1 else row["kind"]
        flops = [f"{row[key]:.3g}" for key in ("flops", "training_flops")]
        reads = [", ".join(row["inputs"])] if wide else []
        table.add_row(row["name"], kind, row["shape"], f"{row['parameters']:,}", *flops, *reads)
    return table


def _facts_in_words(facts: dict[str, Any]) -> Iterator[str]:
    total, counts, memory, context = facts["nodes"][-1], facts["parameters"], facts["memory"], facts["context"]
    rows = f"{counted(facts['batch'], 'row')} of {context:,} tokens" if context else counted(facts["batch"], "example")
    yield f"forward, training: FLOPs of one step of {rows}; matrix products only, 2 m n k each."
    said = f"{counts['total']:,} parameters"
    if context:
        said += f", {counts['active']:,} of them active for a token, {counts['embedding']:,} in embeddings"
    yield said
    said = f"{total['training_flops']:.4g} FLOPs to train a step"
    if total["training_flops_all_pairs"] != total["training_flops"]:
        said += f"; {total['training_flops_all_pairs']:.4g} if attention counts the pairs that causality hides"
    yield said
    if memory["cache_of_a_row"]:
        yield f"{_gigabytes(memory['cache_of_a_row'])} cache of one row when decoding, in bfloat16"
    kept = ", ".join(f"{_gigabytes(count)} ({policy})" for policy, count in memory["activations"].items())
    yield f"{kept} kept of a step's forward pass in bfloat16, by what is recomputed"
    if away := memory["offloaded"].get("by name"):
        yield f"{_gigabytes(away)} (by name) wait in the host's memory"


def _gigabytes(count: int) -> str:
    if count < 1e8:
        return f"{count / 1e6:.3g} MB"
    return f"{count / 1e9:,.0f} GB" if count >= 1e11 else f"{count / 1e9:.3g} GB"


def _rows_per_step(recipe: "Recipe") -> int:
    """Rows of a batch; per device where the mesh leaves their number open."""
    settings = recipe.pretrain
    if settings is None:
        return 1
    devices = math.prod(size for size in recipe.mesh.values() if isinstance(size, int))
    return settings.batch_size or (settings.per_device_batch_size or 1) * devices


def _vocabulary(recipe: "Recipe", runs: Path) -> int:
    """What `vocab: auto` stands for."""
    from affinage.pipeline.store import read_manifest

    if recipe.tokenizer.kind == "bpe":
        return recipe.tokenizer.vocab_size
    trained = (read_manifest(runs / recipe.name / "tokenizer") or {}).get("summary", {}).get("vocabulary")
    if trained is None:
        print(f"`vocab: auto` is shown as {_UNKNOWN_CHARACTERS} until `affinage data` has counted.", file=sys.stderr)
    return trained or _UNKNOWN_CHARACTERS
