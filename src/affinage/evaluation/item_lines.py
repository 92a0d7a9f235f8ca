"""A line of items/TASK.jsonl: which item it was, how it was asked, and what its answer scored."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

LOG_LIKELIHOOD = "log_likelihood"
BITS_PER_BYTE = "bits_per_byte"
BYTES = "bytes"
_ABOUT = ("id", "hash", "prompt_hash", "target_hash", "filter", BYTES)  # what a line holds besides scores
# Metrics of all texts together. Of a single one the harness gives its log-likelihood, and its length in bytes or words.
_OF_TEXTS = {"byte_perplexity": True, BITS_PER_BYTE: True, "word_perplexity": False}  # whether in bytes


def line_of(sample: Mapping[str, Any]) -> dict[str, Any]:
    """The line of one of the harness's samples; of an item it has one for every filter of its answers."""
    about = {"id": sample["doc_id"], "hash": sample["doc_hash"]}
    about |= {name: sample[name] for name in ("prompt_hash", "target_hash", "filter")}
    for metric in sample["metrics"]:
        value = sample[metric]
        if metric in _OF_TEXTS and isinstance(value, Sequence) and len(value) == 2:
            about[LOG_LIKELIHOOD] = finite(value[0])
            about |= {BYTES: int(value[1])} if _OF_TEXTS[metric] else {}
        else:
            about[of_item(metric)] = finite(value)
    return about


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
