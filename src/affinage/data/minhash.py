"""Kernels of near-duplicate detection, from UTF-8 bytes to band keys and n-gram sets, without a Python string between.

A word is a run of letters, numbers and marks, in lower case; see `word_table`. A shingle is the hash of n words in a
row, or of all words of a shorter text. Hashes are 64-bit; they are ours alone and stored nowhere, so they may change.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from affinage.data.code_points import BLANK, SINGLE, WORD, decode, text_buffers, word_table
from affinage.data.compiled import kernel

_SEED = 0x5851F42D4C957F2D
_PRIME = np.uint64(0x9E3779B97F4A7C15)  # the golden ratio's, odd
_PRIME2 = np.uint64(0xD6E8FEB86659FD93)
_MASK = np.uint32(0xFFFFFF)
_BLANK, _WORD, _SINGLE = np.uint32(BLANK), np.uint32(WORD), np.uint32(SINGLE)


@dataclass(frozen=True)
class Signatures:
    """What finds the duplicates of N texts.

    content: uint64 [2, N], a 128-bit hash of the text in lower case with every run of white space as one space.
    keys: uint64 [bands, N], equal where all rows of a band are.
    shingles: int64 [N], how many shingles the text has, repeated ones counted.
    """

    content: np.ndarray
    keys: np.ndarray
    shingles: np.ndarray


def hash_functions(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Multipliers (odd) and offsets, uint32 [count], of x -> a x + b mod 2^32 (Dietzfelbinger's multiply-shift)."""
    draws = np.random.Generator(np.random.PCG64(_SEED)).integers(0, 2**32, (2, count), np.uint32)
    return draws[0] | np.uint32(1), draws[1]


@kernel
def mix(x: np.uint64) -> np.uint64:
    """Spread the entropy of 64 bits over all of them (the finaliser of MurmurHash3)."""
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xFF51AFD7ED558CCD)
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


@kernel
def _words(
    data: np.ndarray, start: np.int64, end: np.int64, table: np.ndarray, words: np.ndarray, content: np.ndarray
) -> int:
    """Write the hashes of a text's words to `words`, its 128-bit hash to `content`; how many words there are."""
    count = 0
    word, first, second = np.uint64(0), np.uint64(0), np.uint64(1)
    blank, begun = False, False
    i = start
    while i < end:
        code, size = decode(data, i)
        i += size
        kind, point = table[code] >> np.uint32(24), np.uint64(table[code] & _MASK)
        if kind == _BLANK:
            blank = begun
        else:
            if blank:
                first, second = (first ^ np.uint64(32)) * _PRIME, (second + np.uint64(32)) * _PRIME2
                blank = False
            begun = True
            first, second = (first ^ point) * _PRIME, (second + point) * _PRIME2
            if kind == _WORD:
                word = (word ^ (point + np.uint64(1))) * _PRIME
                continue
        if word != 0:
            words[count] = mix(word)
            word = np.uint64(0)
            count += 1
        if kind == _SINGLE:
            words[count] = mix(point * _PRIME2)
            count += 1
    if word != 0:
        words[count] = mix(word)
        count += 1
    content[0], content[1] = mix(first), mix(second)
    return count


@kernel
def _shingles(words: np.ndarray, count: int, ngram: int, nothing: np.uint64, out: np.ndarray) -> int:
    """Write the hashes of all `ngram` words in a row to `out`; how many. A text without words counts as `nothing`."""
    power = np.uint64(1)
    for _ in range(ngram):
        power *= _PRIME
    rolling = np.uint64(0)
    for i in range(min(ngram, count)):
        rolling = rolling * _PRIME + words[i]
    out[0] = mix(rolling) if count else nothing
    for i in range(ngram, count):
        rolling = rolling * _PRIME + words[i] - words[i - ngram] * power
        out[i - ngram + 1] = mix(rolling)
    return max(1, count - ngram + 1)


@kernel
def _minima(shingles: np.ndarray, count: int, a: np.ndarray, b: np.ndarray, minima: np.ndarray) -> None:
    """The smallest value of every hash function over the shingles, uint32."""
    minima[:] = np.uint32(0xFFFFFFFF)
    for i in range(count):
        x = np.uint32(shingles[i] >> np.uint64(32))
        for k in range(minima.size):
            minima[k] = min(minima[k], np.uint32(a[k] * x + b[k]))


@kernel
def _sign(
    data: np.ndarray,
    offsets: np.ndarray,
    table: np.ndarray,
    ngram: int,
    a: np.ndarray,
    b: np.ndarray,
    content: np.ndarray,
    keys: np.ndarray,
    counts: np.ndarray,
) -> None:
    longest = 0
    for text in range(counts.size):
        longest = max(longest, offsets[text + 1] - offsets[text])
    words, shingles = np.empty(longest + 1, np.uint64), np.empty(longest + 1, np.uint64)
    minima, whole = np.empty(a.size, np.uint32), np.empty(2, np.uint64)
    bands = keys.shape[0]
    rows = a.size // bands
    for text in range(counts.size):
        found = _words(data, np.int64(offsets[text]), np.int64(offsets[text + 1]), table, words, whole)
        content[0, text], content[1, text] = whole[0], whole[1]
        counts[text] = _shingles(words, found, ngram, whole[0], shingles)
        _minima(shingles, counts[text], a, b, minima)
        for band in range(bands):
            key = np.uint64(band)
            for row in range(band * rows, (band + 1) * rows):
                key = mix(key ^ np.uint64(minima[row]))
            keys[band, text] = key


def sign(text: pa.Array, *, ngram: int, bands: int, rows: int) -> Signatures:
    """MinHash signatures of a pyarrow string array of N texts, folded to one key per band."""
    data, offsets = text_buffers(text)
    signatures = Signatures(
        np.empty((2, len(text)), np.uint64), np.empty((bands, len(text)), np.uint64), np.empty(len(text), np.int64)
    )
    a, b = hash_functions(bands * rows)
    _sign(data, offsets, word_table(), ngram, a, b, signatures.content, signatures.keys, signatures.shingles)
    return signatures


@kernel
def sort_hashes(hashes: np.ndarray, count: int, places: np.ndarray, out: np.ndarray) -> int:
    """Write the distinct ones of the first `count` hashes in ascending order to `out`; how many they are.

    Hashes are spread evenly, so that their upper bits tell nearly where they belong (a bucket sort with one expected
    element a bucket, then insertion): five times as fast as numpy's sort on 300 of them. `places` holds 2 `count` + 2.
    """
    bits = 1
    while (1 << bits) < count:
        bits += 1
    shift = np.uint64(64 - bits)
    places[: (1 << bits) + 1] = 0
    for i in range(count):
        places[np.int64(hashes[i] >> shift) + 1] += 1
    for i in range(1 << bits):
        places[i + 1] += places[i]
    for i in range(count):
        bucket = np.int64(hashes[i] >> shift)
        out[places[bucket]] = hashes[i]
        places[bucket] += 1
    for i in range(1, count):
        value, j = out[i], i
        while j > 0 and out[j - 1] > value:
            out[j] = out[j - 1]
            j -= 1
        out[j] = value
    size = 0
    for i in range(count):
        if i == 0 or out[i] != out[size - 1]:
            out[size] = out[i]
            size += 1
    return size


@kernel
def _shingle_sets(
    data: np.ndarray,
    offsets: np.ndarray,
    table: np.ndarray,
    ngram: int,
    texts: np.ndarray,
    starts: np.ndarray,
    out: np.ndarray,
    sizes: np.ndarray,
) -> None:
    longest = 0
    for text in texts:
        longest = max(longest, offsets[text + 1] - offsets[text])
    words, shingles, whole = np.empty(longest + 1, np.uint64), np.empty(longest + 1, np.uint64), np.empty(2, np.uint64)
    places = np.empty(2 * longest + 4, np.int64)
    for k in range(texts.size):
        text = texts[k]
        found = _words(data, np.int64(offsets[text]), np.int64(offsets[text + 1]), table, words, whole)
        count = _shingles(words, found, ngram, whole[0], shingles)
        sizes[k] = sort_hashes(shingles, count, places, out[starts[k] : starts[k] + count])


def write_shingle_sets(
    text: pa.Array, rows: np.ndarray, *, ngram: int, out: np.ndarray, starts: np.ndarray, sizes: np.ndarray
) -> None:
    """Write the sorted distinct shingles of the texts `rows` (int64 [K]) to `out` (uint64) from `starts` (int64 [K]).

    Between two starts there must be room for all shingles of the text; `sizes` (int64 [K]) receives how many differ.
    """
    data, offsets = text_buffers(text)
    _shingle_sets(data, offsets, word_table(), ngram, rows, starts, out, sizes)


@kernel
def jaccard(a: np.ndarray, b: np.ndarray, threshold: float) -> float:
    """Jaccard similarity of two sorted sets, uint64; -1 as soon as it is certain to be below the threshold."""
    total = a.size + b.size
    needed = threshold / (1 + threshold) * total - 1e-6  # J >= t means that at least t/(1+t) of |A|+|B| is shared
    i, j, shared = 0, 0, 0
    while i < a.size and j < b.size:
        if shared + min(a.size - i, b.size - j) < needed:
            return -1.0
        x, y = a[i], b[j]
        shared += x == y
        i += x <= y
        j += y <= x
    similarity = shared / (total - shared)
    return similarity if similarity >= threshold else -1.0
