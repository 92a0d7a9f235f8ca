"""The verb `graph`: what a model consists of and costs, and its learning rates."""

import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from affinage.cli.options import RUNS, JsonOption, RecipeArgument, RunsOption, SetOption, load, opt, verb, warn
from affinage.cli.output import described, emit
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.config.load import LoadedRecipe
    from affinage.config.parallel import Remat
    from affinage.config.recipe import Recipe
    from affinage.model.graph import Graph

_UNKNOWN_CHARACTERS = 256  # the size of `vocab: auto` before the characters of the text have been counted
_COLUMNS = ("name", "kind", "repeat", "shape", "parameters", "flops", "training_flops", "inputs")
_LINES = 24  # at most, for the schedule of one training
_WIDTH = 48  # characters of the longest bar


@verb()
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
        raise UserError("these are two outputs", where="--json, --mermaid", fix="Choose one of them.")
    loaded = load(recipe, overrides, runs, lenient=True)
    from affinage.model.analysis import mermaid, parameters, summary_table
    from affinage.model.graph import parse
    from affinage.model.layer import SEQUENCE
    from affinage.pipeline.models import resolve
    from affinage.pipeline.steps_train import with_vocabulary
    from affinage.plugins import load_plugins

    load_plugins(loaded)
    if schedule:
        rates = _learning_rates(loaded)
        emit(rates, as_json, described({name: _with_bars(rows) for name, rows in rates.items()}))
        return
    vocabulary = _vocabulary(loaded.recipe, resolve(recipe, runs).run or runs / loaded.recipe.name)
    model = parse(with_vocabulary(loaded.recipe.model, vocabulary), loaded.locate)
    if as_mermaid:
        print(mermaid(model), end="")
        return
    batch, context = _batch_size(loaded.recipe), loaded.recipe.packing.seq_len
    facts: dict[str, Any] = {
        "nodes": summary_table(model, batch, context),
        "batch": batch,
        "context": context if any(SEQUENCE in shape.dims for _, shape in model.inputs) else None,
        "parameters": asdict(parameters(model)),
        "memory": _memory(model, batch, context, loaded.recipe.parallel.remat),
    }
    shown = [{key: row[key] for key in _COLUMNS} for row in facts["nodes"]]
    emit(facts, as_json, described(facts | {"nodes": shown}))


def _memory(model: "Graph", batch: int, context: int, remat: Any) -> dict[str, Any]:
    """Bytes in bfloat16: the cache of one sequence, and what a step keeps for its backward pass on all devices."""
    import jax.numpy as jnp

    from affinage.config.parallel import RematPreset
    from affinage.model.analysis import cache_bytes
    from affinage.planning.estimate import activations

    settings: dict[str, Remat] = {policy: policy for policy in get_args(RematPreset)}
    settings |= {} if isinstance(remat, str) else {"by name": remat}
    found = {policy: activations(model, batch, context, setting) for policy, setting in settings.items()}
    return {
        "decoding_cache_bytes": cache_bytes(model, 1, context, jnp.bfloat16) or None,
        "activation_bytes": {policy: kept for policy, (kept, _) in found.items()},
        "offloaded_bytes": {policy: offloaded for policy, (_, offloaded) in found.items() if offloaded},
    }


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
    if result and result.vocabulary:
        return result.vocabulary
    warn(f"`vocab: auto` is shown as {_UNKNOWN_CHARACTERS} until `affinage data` has counted the characters")
    return _UNKNOWN_CHARACTERS


def _learning_rates(loaded: "LoadedRecipe") -> dict[str, list[dict[str, Any]]]:
    """For every training: steps (counted from 0, the first and the last among them) with their learning rates."""
    import jax.numpy as jnp

    from affinage.training.optimizer import check_choices, learning_rate

    rates = {}
    for name in loaded.recipe.trainings:
        settings = getattr(loaded.recipe, name)
        check_choices(settings, partial(_located, loaded, name))
        rate, last = learning_rate(settings.schedule, settings.steps), settings.steps - 1
        warmup = max(settings.schedule.warmup(settings.steps) - 1, 0)
        even = {round(last * i / (_LINES - 2)) for i in range(_LINES - 1)}
        steps = sorted(even | {0, min(warmup, last), last})
        rates[name] = [{"step": step, "learning_rate": float(rate(jnp.int32(step)))} for step in steps]
    return rates


def _located(loaded: "LoadedRecipe", section: str, path: Sequence[str | int]) -> str:
    return loaded.locate((section, *path))


def _with_bars(rates: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, each with a bar as long as its learning rate is high."""
    top = max(row["learning_rate"] for row in rates)
    return [row | {"bar": "█" * max(round(_WIDTH * row["learning_rate"] / top), 0)} for row in rates]
