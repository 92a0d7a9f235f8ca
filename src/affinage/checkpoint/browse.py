"""What is in checkpoints: lists, sizes, and how two of them differ."""

from typing import Any

import jax
import numpy as np

from affinage.checkpoint.metadata import CorruptedError, Metadata, read_metadata
from affinage.checkpoint.store import CheckpointStore, entries, whats_missing
from affinage.differing import differing

_OF_THE_CLOCK = ("saved", "seconds", "clock", "resumed_at")  # facts in which any two checkpoints differ


def listing(store: CheckpointStore) -> list[dict[str, Any]]:
    """{step, saved, bytes, why_not} of everything that is named like a step, oldest first.

    `why_not` says why it cannot be restored, as far as is known without reading arrays; "" if it can.
    """
    rows = []
    for step, path in entries(store.folder):
        saved, why_not = None, whats_missing(path)
        if not why_not:
            try:
                saved = read_metadata(path).facts.get("saved")
            except (CorruptedError, OSError) as error:
                why_not = str(error)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        rows.append({"step": step, "saved": saved, "bytes": size, "why_not": why_not})
    return rows


def arrays(metadata: Metadata) -> dict[str, dict[str, Any]]:
    """{tree: {arrays, numbers, bytes, dtypes}} of a step, by its metadata alone."""
    trees: dict[str, dict[str, Any]] = {}
    for path, (dtype, shape, _) in metadata.checksums.items():
        tree = trees.setdefault(path.partition(".")[0], {"arrays": 0, "numbers": 0, "bytes": 0, "dtypes": []})
        size = int(np.prod(shape, dtype=np.int64))
        tree["arrays"] += 1
        tree["numbers"] += size
        tree["bytes"] += size * jax.numpy.dtype(dtype).itemsize
        tree["dtypes"] = sorted({*tree["dtypes"], dtype})
    return trees


def compare(one: Metadata, other: Metadata) -> dict[str, Any]:
    """The facts that differ between two checkpoints, and the arrays that do, by their checksums.

    Returns:
        {facts: [{name, saved, now}], arrays: {same, different: [{name, shape}], only: [names]}}.
    """
    facts = [{key: value for key, value in each.facts.items() if key not in _OF_THE_CLOCK} for each in (one, other)]
    changed = [{"name": name, "saved": saved, "now": now} for name, (saved, now) in sorted(differing(facts))]
    left, right = one.checksums, other.checksums
    both = sorted(left.keys() & right.keys())
    different = [{"name": path, "shape": left[path][1]} for path in both if left[path] != right[path]]
    only = sorted(left.keys() ^ right.keys())
    return {"facts": changed, "arrays": {"same": len(both) - len(different), "different": different, "only": only}}
