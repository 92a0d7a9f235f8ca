"""What a checkpoint records besides its arrays: its step, facts about its run, and a checksum of every array.

Orbax writes it with a step, and it has a hash of itself. A checksum is computed on the devices that hold the array:
the wrapping sum, over all elements, of a hash of the element's bits and its index. The hash is a bijection of the bits
for a fixed index, so any one changed element changes the sum; two changes cancel each other out with a probability of
2^-32. A sum has no order, so an array has the same checksum on any mesh.
"""

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from affinage.differing import differing
from affinage.errors import UserError, first_line, plain, raise_of_network

PyTree = Any
Checksums = dict[str, list[Any]]  # path of an array -> [dtype, shape, checksum as 8 hexadecimal digits]

METADATA = "_CHECKPOINT_METADATA"  # Orbax's file of a step's metadata
_OF_THE_CLOCK = ("saved", "seconds", "clock", "resumed_at")  # facts in which any two checkpoints differ
IDENTITY = "identity"  # key of the facts that decide about a run's numbers


class CorruptedError(UserError):
    """A checkpoint is not what was saved, or does not fit."""

    def __init__(self, what: str, step: Path) -> None:
        fix = "`affinage checkpoint ls` lists the checkpoints: name another one, MODEL@STEP."
        super().__init__(what, where=str(step), fix=fix)


@dataclass(frozen=True)
class Metadata:
    """The metadata of one step: its number, JSON-able facts about its run, and the checksums of its arrays."""

    step: int
    facts: dict[str, Any]
    checksums: Checksums

    @property
    def fingerprint(self) -> str:
        """A hash of all arrays: the same for every checkpoint of the same numbers, whoever saved it on which mesh."""
        return _digest(self.checksums)

    def to_json(self) -> dict[str, Any]:
        """Return a copy for Orbax's `custom_metadata`, which is written later."""
        content = json.loads(json.dumps(vars(self)))
        return {"affinage": content | {"hash": _digest(content)}}


def read_metadata(folder: Path) -> Metadata:
    """Read the metadata of the step in a folder; CorruptedError if they are not what was saved, or of another step."""
    try:
        saved = json.loads((folder / METADATA).read_bytes())["custom_metadata"]["affinage"]
        digest, metadata = saved.pop("hash"), Metadata(**saved)
    except OSError as error:
        raise_of_network(error)
        raise CorruptedError(first_line(error), folder) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        saved = digest = None
    if digest != _digest(saved):
        raise CorruptedError(f"{METADATA} is not what was written", folder)
    if str(metadata.step) != folder.name:
        raise CorruptedError(f"it was saved as step {metadata.step}", folder)
    return metadata


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_compatible(
    facts: Mapping[str, Any], now: Mapping[str, Any], allowed: Collection[str], *, where: str
) -> dict[str, str]:
    """Compare the identity in a checkpoint's facts with that of the run that is to resume from it.

    Facts without an identity, such as those of an import, fit any run. Of `allowed` names, `schedule` includes
    `schedule.peak_lr` and all others below it. Returns {name: "saved -> now"} of the differences that are allowed;
    UserError lists all that are not.
    """
    pairs = differing([facts.get(IDENTITY, now), now], absent="(not there)")
    changes = {plain(name): " -> ".join(plain(str(value))[:80] for value in pair) for name, pair in sorted(pairs)}
    refused = [name for name in changes if not any(f"{name}.".startswith(f"{prefix}.") for prefix in allowed)]
    if refused:
        listed = "".join(f"\n    {name}: {changes[name]}" for name in refused)
        raise UserError(
            f"this run is not the one that was saved:{listed}",
            where=where,
            fix=f"Undo the change, or allow it by name: runtime.checkpoint.allow_changes=[{', '.join(refused)}].",
        )
    return changes


def compare(one: Metadata, other: Metadata) -> dict[str, Any]:
    """What differs: {facts: [{name, saved, now}], arrays: {same, different: [{name, shape}], only: [names]}}."""
    facts = [{key: value for key, value in each.facts.items() if key not in _OF_THE_CLOCK} for each in (one, other)]
    changed = [{"name": name, "saved": saved, "now": now} for name, (saved, now) in sorted(differing(facts))]
    left, right = one.checksums, other.checksums
    both = sorted(left.keys() & right.keys())
    different = [{"name": path, "shape": left[path][1]} for path in both if left[path] != right[path]]
    only = sorted(left.keys() ^ right.keys())
    return {"facts": changed, "arrays": {"same": len(both) - len(different), "different": different, "only": only}}


def checksums(state: Mapping[str, PyTree]) -> Checksums:
    """The checksum of every array of a state, by its path; one program on the devices, started by all processes."""
    leaves = leaves_by_path(state)
    sums = np.asarray(_sums(list(leaves.values()))).tolist() if leaves else []
    return {
        path: [str(leaf.dtype), list(leaf.shape), f"{value:08x}"]
        for (path, leaf), value in zip(leaves.items(), sums, strict=True)
    }


def leaves_by_path(state: Mapping[str, PyTree]) -> dict[str, Any]:
    """The leaves of trees by their dotted paths; a field of a tuple and the same key of a mapping are alike."""
    leaves = jax.tree_util.tree_leaves_with_path(dict(state))
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


@jax.jit
def _sums(leaves: list[Array]) -> UInt32[Array, " N"]:
    return jnp.stack([_checksum(leaf) for leaf in leaves])


def _checksum(array: Array) -> UInt32[Array, ""]:
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    size = min(array.dtype.itemsize, 4)  # an element of 8 bytes becomes two halves
    bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * size}")).astype(jnp.uint32)
    index = jnp.zeros(bits.shape, jnp.uint32)
    for axis in range(bits.ndim):
        stride = math.prod(bits.shape[axis + 1 :]) % 2**32
        index += jnp.uint32(stride) * jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    # The finalizer of MurmurHash3, after the index has been spread over all bits: each line is a bijection of `mixed`.
    mixed = bits ^ (index * jnp.uint32(0x9E3779B1) + jnp.uint32(0x7F4A7C15))
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)
