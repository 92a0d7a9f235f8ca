"""Which texts are near copies of any of some other texts: exact, by a prefix filter, without hashing to bands.

Of two sets with Jaccard similarity >= t, ordered alike, the first |A| - ceil(t |A|) + 1 elements of A and the first
|B| - ceil(t |B|) + 1 of B have one in common (Chaudhuri et al. 2006; Bayardo et al. 2007). Shingles are hashes, so
their order is as good as random, and a fifth of them is looked up for t = 0.8.
"""

import math

import numpy as np
import pyarrow as pa

from affinage.data.compiled import Array, kernel
from affinage.data.minhash import jaccard, lookup_table, mix, position, shingle_sets, table_shift

NGRAM = 5  # words of a shingle


@kernel
def _prefix(size: int, threshold: float) -> int:
    return size - math.ceil(threshold * size - 1e-9) + 1


@kernel
def _prefixes(hashes: Array, sizes: Array, threshold: float) -> tuple[Array, Array]:
    """The elements of all prefixes, spread evenly by `mix` (they are the smallest of each set), and whose they are."""
    keys, owners = np.empty(hashes.size + sizes.size, np.uint64), np.empty(hashes.size + sizes.size, np.int64)
    count, start = 0, 0
    for k in range(sizes.size):
        for j in range(start, start + _prefix(sizes[k], threshold)):
            keys[count], owners[count] = mix(hashes[j]), k
            count += 1
        start += sizes[k]
    return keys[:count], owners[:count]


@kernel
def _nearest(
    hashes: Array,
    sizes: Array,
    known: Array,
    known_starts: Array,
    keys: Array,
    owners: Array,
    table: Array,
    threshold: float,
    nearest: Array,
    similarity: Array,
) -> None:
    seen = np.full(known_starts.size, -1, np.int64)
    start, shift = 0, table_shift(table)
    for k in range(sizes.size):
        nearest[k], similarity[k] = -1, 0.0
        mine = hashes[start : start + sizes[k]]
        start += sizes[k]
        for j in range(_prefix(sizes[k], threshold)):
            key = mix(mine[j])
            at = position(keys, table, shift, key)
            while 0 <= at < keys.size and keys[at] == key:
                other = owners[at]
                at += 1
                if seen[other] == k:
                    continue
                seen[other] = k
                near = jaccard(mine, known[known_starts[other] : known_starts[other + 1]], threshold)
                if near > similarity[k]:
                    nearest[k], similarity[k] = other, near


class NearCopies:
    """Finds near copies of known texts. Safe to use from several threads."""

    def __init__(self, hashes: np.ndarray, sizes: np.ndarray, threshold: float) -> None:
        """Index the shingle sets of the known texts, as `shingle_sets` gives them, for a least similarity in (0, 1]."""
        self._hashes, self._threshold = hashes, threshold
        self._starts = np.append(0, np.cumsum(sizes))
        keys, owners = _prefixes(hashes, sizes, threshold)
        order = np.argsort(keys, kind="stable")
        self._keys, self._owners = keys[order], owners[order]
        self._table = lookup_table(self._keys)

    def find(self, text: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """Of every text the known one that it is nearest to, or -1, int64 [N], and their similarity, float64 [N]."""
        nearest, similarity = np.empty(len(text), np.int64), np.empty(len(text))
        sets, index = shingle_sets(text, NGRAM), (self._keys, self._owners, self._table)
        _nearest(*sets, self._hashes, self._starts, *index, self._threshold, nearest, similarity)
        return nearest, similarity
