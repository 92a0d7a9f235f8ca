"""Which texts have a run of words in common with the items of benchmarks: an index of n-grams, and a kernel that scans.

A word is a run of letters, numbers and marks, with case folded and accents kept, or an ideograph. Punctuation, signs
and HTML tags separate words and are not compared: quoting by `> `, tables by `|` and `<br>` between words change
nothing. Texts are repaired and in normal form C on both sides.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from affinage.data.code_points import Array, kernel, repair, text_buffers, word_table
from affinage.data.json_files import encodable
from affinage.data.minhash import hash_words, longest_text, mix
from affinage.errors import UserError

MIN_WORDS = 8  # a text of an item that has fewer than `n_grams` words is searched for whole, down to this many
BOILERPLATE = 10  # a run of words in more items of a benchmark, or in more texts, is no match (GPT-3: documents)
TEXT, KEY, START, STOP = range(4)  # columns of hits: the number of a text, that of a run, its bytes [start, stop)
_BLANK = re.compile(r"(?<!\w)_+(?!\w)")  # that a choice fills
_MOST_JOINED = 12  # short texts of an item
_FILTER_BITS = 16  # per run: of 16 words that begin no run, one is looked up
_PRIME = np.uint64(0x9E3779B97F4A7C15)


# ---- items ----


class BenchmarkItem(NamedTuple):
    """One question of a benchmark. Each of its texts is searched for by itself."""

    benchmark: str
    id: str
    texts: Sequence[str]


def strings_in(value: Any) -> Iterator[str]:
    """All strings in a JSON value, wherever they are; of an object the values, not the keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings_in(part)


def kind_of_items(path: str, where: str = "data.decontaminate.benchmark_files") -> str:
    """What a file of items is by its name: jsonl, parquet or txt. Raises UserError for any other."""
    kind = re.search(r"\.(jsonl|parquet|txt)(\.(gz|bz2|zst))?/?$", path, re.IGNORECASE)
    if kind is None:
        fix = "Items are read from .jsonl, .parquet and .txt files, and from .yaml task files."
        raise UserError(f"`{path}` is no file of benchmark items", where=where, fix=fix)
    return kind[1].lower()


def read_items(path: str) -> Iterator[BenchmarkItem]:
    """The items in a file of the user's: every string of a JSONL line or a Parquet row, or every line of a text file.

    The benchmark has the file's name; an item has the `id` of its line or row, or else its number from 1. Files may be
    compressed (.gz, .bz2, .zst) and anywhere that fsspec reads. Raises UserError for what cannot be read.
    """
    name, number, kind = path.rstrip("/").rsplit("/", 1)[-1], 0, kind_of_items(path)
    place = path if "://" in path else os.path.expanduser(path)
    try:
        with fsspec.open(place, "rb", compression=None if kind == "parquet" else "infer") as file:
            lines = (text for line in file if (text := line.decode("utf-8-sig").strip()))
            for number, line in enumerate(pq.read_table(file).to_pylist() if kind == "parquet" else lines, 1):
                value = json.loads(line) if kind == "jsonl" else line
                id = value.get("id") if isinstance(value, dict) else None
                yield BenchmarkItem(name, str(number if id is None else id), tuple(strings_in(value)))
    except (OSError, EOFError, ValueError, RecursionError, pa.ArrowException) as error:
        where = f"data.decontaminate.benchmark_files, {path}" + (f" after item {number}" if number else "")
        raise UserError(f"the benchmark's items cannot be read: {getattr(error, 'msg', error)}", where=where) from error


def search_texts(item: BenchmarkItem, min_words: int) -> list[tuple[str, bool]]:
    """What is searched for of an item: (text, whether it may stand in natural text).

    Those are its texts; sentences with a blank (`_`), filled with each of the item's short texts, for they are
    published whole; and short texts joined, for a question and its answer may follow each other. A text of other ones
    with few words between is a prompt of the harness: `Answer:` stands there in no natural text.
    """
    texts = list(dict.fromkeys(text for text in item.texts if text.strip()))
    short = [text for text in texts if len(text.split()) < min_words][:_MOST_JOINED]
    made = [other.join(_BLANK.split(text)) for text in texts if _BLANK.search(text) for other in short]
    made += [f"{first} {second}" for first in short for second in short if first != second]
    found = [(text, True) for text in made if len(text.split()) >= min_words]
    for text in texts:
        rest = text
        for other in sorted(texts, key=len, reverse=True):
            if other != text and len(other.split()) > 2:
                rest = rest.replace(other, " ")
        is_prompt = rest != text and len(rest.split()) < min_words
        found.append((text, not is_prompt and not _BLANK.search(text)))
    return found


# ---- kernels ----


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
                key, end = 0, keys.size  # the place of the hash, by bisection
                while key < end:
                    middle = (key + end) >> 1
                    if keys[middle] < hash:
                        key = middle + 1
                    else:
                        end = middle
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


# ---- the index ----


class ItemIndex:
    """The items of benchmarks and the runs of words that identify them. Safe to use from several threads.

    These are the runs of `n_grams` words of every text of an item, or the whole of a text of fewer, down to
    `min_words`. A run in more than `boilerplate` items of one benchmark is left out. `keys` are ascending hashes of the
    runs, uint64 [K], and `lengths` their numbers of words. `too_short` counts the items by benchmark of which no text
    has enough words to be found by.
    """

    def __init__(
        self,
        items: Iterable[BenchmarkItem],
        n_grams: int,
        *,
        min_words: int = MIN_WORDS,
        boilerplate: int = BOILERPLATE,
    ) -> None:
        self.items, self.n_grams, self.boilerplate = tuple(items), n_grams, boilerplate
        least = min(n_grams, min_words)
        searched = [(text, k, may) for k, item in enumerate(self.items) for text, may in search_texts(item, least)]
        owner = np.array([k for _, k, _ in searched], np.int64)
        natural = np.array([may for *_, may in searched], bool)
        data, offsets = text_buffers(normalized([text for text, *_ in searched]))
        keys, of = np.empty(int(offsets[-1]) + 1, np.uint64), np.empty(int(offsets[-1]) + 1, np.int64)
        count, lengths = _index(data, offsets, word_table(folded=True), n_grams, least, keys, of)
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
        rare = np.bincount(groups)[groups] <= boilerplate
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
        hits = _scan(*text_buffers(text), word_table(folded=True), self.keys, self._bits, self.lengths)
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
