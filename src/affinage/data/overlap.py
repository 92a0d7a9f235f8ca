"""Which texts have a run of words in common with the items of benchmarks: an index of n-grams, and a kernel that scans.

A word is a run of letters, numbers and marks, with case folded and accents kept, or an ideograph. Punctuation, signs
and HTML tags separate words and are not compared: quoting by `> `, tables by `|` and `<br>` between words change
nothing. Texts are repaired and in normal form C on both sides.
"""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import pyarrow as pa

from affinage.config.data import DecontaminateSettings
from affinage.data.benchmark_items import BenchmarkItem, search_texts
from affinage.data.code_points import Array, kernel, text_buffers, word_table
from affinage.data.foreign_json import encodable
from affinage.data.minhash import hash_words, longest_text, mix
from affinage.data.repair import repair

TEXT, KEY, START, STOP = range(4)  # columns of hits: the number of a text, that of a run, its bytes [start, stop)
_FILTER_BITS = 32  # per run: 1 in 32 words that begin no run is looked up
_PRIME = np.uint64(0x9E3779B97F4A7C15)
_MASK = np.uint32(0xFFFFFF)


@cache
def folded_table() -> np.ndarray:
    """`word_table` with case folded instead of lowered, where that is one code point in normal form (as for ς, ſ).

    Mathematical and currency signs are no words here.
    """
    table = word_table().copy()
    for point in range(0x20000):
        if unicodedata.category(chr(point)) in ("Sm", "Sc"):
            table[point] = np.uint32(point)
        folded = unicodedata.normalize("NFC", chr(point).casefold())
        if len(folded) == 1:
            table[point] = (table[point] & ~_MASK) | np.uint32(ord(folded))
    return table


@kernel
def _run_hash(rolling: np.uint64, length: int) -> np.uint64:
    return mix(rolling ^ (np.uint64(length) << np.uint64(57)))


@kernel
def _index(
    data: Array, offsets: Array, table: Array, ngram: int, least: int, keys: Array, of: Array
) -> tuple[int, Array]:
    """Write hashes of the runs of texts, and which text's; how many, and words per run of each text or 0, int64 [N]."""
    out, room = 0, longest_text(offsets) + 1
    words, places = np.empty(room, np.uint64), np.empty((room, 2), np.int64)
    lengths = np.zeros(offsets.size - 1, np.int64)
    for text in range(offsets.size - 1):
        count = hash_words(data, np.int64(offsets[text]), np.int64(offsets[text + 1]), table, words, None, places)
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
def _scan(data: Array, offsets: Array, words_table: Array, keys: Array, bits: Array, lengths: Array) -> Array:
    """The hits in all texts, int64 [H, 4]."""
    room = longest_text(offsets) + 1
    words, places = np.empty(room, np.uint64), np.empty((room, 2), np.int64)
    hits, count = np.empty((64, 4), np.int64), 0
    for text in range(offsets.size - 1):
        start = np.int64(offsets[text])
        found = hash_words(data, start, np.int64(offsets[text + 1]), words_table, words, None, places)
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
                hash = _run_hash(rolling, length)
                bit = np.int64(hash & np.uint64(64 * bits.size - 1))
                if (bits[bit >> 6] >> np.uint64(bit & 63)) & np.uint64(1) == 0:
                    continue
                key = np.searchsorted(keys, hash)
                if key == keys.size or keys[key] != hash:
                    continue
                if count == hits.shape[0]:
                    larger = np.empty((2 * count, 4), np.int64)
                    larger[:count] = hits
                    hits = larger
                hits[count, 0], hits[count, 1] = text, key
                hits[count, 2], hits[count, 3] = places[k - length + 1, 0] - start, places[k, 1] - start
                count += 1
    return hits[:count]


class ItemIndex:
    """The items of benchmarks and the runs of words that identify them. Safe to use from several threads.

    These are the runs of `n_grams` words of every text of an item, or the whole of a text of fewer, down to
    `min_words`. A run in more than `boilerplate` items of one benchmark is left out (`common_runs` counts them).
    `keys` are ascending hashes of the runs, uint64 [K], and `lengths` their numbers of words. `too_short` counts the
    items by benchmark of which no text has enough words to be found by.
    """

    def __init__(self, items: Iterable[BenchmarkItem], settings: DecontaminateSettings) -> None:
        self.items = tuple(items)
        least = min(settings.n_grams, settings.min_words)
        searched = [(text, k, may) for k, item in enumerate(self.items) for text, may in search_texts(item, least)]
        column = normalized([text for text, *_ in searched])
        owner = np.array([k for _, k, _ in searched], np.int64)
        natural = np.array([may for *_, may in searched], bool)
        data, offsets = text_buffers(column)
        keys, of = np.empty(int(offsets[-1]) + 1, np.uint64), np.empty(int(offsets[-1]) + 1, np.int64)
        count, lengths = _index(data, offsets, folded_table(), settings.n_grams, least, keys, of)
        self.lengths = np.unique(lengths[lengths > 0])
        findable = set(owner[(lengths > 0) & natural].tolist())
        self.too_short = Counter(item.benchmark for k, item in enumerate(self.items) if k not in findable)

        names = {name: number for number, name in enumerate(dict.fromkeys(item.benchmark for item in self.items))}
        benchmark = np.array([names[item.benchmark] for item in self.items], np.int64)
        hashes, members = keys[:count], owner[of[:count]]
        order = np.lexsort((members, benchmark[members], hashes))
        order = order[_changes(hashes[order], members[order])]
        hashes, members = hashes[order], members[order]
        groups = np.cumsum(_changes(hashes, benchmark[members])) - 1
        sizes = np.bincount(groups)
        rare = sizes[groups] <= settings.boilerplate
        self.common_runs = int((sizes > settings.boilerplate).sum())
        self.keys, starts = np.unique(hashes[rare], return_index=True)
        self._bounds, self._members = np.append(starts, rare.sum()), members[rare]
        # A filter before the search in the keys, which lie outside the cache.
        self._bits = np.zeros(1 << max(0, (_FILTER_BITS * self.keys.size // 64).bit_length()), np.uint64)
        bit = self.keys & np.uint64(64 * self._bits.size - 1)
        np.bitwise_or.at(self._bits, bit >> np.uint64(6), np.uint64(1) << (bit & np.uint64(63)))

    def of(self, key: int) -> list[int]:
        """The numbers of the items that have run `key`."""
        found: list[int] = self._members[self._bounds[key] : self._bounds[key + 1]].tolist()
        return found

    def items_with(self, runs: np.ndarray) -> frozenset[tuple[str, str]]:
        """(benchmark, item) of all items that have one of some runs, bool [K]."""
        members = {member for key in np.flatnonzero(runs).tolist() for member in self.of(key)}
        return frozenset((self.items[member].benchmark, self.items[member].id) for member in members)

    def scan(self, text: pa.Array) -> np.ndarray:
        """The runs in a pyarrow string array of texts that are in normal form C: hits, int64 [H, 4], ordered by text
        and place."""
        hits = _scan(*text_buffers(text), folded_table(), self.keys, self._bits, self.lengths)
        ordered: np.ndarray = hits[np.lexsort((hits[:, START], hits[:, TEXT]))]
        return ordered

    def texts_with(self, hits: np.ndarray) -> np.ndarray:
        """In how many texts each run is, int64 [K]."""
        pairs = np.unique(hits[:, [TEXT, KEY]], axis=0)
        counts: np.ndarray = np.bincount(pairs[:, 1], minlength=self.keys.size)
        return counts


def _changes(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Where either array differs from its element before, bool; true at the start."""
    changes = np.ones(first.size, bool)
    changes[1:] = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    return changes


def normalized(texts: Sequence[str]) -> pa.Array:
    """Texts from anywhere in the form in which they are searched."""
    return repair(pa.array([encodable(text) for text in texts], pa.string()))
