"""Which texts are near copies of any of a few given ones: exact, by a prefix filter, without hashing to bands.

Of two sets with Jaccard similarity >= t, ordered alike, the first |A| - ceil(t |A|) + 1 elements of A and the first
|B| - ceil(t |B|) + 1 of B have one in common (Chaudhuri et al. 2006; Bayardo et al. 2007). Shingles are hashes, so
their order is as good as random, and a fifth of them is looked up for t = 0.8.
"""

import math
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from affinage.data.compiled import kernel
from affinage.data.minhash import jaccard, sign, write_shingle_sets

NGRAM = 5  # words of a shingle


@dataclass(frozen=True)
class ShingleSets:
    """Sorted distinct shingles of N texts: those of text k are `hashes[starts[k] : starts[k] + sizes[k]]`, uint64."""

    hashes: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray


def shingle_sets(text: pa.Array) -> ShingleSets:
    """The shingle sets of a pyarrow string array."""
    counts = sign(text, ngram=NGRAM, bands=1, rows=1).shingles
    starts = np.cumsum(counts) - counts
    hashes, sizes = np.empty(int(counts.sum()), np.uint64), np.empty(len(text), np.int64)
    write_shingle_sets(text, np.arange(len(text)), ngram=NGRAM, out=hashes, starts=starts, sizes=sizes)
    return ShingleSets(hashes, starts, sizes)


def joined(parts: list[ShingleSets]) -> ShingleSets:
    """The sets of all parts, one after the other."""
    shifts = np.cumsum([0, *(part.hashes.size for part in parts)])
    return ShingleSets(
        np.concatenate([np.empty(0, np.uint64), *(part.hashes for part in parts)]),
        np.concatenate([np.empty(0, np.int64), *(part.starts + shift for part, shift in zip(parts, shifts))]),
        np.concatenate([np.empty(0, np.int64), *(part.sizes for part in parts)]),
    )


@kernel
def _prefix(size: int, threshold: float) -> int:
    return size - math.ceil(threshold * size - 1e-9) + 1


@kernel
def _prefixes(
    starts: np.ndarray, sizes: np.ndarray, hashes: np.ndarray, threshold: float
) -> tuple[np.ndarray, np.ndarray]:
    """The elements of all prefixes and whose they are."""
    total = 0
    for k in range(sizes.size):
        total += _prefix(sizes[k], threshold)
    keys, owners = np.empty(total, np.uint64), np.empty(total, np.int64)
    count = 0
    for k in range(sizes.size):
        for j in range(_prefix(sizes[k], threshold)):
            keys[count], owners[count] = hashes[starts[k] + j], k
            count += 1
    return keys, owners


@kernel
def _nearest(
    hashes: np.ndarray,
    starts: np.ndarray,
    sizes: np.ndarray,
    given: np.ndarray,
    given_starts: np.ndarray,
    given_sizes: np.ndarray,
    table: np.ndarray,
    bounds: np.ndarray,
    keys: np.ndarray,
    owners: np.ndarray,
    threshold: float,
    nearest: np.ndarray,
    similarity: np.ndarray,
) -> None:
    seen = np.full(given_sizes.size, -1, np.int64)
    mask = np.int64(table.size - 1)
    for k in range(sizes.size):
        nearest[k], similarity[k] = -1, 0.0
        mine = hashes[starts[k] : starts[k] + sizes[k]]
        for j in range(_prefix(sizes[k], threshold)):
            place = np.int64(mine[j] >> np.uint64(20)) & mask
            while table[place] >= 0 and keys[table[place]] != mine[j]:
                place = (place + 1) & mask
            if table[place] < 0:
                continue
            for o in range(bounds[table[place]], bounds[table[place] + 1]):
                other = owners[o]
                if seen[other] == k:
                    continue
                seen[other] = k
                start = given_starts[other]
                near = jaccard(mine, given[start : start + given_sizes[other]], threshold)
                if near > similarity[k]:
                    nearest[k], similarity[k] = other, near


@kernel
def _fill(keys: np.ndarray, table: np.ndarray) -> None:
    mask = np.int64(table.size - 1)
    for k in range(keys.size):
        place = np.int64(keys[k] >> np.uint64(20)) & mask
        while table[place] >= 0:
            place = (place + 1) & mask
        table[place] = k


class NearCopies:
    """Finds near copies of given texts. Safe to use from several threads."""

    def __init__(self, given: ShingleSets, threshold: float) -> None:
        """`threshold` is the least Jaccard similarity of a near copy, in (0, 1]."""
        self._given, self._threshold = given, threshold
        keys, owners = _prefixes(given.starts, given.sizes, given.hashes, threshold)
        order = np.argsort(keys, kind="stable")
        self._keys, first = np.unique(keys[order], return_index=True)
        self._owners, self._bounds = owners[order], np.append(first, keys.size)
        self._table = np.full(1 << max(4, (2 * self._keys.size).bit_length()), -1, np.int64)
        _fill(self._keys, self._table)

    def find(self, text: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """Of every text the given one that it is nearest to, or -1, int64 [N], and their similarity, float64 [N]."""
        sets, given = shingle_sets(text), self._given
        nearest, similarity = np.empty(len(text), np.int64), np.empty(len(text))
        _nearest(
            sets.hashes,
            sets.starts,
            sets.sizes,
            given.hashes,
            given.starts,
            given.sizes,
            self._table,
            self._bounds,
            self._keys,
            self._owners,
            self._threshold,
            nearest,
            similarity,
        )
        return nearest, similarity
