"""What the planner says, at the time of the report, of a training that was made."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from affinage.errors import UserError
from affinage.results import MANIFEST, TrainedModel, TrainingResult, read_json


def predicted(name: str, folder: Path, result: TrainingResult, recipe: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a step and of all, tokens per second, and bytes of a device, for the devices that a training ran on.

    Nothing for trainings that the planner does not know (chips of other kinds), or that do not say enough.
    """
    model = TrainedModel.model_validate(read_json(folder / "model.json"))
    steps, tokens, context = result.steps, result.tokens, model.context
    if not (steps and tokens and context and model.graph):
        return {}
    from affinage.config.recipe import Recipe
    from affinage.model import parse
    from affinage.planning.plan import forecast, preferring

    try:
        read = Recipe.model_validate(dict(recipe))
        settings, graph = getattr(read, name), parse(model.graph)
        if settings is None:
            return {}
        if name == "dpo":  # what is written is the model as it is used
            graph = preferring(graph, settings, context, _documents(folder.parent / "preference-data"))
    except (ValidationError, UserError):  # written by another version
        return {}
    found = forecast(
        graph,
        settings,
        read.parallel,
        rows=tokens // steps // context,
        context=context,
        mesh=result.devices.mesh,
        device_kind=result.devices.kind,
        devices=result.devices.count or 1,
    )
    if found is None:
        return {}
    memory, time = found
    step = time.seconds
    return {
        "step_seconds": step,
        "seconds": step * steps,
        "tokens_per_second": tokens / steps / step,
        "memory": float(memory.total),
    }


def _documents(rows: Path) -> int | None:
    """Documents of a row of preferences, where the rows are still there."""
    from affinage.data.tuning_data import documents_in_a_row

    return documents_in_a_row(rows) if (rows / MANIFEST).is_file() else None
