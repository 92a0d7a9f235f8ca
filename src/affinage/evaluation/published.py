"""Results that others have published, to stand beside ours. None of them was measured here."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class PublishedModel:
    """What somebody states of a model: scores as shares between 0 and 1, by task, of the task's headline metric."""

    name: str
    family: str
    parameters: int
    tokens: int  # trained on, fine-tuning included; a lower bound where the source says "+"
    tokens_as_stated: str
    source: str
    scores: Mapping[str, float]
    notes: Mapping[str, str]  # by task: what the source says otherwise elsewhere


@lru_cache
def published() -> tuple[PublishedModel, ...]:
    """All published results that ship with affinage, in the order of their parameters as published."""
    return tuple(
        PublishedModel(
            name=one["model"],
            family=one["family"],
            parameters=one["parameters"],
            tokens=one["tokens"],
            tokens_as_stated=one["tokens_as_stated"],
            source=_data()["sources"][one["source"]],
            scores={task: score / 100 for task, score in one["scores"].items()},
            notes=one.get("notes", {}),
        )
        for one in _data()["models"]
    )


@lru_cache
def headline_metrics() -> Mapping[str, str]:
    """The metric that the published score of each task is."""
    return dict(_data()["metrics"])


def of_other_items(items: Mapping[str, int | None]) -> dict[str, tuple[int, int]]:
    """Of the tasks with published scores, by how many items each was judged, those that have another number of them.

    Under the name of a benchmark there may be items of one's own, or a part of it. What is judged on as many items as
    the benchmark has is taken for the benchmark.

    Returns:
        {task: (items, how many the benchmark has)}.
    """
    known: dict[str, int] = _data()["items"]
    return {
        task: (count, known[task])
        for task, count in items.items()
        if task in known and count is not None and count != known[task]
    }


def tuned() -> Mapping[str, tuple[PublishedModel, ...]]:
    """By family: a base model, what fine-tuning made of it, and what longer fine-tuning did."""
    by_name = {model.name: model for model in published()}
    return {family: tuple(by_name[name] for name in names) for family, names in _data()["tuned"].items()}


@lru_cache
def _data() -> dict[str, Any]:
    text = files("affinage.evaluation").joinpath("published.json").read_text(encoding="utf-8")
    return dict(json.loads(text))
