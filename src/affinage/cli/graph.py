"""The verb `graph`: what a model consists of, and what it costs."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from affinage.cli.options import RUNS, JsonOption, RecipeArgument, RunsOption, SetOption, app, load, warn
from affinage.cli.output import described, emit

if TYPE_CHECKING:
    from affinage.config.recipe import Recipe

_UNKNOWN_CHARACTERS = 256  # the size of `vocab: auto` before the characters of the text have been counted
_COLUMNS = ("name", "kind", "repeat", "shape", "parameters", "flops", "training_flops", "inputs")


@app.command()
def graph(
    recipe: RecipeArgument, overrides: SetOption = None, runs: RunsOption = RUNS, as_json: JsonOption = False
) -> None:
    """Print the model graph: the shape and parameters of every node, and its FLOPs for one row.

    Example: affinage graph julian-600m
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # only shapes are computed: the accelerator is not taken
    loaded, run = load(recipe, overrides, runs, lenient=True)
    from affinage.model.analysis import parameters, summary_table
    from affinage.model.graph import parse
    from affinage.model.layer import SEQUENCE
    from affinage.registry import load_plugins

    load_plugins(loaded)
    vocabulary = _vocabulary(loaded.recipe, run or runs / loaded.recipe.name)
    model = parse(loaded.recipe.model, loaded.locate, vocabulary=vocabulary)
    context = loaded.recipe.packing.seq_len
    facts: dict[str, Any] = {
        "nodes": summary_table(model, 1, context),
        "context": context if any(SEQUENCE in shape.dims for _, shape in model.inputs) else None,
        "parameters": asdict(parameters(model)),
    }
    shown = [{key: row[key] for key in _COLUMNS} for row in facts["nodes"]]
    emit(facts, as_json, described(facts | {"nodes": shown}))


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
