"""Loss and bits per byte on text that is never trained on."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from affinage.training.job import HostBatch, ValidationSet

PyTree = Any


def validate(
    weights: PyTree,
    sets: Mapping[str, ValidationSet],
    *,
    step: Callable[[PyTree, PyTree], dict[str, jax.Array]],
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
        {name: {loss, bits_per_byte}}, or None if it was given up.
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
        scores[name] = {
            "loss": nats / max(count, 1.0),
            "bits_per_byte": nats / math.log(2) / max(rows_of.bytes, 1),
        }
    return scores
