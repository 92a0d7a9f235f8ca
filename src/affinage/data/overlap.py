"""Which texts have a run of words in common with the items of benchmarks: an index of n-grams, and a kernel that scans.

A word is a run of letters, numbers and marks, with case folded and accents kept, or an ideograph. Punctuation, signs
and HTML tags separate words and are not compared: quoting by `> `, tables by `|` and `<br>` between words change
nothing. Texts are repaired and in normal form C on both sides.
"""

import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pyarrow as pa

from affinage.data.benchmark_items import BenchmarkItem, search_texts
from affinage.data.code_points import SINGLE, WORD, decode, text_buffers, word_table
from affinage.data.compiled import kernel
from affinage.data.minhash import mix
from affinage.data.repair import repair

_PRIME = np.uint64(0x9E3779B97F4A7C15)
_MASK = np.uint32(0xFFFFFF)
_TAG_BYTES = 200  # of an HTML tag, at most
_FILTER_BITS = 16  # per n-gram: 1 in 16 lookups of what is not there goes on to the table, which lies outside the cache


@dataclass(frozen=True)
class Items:
    """What is looked for: N items, and the runs of words that tell them.

    `keys` (uint64 [K], ascending) are hashes of runs; run k is in the items `members[bounds[k] : bounds[k + 1]]`.
    `lengths` are the numbers of words of the runs, ascending.
    """

    items: tuple[BenchmarkItem, ...]
    keys: np.ndarray
    bounds: np.ndarray
    members: np.ndarray
    lengths: np.ndarray
    too_short: Counter[str]  # items by benchmark of which no text has enough words to be told by
    boilerplate: int  # runs that are not looked for because too many items of a benchmark have them

    def of(self, key: int) -> np.ndarray:
        """The items that have run `key`."""
        found: np.ndarray = self.members[self.bounds[key] : self.bounds[key + 1]]
        return found

    def items_with(self, runs: np.ndarray) -> frozenset[tuple[str, str]]:
        """(benchmark, item) of all items that have one of some runs, bool [K]."""
        members = {member for key in np.flatnonzero(runs).tolist() for member in self.of(key).tolist()}
        return frozenset((self.items[member].benchmark, self.items[member].id) for member in members)


@dataclass(frozen=True)
class Hits:
    """Runs found in texts, int64 [H] each, ordered by text and place: which text, which run, the number of the run's
    first word in the text, and the bytes [start, stop) of the run in it."""

    text: np.ndarray
    key: np.ndarray
    word: np.ndarray
    start: np.ndarray
    stop: np.ndarray


@cache
def folded_table() -> np.ndarray:
    """`word_table` with case folded instead of lowered, where that is one code point in normal form (as for ς, ſ).

    Mathematical and currency signs are no words here.
    """
    table = word_table().copy()
    for point in range(0x20000):
        if unicodedata.category(chr(point)) in ("Sm", "Sc"):
            table[point] = np.uint32(point)
    for point in range(0x20000):
        folded = unicodedata.normalize("NFC", chr(point).casefold())
        if len(folded) == 1:
            table[point] = (table[point] & ~_MASK) | np.uint32(ord(folded))
    return table


@kernel
def _tag_end(data: np.ndarray, i: np.int64, end: np.int64) -> np.int64:
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
def _words(
    data: np.ndarray, i: np.int64, end: np.int64, table: np.ndarray, words: np.ndarray, places: np.ndarray
) -> int:
    """Write hashes and first and last + 1 byte of a text's words; how many there are."""
    count, word = 0, np.uint64(0)
    while i < end:
        code, size = decode(data, i)
        if code == 0x3C:
            size = max(size, _tag_end(data, i, end) - i)
        kind, point = table[code] >> np.uint32(24), np.uint64(table[code] & _MASK)
        if kind == WORD:
            if word == 0:
                places[count, 0] = i
            word = (word ^ (point + np.uint64(1))) * _PRIME
        else:
            if word != 0:
                words[count], places[count, 1] = mix(word), i
                count += 1
                word = np.uint64(0)
            if kind == SINGLE:
                words[count], places[count, 0], places[count, 1] = mix(point * _PRIME), i, i + size
                count += 1
        i += size
    if word != 0:
        words[count], places[count, 1] = mix(word), i
        count += 1
    return count


@kernel
def _run_hash(rolling: np.uint64, length: int) -> np.uint64:
    return mix(rolling ^ (np.uint64(length) << np.uint64(57))) | np.uint64(1)


@kernel
def _index(
    data: np.ndarray, offsets: np.ndarray, table: np.ndarray, ngram: int, least: int, keys: np.ndarray, of: np.ndarray
) -> tuple[int, np.ndarray]:
    """Write hashes of the runs of texts, and which text's; how many, and words per run of each text or 0, int64 [N]."""
    longest, out = 0, 0
    for text in range(offsets.size - 1):
        longest = max(longest, offsets[text + 1] - offsets[text])
    words, places = np.empty(longest + 1, np.uint64), np.empty((longest + 1, 2), np.int64)
    lengths = np.zeros(offsets.size - 1, np.int64)
    for text in range(offsets.size - 1):
        count = _words(data, np.int64(offsets[text]), np.int64(offsets[text + 1]), table, words, places)
        length = min(ngram, count)
        if length < least:
            continue
        lengths[text] = length
        for k in range(count - length + 1):
            rolling = np.uint64(0)
            for j in range(k, k + length):
                rolling = rolling * _PRIME + words[j]
            keys[out], of[out] = _run_hash(rolling, length), text
            out += 1
    return out, lengths


@kernel
def _fill(keys: np.ndarray, table: np.ndarray, values: np.ndarray, bits: np.ndarray) -> None:
    mask, bit_mask = np.int64(table.size - 1), np.int64(bits.size * 64 - 1)
    for k in range(keys.size):
        place = np.int64(keys[k] >> np.uint64(20)) & mask
        while table[place] != 0:
            place = (place + 1) & mask
        table[place], values[place] = keys[k], k
        bit = np.int64(keys[k] >> np.uint64(8)) & bit_mask
        bits[bit >> 6] |= np.uint64(1) << np.uint64(bit & 63)


@kernel
def _scan(
    data: np.ndarray,
    offsets: np.ndarray,
    words_table: np.ndarray,
    table: np.ndarray,
    values: np.ndarray,
    bits: np.ndarray,
    lengths: np.ndarray,
) -> np.ndarray:
    """The columns of `Hits`, int64 [H, 5]."""
    longest = 0
    for text in range(offsets.size - 1):
        longest = max(longest, offsets[text + 1] - offsets[text])
    words, places = np.empty(longest + 1, np.uint64), np.empty((longest + 1, 2), np.int64)
    hits, count = np.empty((64, 5), np.int64), 0
    mask, bit_mask = np.int64(table.size - 1), np.int64(bits.size * 64 - 1)
    for text in range(offsets.size - 1):
        start = np.int64(offsets[text])
        found = _words(data, start, np.int64(offsets[text + 1]), words_table, words, places)
        for length in lengths:
            power, rolling = np.uint64(1), np.uint64(0)
            for _ in range(length):
                power *= _PRIME
            for k in range(found):
                rolling = rolling * _PRIME + words[k]
                if k >= length:
                    rolling -= words[k - length] * power
                if k < length - 1:
                    continue
                key = _run_hash(rolling, length)
                bit = np.int64(key >> np.uint64(8)) & bit_mask
                if (bits[bit >> 6] >> np.uint64(bit & 63)) & np.uint64(1) == 0:
                    continue
                place = np.int64(key >> np.uint64(20)) & mask
                while table[place] != 0 and table[place] != key:
                    place = (place + 1) & mask
                if table[place] == 0:
                    continue
                if count == hits.shape[0]:
                    larger = np.empty((2 * count, 5), np.int64)
                    larger[:count] = hits
                    hits = larger
                first = k - length + 1
                hits[count, 0], hits[count, 1], hits[count, 2] = text, values[place], first
                hits[count, 3], hits[count, 4] = places[first, 0] - start, places[k, 1] - start
                count += 1
    return hits[:count]


def index_items(items: Iterable[BenchmarkItem], *, ngram: int, min_words: int, boilerplate: int) -> Items:
    """Index the runs of `ngram` words of every text of the items, or the whole of a text of fewer, down to `min_words`.

    A run in more than `boilerplate` items of one benchmark is left out: it tells no item from another.
    """
    known = tuple(items)
    searched = [search_texts(item, min(ngram, min_words)) for item in known]
    texts = [text for own in searched for text, _ in own]
    stands = np.array([natural for own in searched for _, natural in own], bool)
    owner = np.repeat(np.arange(len(known)), [len(own) for own in searched])
    column = repair(pa.array([text.encode(errors="replace").decode() for text in texts], pa.string())).text
    data, offsets = text_buffers(column)
    keys, of = np.empty(int(offsets[-1]) + 1, np.uint64), np.empty(int(offsets[-1]) + 1, np.int64)
    count, lengths = _index(data, offsets, folded_table(), ngram, min(ngram, min_words), keys, of)
    told = np.zeros(len(known), bool)
    told[owner[(lengths > 0) & stands]] = True
    names = {name: number for number, name in enumerate(dict.fromkeys(item.benchmark for item in known))}
    benchmark = np.array([names[item.benchmark] for item in known], np.int64)
    hashes, item = keys[:count], owner[of[:count]]
    order = np.lexsort((item, benchmark[item], hashes))
    hashes, item = hashes[order], item[order]
    new = _changes(hashes, item)
    hashes, item = hashes[new], item[new]
    groups = np.cumsum(_changes(hashes, benchmark[item])) - 1
    members = np.bincount(groups)
    common = members[groups] > boilerplate
    unique, starts = np.unique(hashes[~common], return_index=True)
    return Items(
        known,
        unique,
        np.append(starts, (~common).sum()),
        item[~common],
        np.unique(lengths[lengths > 0]),
        Counter(known[k].benchmark for k in np.flatnonzero(~told)),
        int((members > boilerplate).sum()),
    )


def _changes(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Where either array differs from its element before, bool; true at the start."""
    changes = np.ones(first.size, bool)
    changes[1:] = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    return changes


class Scanner:
    """Finds the runs of `Items` in texts. Safe to use from several threads."""

    def __init__(self, items: Items) -> None:
        size = 1 << max(4, (2 * items.keys.size).bit_length())
        bits = 1 << max(6, (_FILTER_BITS * items.keys.size).bit_length())
        self.size = items.keys.size  # runs that are looked for
        self._lengths = items.lengths
        self._table, self._values = np.zeros(size, np.uint64), np.zeros(size, np.int64)
        self._bits = np.zeros(bits // 64, np.uint64)
        _fill(items.keys, self._table, self._values, self._bits)

    def scan(self, text: pa.Array) -> Hits:
        """The runs in a pyarrow string array of texts that are in normal form C."""
        data, offsets = text_buffers(text)
        found = _scan(data, offsets, folded_table(), self._table, self._values, self._bits, self._lengths)
        found = found[np.lexsort((found[:, 2], found[:, 0]))]
        return Hits(*found.T)
