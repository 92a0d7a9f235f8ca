"""What a checkpoint says of its arrays, held against what is there, before anybody makes room for them.

A seal tells that nothing has changed since, not who made it; and a file of 65 kB can promise a chunk of gigabytes.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import tensorstore

from affinage.errors import first_line, plain, raise_of_network

PyTree = Any

_LARGEST = 2**26  # bytes of JSON; of ten thousand arrays it is some megabytes
_DEEPEST = 100  # levels of what is said of a run
_SLACK = 2**22  # numbers: small arrays lie within compressed pages


def strange(folder: Path, trees: list[str]) -> str:
    """Why the arrays in some trees of a step must not be read; "" if nothing speaks against it.

    Weights are never compressed, so a step has a byte for each number at least, and no chunk is larger than its array.
    Raises OSError where the network of the disk failed.
    """
    for name in ("_CHECKPOINT_METADATA", *(f"{tree}/{file}" for tree in trees for file in ("_METADATA", "_sharding"))):
        if (folder / name).is_file() and (size := (folder / name).stat().st_size) > _LARGEST:
            return f"{name} has {size:,} bytes"
    try:
        return next(filter(None, (_strange_tree(folder / tree) for tree in trees)), "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise_of_network(error)
        return f"what it says of its arrays cannot be read: {first_line(error)}"


def _strange_tree(tree: Path) -> str:
    form = json.loads((tree / "_METADATA").read_bytes())
    if not (form["use_ocdbt"] is True and form["use_zarr3"] is True):
        return f"{tree.name} is in another format"  # of files that are read by names which it gives itself
    # Paths in it that lead out of its folder are an error of TensorStore's.
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": f"{tree}/"}}).result()
    keys = [key for key in store.list().result() if key == b"zarr.json" or key.endswith(b"/zarr.json")]
    numbers = 0
    for key, reading in [(key, store.read(key)) for key in keys]:
        array = json.loads(reading.result().value)
        shape, chunk = array["shape"], array["chunk_grid"]["configuration"]["chunk_shape"]
        if not _are_sizes(shape) or not _are_sizes(chunk) or len(shape) != len(chunk):
            return f"{tree.name} has an array without a shape"
        if any(part > max(whole, 1) for part, whole in zip(chunk, shape, strict=True)):
            return f"{tree.name} has chunks of {_short(chunk)} for an array of {_short(shape)}: {plain(key.decode())}"
        numbers += math.prod(shape)
    there = sum(path.stat().st_size for path in tree.rglob("*") if path.is_file())
    if numbers > there + _SLACK:
        return f"{tree.name} says that it has {numbers:,} numbers, and has {there:,} bytes"
    return ""


def _are_sizes(found: Any) -> bool:
    return isinstance(found, list) and all(type(size) is int and 0 <= size < 2**63 for size in found)


def facts_in(custom: Any) -> dict[str, Any]:
    """{step, facts} as `CheckpointStore.save` wrote it. Raises ValueError if it is anything else."""
    if not isinstance(custom, Mapping) or not isinstance(custom.get("facts"), Mapping):
        raise ValueError("what it says of its run is no mapping")
    level: list[Any] = [custom]
    for _ in range(_DEEPEST):
        level = [inner for each in level for inner in (each.values() if isinstance(each, Mapping) else each)]
        level = [each for each in level if isinstance(each, Mapping | list)]
        if not level:
            return dict(custom)
    raise ValueError(f"what it says of its run is more than {_DEEPEST} levels deep")


def misfit(saved: Mapping[str, PyTree | None], wanted: Mapping[str, PyTree]) -> str:
    """The first array that was saved in another shape than it is wanted, or is on one side only; "" if none.

    Args:
        saved: trees of what has a shape, by name; None where nothing is known of a tree.
        wanted: the same; trees that are saved and not named here do not matter.
    """
    for name, tree in wanted.items():
        if name in saved and saved[name] is None:
            return ""
        there, here = _shapes(saved.get(name)), _shapes(tree)
        for path in sorted(there.keys() | here.keys()):
            if there.get(path) != here.get(path):
                told = [str(list(of[path])) if path in of else "not there" for of in (there, here)]
                return f"{'.'.join(filter(None, (name, path)))} was saved as {told[0]}, and is {told[1]} here"
    return ""


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    """Shapes by path; a name of a field and the same key of a mapping are alike."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape)
        for path, leaf in leaves
        if hasattr(leaf, "shape")
    }


def _short(sizes: list[int]) -> str:
    return str(sizes) if len(sizes) <= 8 else f"{len(sizes)} dimensions"
