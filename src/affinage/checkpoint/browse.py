"""What is in checkpoints: lists, facts, and how two of them differ."""

from typing import Any

import jax
import numpy as np

from affinage.checkpoint.compatibility import differences
from affinage.checkpoint.metadata import CorruptedError, Metadata, leaves_by_path, read_metadata
from affinage.checkpoint.store import CheckpointStore, whats_missing

_NOT_COMPARED = ("saved", "seconds", "stalls", "clock", "resumed_at")  # facts of the clock


def listing(store: CheckpointStore) -> list[dict[str, Any]]:
    """{step, saved, bytes, why_not} of everything that is named like a step, oldest first.

    `why_not` says why it cannot be restored, as far as is known without reading arrays; "" if it can.
    """
    found = []
    for step, path in store.entries():
        saved, why_not = None, whats_missing(path)
        if not why_not:
            try:
                saved = read_metadata(path).facts.get("saved")
            except (CorruptedError, OSError) as error:
                why_not = str(error)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        found.append({"step": step, "saved": saved, "bytes": size, "why_not": why_not})
    return found


def arrays(metadata: Metadata) -> dict[str, dict[str, Any]]:
    """{tree: {arrays, numbers, bytes, dtypes, fingerprint}} of a step, by its metadata alone."""
    found = {}
    for name in dict.fromkeys(path.partition(".")[0] for path in metadata.checksums):
        own = {path: facts for path, facts in metadata.checksums.items() if path.partition(".")[0] == name}
        sizes = [(int(np.prod(shape, dtype=np.int64)), jax.numpy.dtype(dtype)) for dtype, shape, _ in own.values()]
        found[name] = {
            "arrays": len(own),
            "numbers": sum(size for size, _ in sizes),
            "bytes": sum(size * dtype.itemsize for size, dtype in sizes),
            "dtypes": sorted({str(dtype) for _, dtype in sizes}),
            "fingerprint": Metadata(metadata.step, {}, own).fingerprint,
        }
    return found


def compare(one: tuple[CheckpointStore, int], other: tuple[CheckpointStore, int], *, numbers: bool) -> dict[str, Any]:
    """The facts that differ between two checkpoints, and the arrays that do, by their checksums.

    Args:
        one: a store and a step.
        other: the same.
        numbers: read the arrays that differ, to measure how far they are apart.

    Returns:
        {facts: [{name, saved, now}], arrays: {same, different: [{name, shape}], only: [names]}}; with `numbers` also
        `most`, the largest absolute difference of numbers that are finite in both (None if there is none, or the shapes
        differ), and `not_finite`, how many of the others differ.
    """
    metadata = [store.metadata(step) for store, step in (one, other)]
    facts = ({key: value for key, value in each.facts.items() if key not in _NOT_COMPARED} for each in metadata)
    changed = differences(*facts)
    named = {each.name for each in changed}
    # A setting that decides about numbers is in the identity, too: it is listed once.
    listed = [each for each in changed if each.name.replace("settings.", "identity.", 1) not in named - {each.name}]
    left, right = (each.checksums for each in metadata)
    both = sorted(left.keys() & right.keys())
    different = [{"name": path, "shape": left[path][1]} for path in both if left[path] != right[path]]
    for tree in dict.fromkeys(each["name"].partition(".")[0] for each in different) if numbers else ():
        # Memory holds one tree of each checkpoint at a time.
        read = [
            leaves_by_path(store.restore(step, {tree: store.described(step)[tree]})) for store, step in (one, other)
        ]
        for each in different:
            if each["name"].partition(".")[0] == tree:
                each |= _distance(*(np.asarray(leaves[each["name"]]) for leaves in read))
    found = {"same": len(both) - len(different), "different": different, "only": sorted(left.keys() ^ right.keys())}
    return {"facts": [each._asdict() for each in listed], "arrays": found}


def _distance(a: np.ndarray, b: np.ndarray) -> dict[str, float | int | None]:
    if a.shape != b.shape:
        return {"most": None, "not_finite": 0}
    left, right = a.astype(np.float64), b.astype(np.float64)
    both = np.isfinite(left) & np.isfinite(right)
    most = float(np.max(np.abs(left[both] - right[both]))) if both.any() else None
    equal = (left == right) | (np.isnan(left) & np.isnan(right))
    return {"most": most, "not_finite": int(np.count_nonzero(~both & ~equal))}
