"""Loss and bits per byte on text that is never trained on."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from affinage.training.job import HostBatch, ValidationSet

PyTree = Any


def validate(
    weights: PyTree,
    sets: Mapping[str, ValidationSet],
    *,
    step: Callable[[PyTree, PyTree], dict[str, Any]],
    put: Callable[[HostBatch], PyTree],
    stop: Callable[[], bool],
) -> dict[str, dict[str, float]] | None:
    """Loss in nats per counted token, and bits per byte of text, of every validation set.

    Bits per byte = total nats / ln 2 / bytes of the text in UTF-8, which does not depend on the tokenizer.

    Args:
        weights: parameters and moving averages.
        sets: by name.
        step: compiled; see `make_validation_step`.
        put: host batch -> device batch.
        stop: asked between batches; when true the validation is given up.

    Returns:
        {name: {loss, bits_per_byte}}, with what the graph reports in place of the latter where the rows are no text; or
        None if it was given up.
    """
    scores = {}
    for name, rows_of in sets.items():
        sums = []
        for batch in rows_of:
            if stop():
                return None
            sums.append(jax.block_until_ready(step(weights, put(batch))))
        # Python's floats: float32 would lose the last digits of a sum over many batches.
        nats = math.fsum(float(s["sum"]) for s in sums)
        count = math.fsum(float(s["count"]) for s in sums)
        scores[name] = {"loss": nats / max(count, 1.0)}
        if rows_of.bytes:
            scores[name]["bits_per_byte"] = nats / math.log(2) / rows_of.bytes
        else:
            scores[name] |= {metric: _mean([s["metrics"][metric] for s in sums]) for metric in sums[0]["metrics"]}
    return scores


def _mean(pairs: Sequence[tuple[jax.Array, jax.Array]]) -> float:
    return math.fsum(float(total) for total, _ in pairs) / max(math.fsum(float(count) for _, count in pairs), 1.0)
