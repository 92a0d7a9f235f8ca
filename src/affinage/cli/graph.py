"""The verb `graph`: what a model consists of and costs, and its learning rates."""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from affinage.cli.options import RUNS, JsonOption, RecipeArgument, RunsOption, SetOption, load, opt, warn
from affinage.cli.output import Table, counted, emit, screen
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.config.load import LoadedRecipe
    from affinage.config.parallel import Remat, RematChoice
    from affinage.config.recipe import Recipe
    from affinage.config.training import TrainSettings
    from affinage.model.graph import Graph

_WITH_INPUTS = 100  # columns from which on there is room for the inputs of a node
_UNKNOWN_CHARACTERS = 256  # the size of `vocab: auto` before the characters of the text have been counted
_LINES = 24  # at most, for the schedule of one training
_WIDTH = 48  # characters of the longest bar


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("graph")(graph)


def graph(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    runs: RunsOption = RUNS,
    as_json: JsonOption = False,
    as_mermaid: Annotated[bool, opt("Print a Mermaid flowchart.", "--mermaid")] = False,
    schedule: Annotated[bool, opt("Draw the learning rate over the steps instead.", "--schedule")] = False,
) -> None:
    """Print the model graph: the shape, parameters and FLOPs of every node.

    Example: affinage graph julian-600m

    affinage graph gpt2-124m --mermaid > gpt2.mmd
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # only shapes are computed: the accelerator is not taken
    if as_json and as_mermaid:
        raise UserError("these are two outputs", where="--json, --mermaid", fix="Ask for one at a time.")
    loaded = load(recipe, overrides, runs, lenient=True)
    from affinage.model.analysis import mermaid, parameters, summary_table
    from affinage.model.graph import parse
    from affinage.model.layer import SEQUENCE
    from affinage.pipeline.names import resolve, run_folder
    from affinage.pipeline.steps_train import with_vocabulary
    from affinage.plugins import load_plugins

    load_plugins(loaded)
    if schedule:
        rates = _learning_rates(loaded)
        emit(rates, as_json, (line for name in rates for line in _drawn(name, rates[name])))
        return
    vocabulary = _vocabulary(loaded.recipe, run_folder(resolve(recipe, runs), loaded, runs))
    model = parse(with_vocabulary(loaded.recipe.model, vocabulary), loaded.locate)
    if as_mermaid:
        print(mermaid(model), end="")
        return
    batch, context = _batch_size(loaded.recipe), loaded.recipe.packing.seq_len
    facts = {
        "batch": batch,
        "context": context if any(SEQUENCE in shape.dims for _, shape in model.inputs) else None,
        "parameters": asdict(parameters(model)),
        "nodes": summary_table(model, batch, context),
        "memory": _memory(model, batch, context, loaded.recipe.parallel.remat),
    }
    emit(facts, as_json, _view(facts))


def _memory(model: "Graph", batch: int, context: int, remat: "RematChoice") -> dict[str, Any]:
    """Bytes in bfloat16: the cache of one sequence, and what a step keeps for its backward pass on all devices."""
    import jax.numpy as jnp

    from affinage.config.parallel import RematPreset
    from affinage.model.analysis import cache_bytes
    from affinage.planning.estimate import activations

    settings: dict[str, Remat] = {policy: policy for policy in get_args(RematPreset)}
    if not isinstance(remat, str):
        settings["by name"] = remat
    found = {policy: activations(model, batch, context, setting) for policy, setting in settings.items()}
    return {
        "cache_of_a_row": cache_bytes(model, 1, context, jnp.bfloat16),
        "activations": {policy: kept for policy, (kept, _) in found.items()},
        "offloaded": {policy: offloaded for policy, (_, offloaded) in found.items()},
    }


def _view(facts: dict[str, Any]) -> "Iterator[str | Table]":
    wide = screen().width >= _WITH_INPUTS
    rows = [
        (
            row["name"],
            f"{row['kind']} × {row['repeat']}" if row["repeat"] > 1 else row["kind"],
            row["shape"],
            row["parameters"],
            *(f"{row[key]:.3g}" for key in ("flops", "training_flops")),
            *([", ".join(row["inputs"])] if wide else []),
        )
        for row in facts["nodes"]
    ]
    columns = ("node", "kind", "value", "parameters", "forward", "training", *(["reads"] if wide else []))
    yield Table(columns, rows, left=(0, 1, 2, 6))
    total, counts, memory, context = facts["nodes"][-1], facts["parameters"], facts["memory"], facts["context"]
    batch = f"{counted(facts['batch'], 'row')} of {context:,} tokens" if context else counted(facts["batch"], "example")
    yield f"\nforward, training: FLOPs of one step of {batch}; matrix products only, 2 m n k each."
    active = f", {counts['active']:,} active for a token, {counts['embedding']:,} in embeddings" if context else ""
    yield f"{counts['total']:,} parameters{active}"
    pairs = total["training_flops_all_pairs"]
    hidden = f"; {pairs:.4g} with the pairs that causality hides" if pairs != total["training_flops"] else ""
    yield f"{total['training_flops']:.4g} FLOPs to train a step{hidden}"
    if memory["cache_of_a_row"]:
        yield f"{_gigabytes(memory['cache_of_a_row'])} cache of one row when decoding, in bfloat16"
    kept = ", ".join(f"{_gigabytes(count)} ({policy})" for policy, count in memory["activations"].items())
    yield f"{kept} of activations of a step in bfloat16, by what is recomputed"
    if offloaded := memory["offloaded"].get("by name"):
        yield f"{_gigabytes(offloaded)} (by name) are offloaded to the host's memory"


def _gigabytes(count: int) -> str:
    if count < 1e8:
        return f"{count / 1e6:.3g} MB"
    return f"{count / 1e9:,.0f} GB" if count >= 1e11 else f"{count / 1e9:.3g} GB"


def _batch_size(recipe: "Recipe") -> int:
    """The sequences of a step; those of a device where the mesh leaves the number of devices open."""
    settings = recipe.pretrain
    if settings is None:
        return 1
    devices = math.prod(size for size in recipe.mesh.values() if isinstance(size, int))
    return settings.batch_size or (settings.per_device_batch_size or 1) * devices


def _vocabulary(recipe: "Recipe", run: Path) -> int:
    """The size that `vocab: auto` stands for."""
    from affinage.results import TokenizerResult, read_result

    if recipe.tokenizer.kind == "bpe":
        return recipe.tokenizer.vocab_size
    result = read_result(run / "train-tokenizer", TokenizerResult)
    trained = result.vocabulary if result else None
    if trained is None:
        warn(f"`vocab: auto` is shown as {_UNKNOWN_CHARACTERS} until `affinage data` has counted the characters")
    return trained or _UNKNOWN_CHARACTERS


def _learning_rates(loaded: "LoadedRecipe") -> dict[str, list[dict[str, Any]]]:
    """For every training: steps (counted from 0, the first and the last among them) with their learning rates."""
    from affinage.training.optimizer import check_choices

    rates = {}
    for name in loaded.recipe.trainings:
        settings = getattr(loaded.recipe, name)
        check_choices(settings, partial(_located, loaded, name))
        rates[name] = _rates(settings)
    return rates


def _located(loaded: "LoadedRecipe", section: str, path: Sequence[str | int]) -> str:
    return loaded.locate((section, *path))


def _rates(settings: "TrainSettings") -> list[dict[str, Any]]:
    import jax.numpy as jnp

    from affinage.training.optimizer import learning_rate

    rate, last = learning_rate(settings.schedule, settings.steps), settings.steps - 1
    warmup = max(settings.schedule.warmup(settings.steps) - 1, 0)
    even = {round(last * i / (_LINES - 2)) for i in range(_LINES - 1)}
    steps = sorted(even | {0, min(warmup, last), last})
    return [{"step": step, "learning_rate": float(rate(jnp.int32(step)))} for step in steps]


def _drawn(name: str, rates: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each step, with a bar as long as its learning rate is high."""
    top = max(row["learning_rate"] for row in rates)
    yield f"{name}: learning rate by step"
    for row in rates:
        rate = row["learning_rate"]
        yield f"{row['step']:>10,}  {rate:9.3e}  {'█' * max(round(_WIDTH * rate / top), 0)}"
