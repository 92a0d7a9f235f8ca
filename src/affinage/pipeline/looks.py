"""A model that is being trained, put to benchmarks where it is."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from affinage.config.data import POCKET_WORLD
from affinage.config.training import MonitorSettings, TrainSettings
from affinage.errors import UserError
from affinage.pipeline.step import StepContext
from affinage.pipeline.texts import chat_tokenizer

if TYPE_CHECKING:
    from affinage.evaluation.run import Answered
    from affinage.generation.model import LoadedModel
    from affinage.model import Graph
    from affinage.training.state import TrainState

ANSWERS = "benchmarks.db"  # of the scores that are being made
_PROCESSORS = "cpu"  # where how many rows are quickest is not a matter of memory


class _GivenUp(Exception):
    """Raised between batches to leave an evaluation."""


def evaluated(
    context: StepContext,
    asked: MonitorSettings,
    setting: str,
    model: "LoadedModel",
    state: "TrainState",
    stop: Callable[[], bool],
    *,
    world: Path | None,
    answered: "Answered | None" = None,
) -> dict[str, Any] | None:
    """What `affinage.evaluation.run.evaluate` says of a model; None if `stop`, asked between batches, was true.

    Answers are on disk as they come, under a fingerprint of the weights: training that is stopped or killed comes by
    the same weights again, bit for bit, and what has been answered of them is not computed again.

    Args:
        context: of the stage that trains.
        asked: the tasks, and how many items of each.
        setting: where the recipe asks for them, for messages.
        model: with the weights of the state.
        state: what else is in the devices' memory.
        stop: also tells that there is progress.
        world: the folder of the pocket world, where its benchmarks can be asked for.
        answered: told of the answer to each item.
    """
    from affinage.evaluation.run import evaluate

    def go_on(_: str) -> None:
        if stop():
            raise _GivenUp

    try:
        return evaluate(
            model,
            asked.tasks,
            keep=context.folder / ANSWERS,
            task_folders={} if world is None else {POCKET_WORLD: world / "tasks"},
            data_dir=asked.data_dir,
            limit=asked.limit,
            draw=context.recipe.seed,
            batch_size=rows_beside(model, state) if asked.batch_size == "auto" else asked.batch_size,
            samples=0,
            answered=answered,
            progress=go_on,
        )
    except _GivenUp:
        return None
    except UserError as error:
        where = ", ".join(filter(None, (f"{setting}.tasks", error.where)))
        raise UserError(error.what, where=where, fix=error.fix) from error


def in_percent(task: str, score: Mapping[str, float | None]) -> str:
    """The {value, stderr} of a share, as a training tells it in the terminal."""
    value, error = score["value"], score["stderr"]
    assert value is not None
    return f"{task} {100 * value:.1f}" + ("" if error is None else f" ± {100 * error:.1f}") + " %"


def rows_beside(model: "LoadedModel", state: "TrainState", platform: str = "") -> int:
    """As many rows as fit beside the state of the training on each host; on processors memory is not what decides.

    `platform` is JAX's name of it, by default of the devices that hold the weights.
    """
    import jax

    from affinage.evaluation.batch_size import MOST, bytes_on_a_device, rows_that_fit

    weights = jax.tree.leaves(model.params)
    if (platform or next(iter(weights[0].sharding.device_set)).platform) == _PROCESSORS:
        return MOST
    counted = {id(leaf) for leaf in weights}
    beside = sum(bytes_on_a_device(leaf) for leaf in jax.tree.leaves(state) if id(leaf) not in counted)
    return rows_that_fit(model, beside=beside)


def model_in_training(
    context: StepContext, settings: TrainSettings, graph: "Graph", length: int, system_prompt: str, params: Any
) -> "LoadedModel":
    """A model of `length` tokens of context with the weights that it has now, where they are."""
    import jax

    from affinage.generation.model import LoadedModel
    from affinage.hardware.chips import chip
    from affinage.parallel import MeshLayout, serving_table
    from affinage.training.program import compute_dtype

    sharding, table = jax.tree.leaves(params)[0].sharding, serving_table(context.recipe.parallel.sharding)
    device = next(iter(sharding.device_set))
    return LoadedModel(
        graph=graph,
        params=params,
        tokenizer=chat_tokenizer(context),
        name=context.recipe.name,
        context=length,
        layout=MeshLayout(sharding.mesh, table) if len(sharding.device_set) > 1 else None,
        system_prompt=system_prompt,
        compute_dtype=compute_dtype(settings.precision, chip(device.device_kind)).name,
    )
