"""Scores with and without the items that stand in the text that a model was trained on."""

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from affinage.data.contamination import Contamination

_SAME = 1e-9  # how near what is computed of the items must come to a reported value to be what that is
_LARGEST = math.log(sys.float_info.max)  # that exp can be taken of


def contamination_of(
    found: Contamination, tasks: Mapping[str, Any], items: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, Any]:
    """What was found of the items that were asked, and the scores of the others.

    Args:
        found: of all items of the tasks.
        tasks: results, {task: {metrics: {metric: {value, stderr}}}}.
        items: of every task the harness's samples; an item has the number of its place in the task.

    Returns:
        {texts: how many were looked through, boilerplate, ngram: as decontamination's, tasks: {task: {items, too_short,
        too_short_of, found: [numbers], common: [numbers], without: {metric: {value, stderr}}}}}. common: of which every
        run of words that stands in the text is in more than `boilerplate` texts; the scores are without these, too.
        items are those that were asked, too_short is of the `too_short_of` items that the task has; metrics
        that are neither a mean over items nor a perplexity of them are left out.
    """
    told = {}
    for name, asked in items.items():
        numbers = {str(item["doc_id"]) for item in asked}
        if name not in found.benchmarks:
            continue
        mine, common = (
            sorted(int(item) for task, item in some if task == name and item in numbers)
            for some in (found.found, found.common)
        )
        told[name] = {
            "items": len(numbers),
            "too_short": found.too_short.get(name, 0),
            "too_short_of": found.items.get(name),
            "found": mine,
            "common": common,
            "without": {
                metric: without
                for metric, score in tasks[name]["metrics"].items()
                if (without := _without(asked, metric, score["value"], {*mine, *common})) is not None
            },
        }
    return {"texts": found.texts, "boilerplate": found.boilerplate, "ngram": found.ngram, "tasks": told}


def _without(
    items: Sequence[Mapping[str, Any]], metric: str, reported: float | None, found: set[int]
) -> dict[str, float | None] | None:
    name, _, filtered = metric.partition(",")
    asked = [item for item in items if item.get("filter", "none") == (filtered or "none") and name in item]
    values = [item[name] for item in asked]
    if reported is None or not values or not all(isinstance(value, int | float) for value in values):
        return None
    score = _perplexity if name == "perplexity" else _mean
    computed = score(values)["value"]
    if computed is None or not math.isclose(computed, reported, rel_tol=_SAME, abs_tol=_SAME):
        return None
    return score([float(item[name]) for item in asked if item["doc_id"] not in found])


def _mean(values: Sequence[float]) -> dict[str, float | None]:
    stderr = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {"value": statistics.fmean(values) if values else None, "stderr": stderr}


def _perplexity(log_likelihoods: Sequence[float]) -> dict[str, float | None]:
    """exp of minus the mean; its error is, by the delta method, that of the mean times itself."""
    mean, stderr = _mean(log_likelihoods).values()
    if mean is None or -mean > _LARGEST:
        return {"value": None, "stderr": None}
    value = math.exp(-mean)
    return {"value": value, "stderr": None if stderr is None else value * stderr}
