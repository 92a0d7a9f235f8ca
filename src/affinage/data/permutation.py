"""Shuffling by random access: where one index goes, without the permutation of all the others."""

import hashlib
from functools import lru_cache

import numpy as np
from grain.experimental import index_shuffle
from jaxtyping import Integer

_ROUNDS = 4  # of the cipher behind index_shuffle; Grain's own default
# Grain's cipher permutes at least 2**16 numbers and walks on until it meets one that is small enough: 20 microseconds
# for an index out of 1,600, 3 milliseconds for one out of 10. Below that size a table is as small as it is fast.
_TABLE_BELOW = 2**16


def permuted(index: int, size: int, *purpose: int | str) -> int:
    """Where `index` goes in the permutation of range(size) that `purpose` names; any seed and epoch are part of it."""
    if size < _TABLE_BELOW:
        return int(_table(size, purpose)[index])
    return int(index_shuffle(index, max_index=size - 1, seed=_key(purpose) % 2**32, rounds=_ROUNDS))


def all_permuted(indices: Integer[np.ndarray, " n"], size: int, *purpose: int | str) -> Integer[np.ndarray, " n"]:
    """`permuted` of each of these."""
    if size < _TABLE_BELOW:
        return _table(size, purpose)[indices]
    return np.array([permuted(index, size, *purpose) for index in indices.tolist()], np.int64)


def _key(purpose: tuple[int | str, ...]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(purpose).encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=64)
def _table(size: int, purpose: tuple[int | str, ...]) -> np.ndarray:
    """The whole permutation: indices sorted by a hash of index and purpose, int64 [size].

    The hash is SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), written out because numpy's generators may give other
    numbers in another version, and a run must not.
    """
    # Arrays of uint64 wrap around silently, which is what the hash means.
    state = (np.arange(size, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(_key(purpose))
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(state ^ (state >> np.uint64(31)), kind="stable")


def unpermuted(place: int, size: int, *purpose: int | str) -> int:
    """The index that `permuted` takes to `place`."""
    return int(_inverse(size, purpose)[place])


@lru_cache(maxsize=64)
def _inverse(size: int, purpose: tuple[int | str, ...]) -> np.ndarray:
    # Grain has no inverse of its cipher; all indices once are a few microseconds each.
    table = _table(size, purpose) if size < _TABLE_BELOW else [permuted(index, size, *purpose) for index in range(size)]
    inverse = np.empty(size, np.int64)
    inverse[table] = np.arange(size)
    return inverse
