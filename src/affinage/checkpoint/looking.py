"""What is in checkpoints, without a training: lists, facts, and how two of them differ."""

import hashlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

from affinage.checkpoint.facts import differences
from affinage.checkpoint.store import CheckpointStore

_NOT_COMPARED = ("saved", "seconds", "stalls", "clock", "resumed_at")  # facts of the clock


def listing(store: CheckpointStore) -> list[dict[str, Any]]:
    """{step, saved, bytes, complete, why_not} of everything that is called like a step, oldest first.

    `why_not` says in words why it is not complete; "" if it is.
    """
    found = []
    for step, path in store.entries():
        why_not = store.why_not_read(step)
        files = [] if path.is_symlink() else [file for file in path.rglob("*") if file.is_file()]
        saved = store.meta(step).get("saved") if not why_not and not store.damage(step, {}) else None
        size = sum(file.stat().st_size for file in files)
        found.append({"step": step, "saved": saved, "bytes": size, "complete": not why_not, "why_not": why_not})
    return found


def arrays(store: CheckpointStore, step: int) -> dict[str, dict[str, Any]]:
    """{tree: {arrays, numbers, bytes, dtypes}} of a step."""
    found = {}
    for name, tree in _abstract(store, step).items():
        leaves = jax.tree.leaves(tree)
        found[name] = {
            "arrays": len(leaves),
            "numbers": sum(leaf.size for leaf in leaves),
            "bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
            "dtypes": sorted({str(leaf.dtype) for leaf in leaves}),
        }
    return found


def fingerprints(store: CheckpointStore, step: int) -> dict[str, str]:
    """{tree: hash} of the names, dtypes, shapes and numbers in a step, all of which are read.

    Two steps of the same numbers have the same hashes, whoever saved them, when, and on which mesh.
    """
    found = {}
    for name, tree in _abstract(store, step).items():  # one after the other, as in `compare`
        digest = hashlib.sha256()
        for path, leaf in sorted(_leaves(store.restore(step, {name: tree})[name], name).items()):
            digest.update(f"{path!r} {leaf.dtype} {leaf.shape}\n".encode())
            digest.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
        found[name] = digest.hexdigest()
    return found


def fingerprint(trees: dict[str, str]) -> str:
    """One hash of all trees of a step; see `fingerprints`."""
    return hashlib.sha256("".join(f"{name!r} {trees[name]}\n" for name in sorted(trees)).encode()).hexdigest()


def compare(one: tuple[CheckpointStore, int], other: tuple[CheckpointStore, int], *, numbers: bool) -> dict[str, Any]:
    """The facts that differ between two checkpoints, and if `numbers` is set the arrays that do.

    Returns:
        {facts: [{name, saved, now}], arrays: {same, different: [{name, shape, most}], only: [names]}}, where `most`
        is the largest absolute difference of numbers finite in both; None if there is none, or the shapes differ.
    """
    facts = [
        {key: value for key, value in store.meta(step).items() if key not in _NOT_COMPARED}
        for store, step in (one, other)
    ]
    changed = differences(*facts)
    named = {each.name for each in changed}
    # A setting that decides over numbers is in the identity, too: told once.
    told = [each for each in changed if each.name.replace("settings.", "identity.", 1) not in named - {each.name}]
    found: dict[str, Any] = {"facts": [vars(each) for each in told]}
    if numbers:
        found["arrays"] = _compare_arrays(one, other)
    return found


def _compare_arrays(one: tuple[CheckpointStore, int], other: tuple[CheckpointStore, int]) -> dict[str, Any]:
    trees = [_abstract(*each) for each in (one, other)]
    same, different, only = 0, [], []
    for name in sorted({*trees[0], *trees[1]}):  # one after the other: a whole state may not fit in memory twice
        left, right = (
            _leaves(store.restore(step, {name: tree[name]})[name], name) if name in tree else {}
            for (store, step), tree in zip((one, other), trees, strict=True)
        )
        only += sorted(left.keys() ^ right.keys())
        for path in sorted(left.keys() & right.keys()):
            a, b = left[path], right[path]
            if a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes():
                same += 1
                continue
            different.append({"name": path, "shape": list(a.shape), **_apart(a, b)})
    return {"same": same, "different": different, "only": only}


def _apart(a: np.ndarray, b: np.ndarray) -> dict[str, float | int | None]:
    """How far the numbers that are finite in both are apart at most, and how many differ that are not."""
    if a.shape != b.shape:
        return {"most": None, "not_finite": 0}
    left, right = a.astype(np.float64), b.astype(np.float64)
    both = np.isfinite(left) & np.isfinite(right)
    most = float(np.max(np.abs(left[both] - right[both]))) if both.any() else None
    equal = (left == right) | (np.isnan(left) & np.isnan(right))
    return {"most": most, "not_finite": int(np.count_nonzero(~both & ~equal))}


def _abstract(store: CheckpointStore, step: int) -> dict[str, Any]:
    """The trees of a step as shapes on one device."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {
        name: jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), tree)
        for name, tree in store.described(step).items()
    }


def _leaves(tree: Any, name: str) -> dict[str, np.ndarray]:
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {f"{name}{jax.tree_util.keystr(path)}": np.asarray(leaf) for path, leaf in found}


def store_of(training: Path) -> CheckpointStore:
    """The checkpoints of a training's folder."""
    return CheckpointStore(training / "checkpoints")
