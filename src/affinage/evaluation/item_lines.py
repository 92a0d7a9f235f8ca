"""A line of items/TASK.jsonl: which item it was, how it was asked, and what its answer scored."""

import math
from collections.abc import Mapping
from typing import Any

LOG_LIKELIHOOD = "log_likelihood"
_ABOUT = ("id", "hash", "prompt_hash", "target_hash", "filter")  # what a line holds besides scores


def line_of(sample: Mapping[str, Any]) -> dict[str, Any]:
    """The line of one of the harness's samples; of an item it has one for every filter of its answers."""
    about = {"id": sample["doc_id"], "hash": sample["doc_hash"]}
    about |= {name: sample[name] for name in ("prompt_hash", "target_hash", "filter")}
    return about | {of_item(metric): finite(sample[metric]) for metric in sample["metrics"]}


def scores_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """The scores in a line by metric, None for what no single item has; of lines of older versions, too."""
    return {of_item(name): value for name, value in line.items() if name not in _ABOUT}


def of_item(metric: str) -> str:
    """What a metric is of a single item: of `perplexity` the harness gives the log-likelihood, in nats."""
    return LOG_LIKELIHOOD if metric == "perplexity" else metric


def label(metric: str, filtered: str | None) -> str:
    """How results call the metric of the answers that a filter left: as the harness, which names all but `none`."""
    return metric if filtered in (None, "none") else f"{metric},{filtered}"


def finite(value: Any) -> float | None:
    """A finite float, or None for what the harness calls "N/A"."""
    try:
        return float(value) if math.isfinite(float(value)) else None
    except (TypeError, ValueError):
        return None
