"""What the planner says, at the time of the report, of a training that was made."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from affinage.errors import UserError
from affinage.report.reading import json_file, mapping, string, whole


def predicted(name: str, folder: Path, summary: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a step and of all, tokens per second, and bytes of a device, for the devices that a training ran on.

    Nothing for trainings that the planner does not know (images, chips of other kinds), or that do not say enough.
    """
    written = json_file(folder / "model.json")
    steps, tokens, context = whole(summary.get("steps")), whole(summary.get("tokens")), whole(written.get("context"))
    devices = mapping(summary.get("devices"))
    if name not in ("pretrain", "sft", "dpo") or not (steps and tokens and context and mapping(written.get("graph"))):
        return {}
    from affinage.config.recipe import Recipe
    from affinage.model import parse
    from affinage.planning.forecast import forecast
    from affinage.planning.plan import preferring

    try:
        read = Recipe.model_validate(dict(recipe))
        settings, graph = getattr(read, name), parse(mapping(written["graph"]))
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
        mesh={str(axis): int(size) for axis, size in mapping(devices.get("mesh")).items()},
        device_kind=string(devices.get("kind")),
        devices=whole(devices.get("count")) or 1,
    )
    if found is None:
        return {}
    step = found.time.seconds
    return {
        "step_seconds": step,
        "seconds": step * steps,
        "tokens_per_second": tokens / steps / step,
        "memory": float(found.memory.total),
    }


def _documents(rows: Path) -> int | None:
    """Documents of a row of preferences, where the rows are still there."""
    from affinage.data.preferences import documents_in_a_row

    return documents_in_a_row(rows) if (rows / "manifest.json").is_file() else None
