"""Orders that depend on names, or on numbers, alone: never on files, workers, machines or versions of numpy."""

import hashlib
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import pyarrow as pa
from jaxtyping import Integer

from affinage.data.code_points import kernel

_ROUNDS = 8


def shuffle_keys(names: Iterable[str], purpose: str) -> np.ndarray:
    """Return one pseudo-random key per name, uint64 [n]: sorting by it shuffles.

    The same name has the same key in every run; another `purpose` gives an independent order.
    """
    salt = hashlib.blake2b(f"0/{purpose}".encode(), digest_size=32).digest()
    digests = b"".join([hashlib.blake2b(name.encode(), digest_size=8, key=salt).digest() for name in names])
    return np.frombuffer(digests, "<u8")


def document_keys(batch: pa.RecordBatch, purpose: str, separator: str = "") -> np.ndarray:
    """Return the shuffle keys of documents, uint64 [n]; an id is unique within its source only, so both count.

    Those of one source whose ids agree up to a `separator` have the same key.
    """
    pairs = zip(batch.column("source").to_pylist(), batch.column("id").to_pylist(), strict=True)
    names = (f"{source}/{id.partition(separator)[0] if separator else id}" for source, id in pairs)
    return shuffle_keys(names, purpose)


def permuted(indices: Integer[np.ndarray, " n"], size: int, *purpose: int | str) -> Integer[np.ndarray, " n"]:
    """Return where indices go in the permutation of range(size) that `purpose` names, int64.

    A Feistel network (Luby and Rackoff, SIAM J. Comput. 17(2), 1988) on the bits of an index, repeated for those that
    it takes out of the range. The round function is SplitMix64's (Steele, Lea and Flood, OOPSLA 2014), written out
    because numpy's generators may give other numbers in another version, and a run must not.
    """
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    places = np.array(indices, np.uint64)
    _permute(places, np.uint64(size), np.uint64(half), _round_keys(*purpose))
    return places.astype(np.int64)


@lru_cache(typed=True)
def _round_keys(*purpose: int | str) -> Integer[np.ndarray, " rounds"]:
    names = [repr((number, *purpose)).encode() for number in range(_ROUNDS)]
    return np.frombuffer(b"".join(hashlib.blake2b(name, digest_size=8).digest() for name in names), "<u8")


@kernel
def _permute(places, size, half, keys):  # type: ignore[no-untyped-def]
    """Permute uint64 indices where they stand."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    for i in range(len(places)):
        while True:
            left, right = places[i] >> half, places[i] & mask
            for key in keys:
                state = right + key
                state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
                state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
                left, right = right, left ^ ((state ^ (state >> np.uint64(31))) & mask)
            places[i] = left << half | right
            if places[i] < size:
                break
