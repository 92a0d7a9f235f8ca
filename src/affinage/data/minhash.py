"""Kernels over the words of UTF-8 text: MinHash band keys, sets of word n-grams, Jaccard similarity.

A word is a run of letters, numbers and marks, in lower case; see `word_table`. A shingle is the 64-bit hash of n words
in a row, or of all words of a shorter text.
"""

import numpy as np
import pyarrow as pa

from affinage.data.code_points import BLANK, SINGLE, WORD, Array, decode, kernel, text_buffers, word_table

_SEED = 0x5851F42D4C957F2D
_PRIME = np.uint64(0x9E3779B97F4A7C15)  # the golden ratio's, odd
_PRIME2 = np.uint64(0xD6E8FEB86659FD93)
_MASK = np.uint32(0xFFFFFF)
_TAG_BYTES = 200  # of an HTML tag, at most


@kernel
def mix(x: np.uint64) -> np.uint64:
    """Spread the entropy of 64 bits over all of them (the finaliser of MurmurHash3)."""
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xFF51AFD7ED558CCD)
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


@kernel
def _tag_end(data: Array, i: np.int64, end: np.int64) -> np.int64:
    """Where the HTML tag that begins at byte `i` ends, or `i` if none does."""
    if i + 2 >= end:
        return i
    letter = data[i + 2] if data[i + 1] == 0x2F else data[i + 1]
    if not (0x41 <= letter <= 0x5A or 0x61 <= letter <= 0x7A):
        return i
    for k in range(i + 1, min(end, i + _TAG_BYTES)):
        if data[k] == 0x3E:
            return np.int64(k + 1)
        if data[k] == 0x3C or data[k] == 0x0A:
            return i
    return i


@kernel
def _add(words, places, count, hashed, start, stop):  # type: ignore[no-untyped-def]
    words[count] = mix(hashed)
    if places is not None:
        places[count, 0], places[count, 1] = start, stop
    return count + 1


@kernel
def hash_words(data, i, end, table, words, places):  # type: ignore[no-untyped-def]
    """Write hashes of the words in bytes [i, end) to `words`; return how many, and a hash of the whole text.

    The latter is of the text but for case and white space, and only without `places`. With these (int64 [words, 2], or
    None), which receive the first and last + 1 byte of every word, HTML tags separate words.
    """
    count, word, start, whole, blank = 0, np.uint64(0), i, np.uint64(0), False
    while i < end:
        code, size = decode(data, i)
        if places is not None and code == 0x3C:
            size = max(size, _tag_end(data, i, end) - i)
        kind, point = table[code] >> np.uint32(24), np.uint64(table[code] & _MASK)
        if places is None:
            if kind == BLANK:
                blank = whole != np.uint64(0)
            else:
                if blank:
                    whole = (whole ^ np.uint64(32)) * _PRIME
                whole, blank = (whole ^ point) * _PRIME, False
        if kind == WORD:
            if word == 0:
                start = i
            word = (word ^ (point + np.uint64(1))) * _PRIME
        else:
            if word != 0:
                count, word = _add(words, places, count, word, start, i), np.uint64(0)
            if kind == SINGLE:
                count = _add(words, places, count, point * _PRIME2, i, i + size)
        i += size
    if word != 0:
        count = _add(words, places, count, word, start, end)
    return count, mix(whole)


@kernel
def longest_text(offsets: Array) -> int:
    """Bytes of the longest text of a column, at least 1."""
    return max(1, np.append(np.diff(offsets), 1).max())


@kernel
def shingles(words: Array, count: int, ngram: int, wordless: np.uint64, out: Array) -> int:
    """Write the hashes of all `ngram` words in a row to `out`; a text without words has the one shingle `wordless`."""
    power = np.uint64(1)
    for _ in range(ngram):
        power *= _PRIME
    rolling = np.uint64(0)
    for i in range(min(ngram, count)):
        rolling = rolling * _PRIME + words[i]
    out[0] = mix(rolling) if count else wordless
    for i in range(ngram, count):
        rolling = rolling * _PRIME + words[i] - words[i - ngram] * power
        out[i - ngram + 1] = mix(rolling)
    return max(1, count - ngram + 1)


@kernel
def _sign(
    data: Array, offsets: Array, table: Array, ngram: int, a: Array, b: Array, content: Array, keys: Array
) -> None:
    room, rows = longest_text(offsets), a.size // keys.shape[0]
    words, runs, minima = np.empty(room, np.uint64), np.empty(room, np.uint64), np.empty(a.size, np.uint32)
    for text in range(offsets.size - 1):
        start, end = np.int64(offsets[text]), np.int64(offsets[text + 1])
        count, content[text] = hash_words(data, start, end, table, words, None)
        minima[:] = np.uint32(0xFFFFFFFF)
        for i in range(shingles(words, count, ngram, content[text], runs)):
            x = np.uint32(runs[i] >> np.uint64(32))
            for k in range(minima.size):
                minima[k] = min(minima[k], np.uint32(a[k] * x + b[k]))
        for band in range(keys.shape[0]):
            key = np.uint64(band)
            for row in range(band * rows, (band + 1) * rows):
                key = mix(key ^ np.uint64(minima[row]))
            keys[band, text] = key


def sign(text: pa.Array, ngram: int, bands: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """What finds the duplicates among N texts.

    Returns:
        content: uint64 [N], a hash of the text in lower case with every run of white space as one space.
        keys: uint64 [bands, N], equal where all `rows` hashes of a band are. The hash functions are a x + b mod 2^32
        with odd a (Dietzfelbinger's multiply-shift).
    """
    a, b = np.random.Generator(np.random.PCG64(_SEED)).integers(0, 2**32, (2, bands * rows), np.uint32)
    content, keys = np.empty(len(text), np.uint64), np.empty((bands, len(text)), np.uint64)
    _sign(*text_buffers(text), word_table(), ngram, a | np.uint32(1), b, content, keys)
    return content, keys


@kernel
def _shingle_sets(data: Array, offsets: Array, table: Array, ngram: int, out: Array, sizes: Array) -> int:
    room, total = longest_text(offsets), 0
    words, runs = np.empty(room, np.uint64), np.empty(room, np.uint64)
    for text in range(sizes.size):
        start, end = np.int64(offsets[text]), np.int64(offsets[text + 1])
        count, content = hash_words(data, start, end, table, words, None)
        distinct = np.unique(runs[: shingles(words, count, ngram, content, runs)])
        out[total : total + distinct.size] = distinct
        sizes[text] = distinct.size
        total += distinct.size
    return total


def shingle_sets(text: pa.Array, ngram: int) -> tuple[np.ndarray, np.ndarray]:
    """The sorted distinct shingles of N texts end to end, uint64, and how many each text has, int64 [N]."""
    data, offsets = text_buffers(text)
    sizes = np.empty(len(text), np.int64)
    out = np.empty(int(offsets[-1] - offsets[0]) + len(text), np.uint64)  # a text has no more words than bytes
    return out[: _shingle_sets(data, offsets, word_table(), ngram, out, sizes)].copy(), sizes


@kernel
def jaccard(a: Array, b: Array, threshold: float) -> float:
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
