"""The work of the training stages."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich

from affinage.errors import UserError
from affinage.recipe.training import TrainSettings
from affinage.stages.initial import MODEL, initial_folder, initial_params
from affinage.stages.stage import StageContext, Summary
from affinage.stages.store import write_json

if TYPE_CHECKING:
    from affinage.data.tokenizer import Tokenizer
    from affinage.model import Graph


def pretrain(context: StageContext) -> Summary:
    """Train the model, from random weights or those that `init` names, on rows of documents."""
    from affinage.data.tokenizer import Tokenizer

    settings = context.recipe.pretrain
    assert settings is not None
    graph = graph_of(context, Tokenizer.load(context.inputs["tokenizer"]))
    return _train(
        context,
        graph,
        settings,
        context.inputs["rows"],
        weights=settings.language_weights,
        initial_params=_imported(context, graph),
    )


def sft(context: StageContext) -> Summary:
    """Fine-tune the pretrained model, or the one that `init` names, on conversations."""
    from affinage.checkpoint import CheckpointStore
    from affinage.data.conversations import show_example
    from affinage.data.tokenizer import Tokenizer

    settings = context.recipe.sft
    assert settings is not None
    tokenizer = Tokenizer.load(context.inputs["tokenizer"])
    graph = graph_of(context, tokenizer)
    rich.print("sft: an example; what is trained on stands between ⟦ and ⟧")
    rich.print(show_example(context.inputs["conversations"], tokenizer))
    pretrained = context.inputs.get("pretrain")
    base = CheckpointStore(pretrained / "checkpoints") if pretrained else None
    return _train(
        context,
        graph,
        settings,
        context.inputs["conversations"],
        initial_params=(lambda abstract: base.restore_params(None, abstract)) if base else _imported(context, graph),
        system_prompt=settings.system_prompt,
    )


def _imported(context: StageContext, graph: "Graph") -> Callable[[Any], Any] | None:
    """The weights that the recipe begins with; None for random ones."""
    folder = initial_folder(context.loaded)
    return None if folder is None else initial_params(folder, graph)


def graph_of(context: StageContext, tokenizer: "Tokenizer") -> "Graph":
    """The recipe's model, with the tokenizer's vocabulary where it says `vocab: auto`.

    Raises:
        UserError: also if the tokenizer has ids that the model does not know.
    """
    from affinage.model import parse

    recipe, locate = context.recipe, context.loaded.locate
    graph = parse(with_vocabulary(recipe.model, tokenizer.vocabulary), locate)
    if tokenizer.vocabulary > graph.vocabulary:
        raise UserError(
            f"the tokenizer has {tokenizer.vocabulary} pieces, the model's vocabulary is {graph.vocabulary}",
            where=locate(("model", "nodes")),
            fix=f"Set `vocab: auto`, or at least {tokenizer.vocabulary}, where the model says {graph.vocabulary}.",
        )
    return graph


def with_vocabulary(model: Any, vocabulary: int) -> Any:
    """A copy of a `model:` mapping with every `vocab: auto` replaced."""
    if isinstance(model, dict):
        return {
            key: vocabulary if (key, value) == ("vocab", "auto") else with_vocabulary(value, vocabulary)
            for key, value in model.items()
        }
    return [with_vocabulary(entry, vocabulary) for entry in model] if isinstance(model, list) else model


def _train(
    context: StageContext,
    graph: "Graph",
    settings: TrainSettings,
    rows: Path,
    *,
    weights: dict[str, float] | None = None,
    initial_params: Callable[[Any], Any] | None = None,
    system_prompt: str = "",
) -> Summary:
    from affinage.data.feed import RowFeed, validation_sets
    from affinage.hardware.devices import acquire
    from affinage.parallel import make_mesh
    from affinage.training import TrainJob, rows_per_step, train

    recipe = context.recipe
    mesh = {str(axis): size for axis, size in recipe.mesh.items()}
    batch = rows_per_step(settings, make_mesh(mesh, acquire()).size)
    feed = RowFeed(rows / "train", seed=recipe.seed, batch=batch, weights=weights)
    facts = {"graph": graph.to_dict(), "context": feed.context, "system_prompt": system_prompt}
    write_json(context.folder / MODEL, facts | {"precision": settings.precision.model_dump(mode="json")})
    return train(
        TrainJob(
            graph=graph,
            settings=settings,
            mesh=mesh,
            seed=recipe.seed,
            feed=feed,
            # A micro-batch is what fits in memory.
            validation=validation_sets(
                rows / "validation", batch=batch // settings.micro_batches, limit=settings.validation_rows
            ),
            folder=context.folder,
            initial_params=initial_params,
            name=context.folder.name.rpartition("-")[0],
        )
    )
