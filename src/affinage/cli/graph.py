"""The verb `graph`: what a model consists of, and what it costs."""

import os
from dataclasses import asdict
from typing import Any

from affinage.cli.options import RUNS, JsonOption, RecipeArgument, RunsOption, SetOption, app, load, warn
from affinage.cli.output import described, emit

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
    from affinage.model.graph import parameters, parse, summary_table
    from affinage.model.layer import SEQUENCE
    from affinage.registry import load_plugins
    from affinage.results import TokenizerResult, read_result

    load_plugins(loaded)
    result = read_result((run or runs / loaded.recipe.name) / "train-tokenizer", TokenizerResult)
    settings, vocabulary = loaded.recipe.tokenizer, result.vocabulary if result else None  # what `vocab: auto` is
    if settings.kind == "bpe":
        vocabulary = settings.vocab_size
    elif not vocabulary:
        vocabulary = _UNKNOWN_CHARACTERS
        warn(f"`vocab: auto` is shown as {vocabulary} until `affinage data` has counted the characters")
    model = parse(loaded.recipe.model, loaded.locate, vocabulary=vocabulary)
    context = loaded.recipe.packing.seq_len
    facts: dict[str, Any] = {
        "nodes": summary_table(model, 1, context),
        "context": context if any(SEQUENCE in shape.dims for _, shape in model.inputs) else None,
        "parameters": asdict(parameters(model)),
    }
    shown = [{key: row[key] for key in _COLUMNS} for row in facts["nodes"]]
    emit(facts, as_json, described(facts | {"nodes": shown}))
