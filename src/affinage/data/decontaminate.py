"""Items of benchmarks in text: step `decontaminate` removes the documents that hold one; a finished model's are named.

A match is a run of `n_grams` words of an item, or a shorter item whole. Runs that more than `BOILERPLATE` items of a
benchmark, or texts, have in common are no match. A word is a run of letters, numbers and marks, with case folded and
accents kept, or an ideograph; all else separates words, as do HTML tags and entities. Texts are repaired on both sides.
"""

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from affinage.cluster.executor import LOCAL, Executor
from affinage.config.data import DecontaminateSettings
from affinage.data.code_points import Array, kernel, repair, text_buffers, word_table
from affinage.data.dedup import hash_words, shingle_sets, shingles
from affinage.data.documents import SAMPLE_CHARACTERS, Stats, Verdicts, copy_documents, numbered_files, read_documents
from affinage.data.token_shards import TokenShards, find_shard_folders
from affinage.data.tokenizer import Tokenizer
from affinage.errors import UserError
from affinage.json_files import encodable, write_json

BOILERPLATE = 10  # a run of words in more items of a benchmark, or in more texts, is no match (GPT-3: documents)
TEXT, KEY, START, STOP = range(4)  # columns of hits: the number of a text, that of a run, its bytes [start, stop)
_BLANK = re.compile(r"(?<!\w)_+(?!\w)")  # that a choice fills
_MOST_JOINED = 12  # short texts of an item
_FILTER_BITS = 16  # per run: of 16 words that begin no run, one is looked up
# `text` is the first run in common, as the document has it; `words` counts what white space separates in it.
_MATCH = pa.schema(
    dict.fromkeys(("document", "source", "url", "benchmark", "item", "text"), pa.string()) | {"words": pa.int64()}
)
EXAMPLES = 20  # matches in the summary
_ROWS = 1_000  # of conversations, read at once


# ---- items ----


class BenchmarkItem(NamedTuple):
    """One question of a benchmark. Each of its texts is searched for by itself."""

    benchmark: str
    id: str
    texts: Sequence[str]


Items = Iterable[BenchmarkItem]


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
        fix = "Items are read from .jsonl, .parquet and .txt files. Name task files in `evaluate.tasks`."
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

    Those are its texts; sentences with a blank (`_`), filled with each of its short texts; and short texts joined, for
    a question and its answer may follow each other. A text of others with few words between is a prompt of the harness.
    """
    texts = list(dict.fromkeys(text for text in item.texts if text.strip()))
    short = [text for text in texts if len(text.split()) < min_words][:_MOST_JOINED]
    made = [other.join(_BLANK.split(text)) for text in texts if _BLANK.search(text) for other in short]
    made += [f"{first} {second}" for first in short for second in short if first != second]
    searched = [(text, True) for text in made if len(text.split()) >= min_words]
    for text in texts:
        rest = text
        for other in sorted(texts, key=len, reverse=True):
            if other != text and len(other.split()) > 2:
                rest = rest.replace(other, " ")
        is_prompt = rest != text and len(rest.split()) < min_words
        searched.append((text, not is_prompt and not _BLANK.search(text)))
    return searched


# ---- kernels ----


@kernel
def _scan(data: Array, offsets: Array, words_table: Array, keys: Array, bits: Array, lengths: Array) -> Array:
    """The hits in all texts, int64 [H, 4]."""
    hits = [np.int64(0) for _ in range(0)]
    for text in range(offsets.size - 1):
        words, _, places = hash_words(data, offsets, text, words_table, True)
        for length in lengths[lengths <= words.size]:
            for k, run in enumerate(shingles(words, length, np.uint64(0))):
                bit = np.int64(run & np.uint64(64 * bits.size - 1))
                if (bits[bit >> 6] >> np.uint64(bit & 63)) & np.uint64(1):
                    key = np.searchsorted(keys, run)
                    if key < keys.size and keys[key] == run:
                        hits.extend((np.int64(text), key, places[k, 0], places[k + length - 1, 1]))
    return np.array(hits, np.int64).reshape(-1, 4)


# ---- the index ----


class ItemIndex:
    """The items of benchmarks and the runs of words that identify them. Safe to use from several threads.

    These are the runs of `n_grams` words of every text of an item, or the whole of a text of fewer, down to
    `min_words`. A run in more than `boilerplate` items of one benchmark is left out. `keys` are ascending hashes of the
    runs, uint64 [K]. `too_short` counts the items by benchmark of which no text has enough words to be found by.
    """

    def __init__(self, items: Items, n_grams: int, *, min_words: int = 8, boilerplate: int = BOILERPLATE) -> None:
        self.items, self.n_grams, self.boilerplate = tuple(items), n_grams, boilerplate
        least = min(n_grams, min_words)
        searched = [(k, *found) for k, item in enumerate(self.items) for found in search_texts(item, least)]
        found, (sizes, *_, words) = shingle_sets(normalized([text for _, text, _ in searched]), n_grams, searched=True)
        lengths, long = np.minimum(words, n_grams), words >= least
        self.lengths = np.unique(lengths[long])  # words of a run
        findable = {k for (k, _, natural), enough in zip(searched, long) if natural and enough}
        self.too_short = Counter(item.benchmark for k, item in enumerate(self.items) if k not in findable)

        members = np.repeat(np.array([k for k, *_ in searched], np.int64), sizes)
        benchmarks = pa.array([item.benchmark for item in self.items], pa.string()).take(pa.array(members))
        runs = pa.table({"run": found, "benchmark": benchmarks, "item": members})
        runs = runs.filter(np.repeat(long, sizes)).group_by(["run", "benchmark", "item"]).aggregate([])
        rare = runs.group_by(["run", "benchmark"]).aggregate([("item", "count")])
        rare = rare.filter(pc.field("item_count") <= boilerplate)
        runs = runs.join(rare, ["run", "benchmark"], join_type="left semi").sort_by("run")
        self.keys, starts = np.unique(runs["run"].to_numpy(), return_index=True)
        self._bounds, self._members = np.append(starts, len(runs)), np.array(runs["item"])
        # A filter before the search in the keys, which lie outside the cache.
        self._bits = np.zeros(1 << max(0, (_FILTER_BITS * self.keys.size // 64).bit_length()), np.uint64)
        bit = self.keys & np.uint64(64 * self._bits.size - 1)
        np.bitwise_or.at(self._bits, bit >> np.uint64(6), np.uint64(1) << (bit & np.uint64(63)))

    def of(self, key: int) -> np.ndarray:
        """The numbers of the items that have run `key`."""
        return self._members[self._bounds[key] : self._bounds[key + 1]]

    def items_with(self, runs: np.ndarray) -> frozenset[tuple[str, str]]:
        """(benchmark, item) of all items that have one of some runs, bool [K]."""
        members = {member for key in np.flatnonzero(runs).tolist() for member in self.of(key)}
        return frozenset((self.items[member].benchmark, self.items[member].id) for member in members)

    def scan(self, text: pa.Array) -> np.ndarray:
        """The hits in a string array of texts in normal form C, int64 [H, 4], ordered by text and place."""
        hits: np.ndarray = _scan(*text_buffers(text), word_table(folded=True), self.keys, self._bits, self.lengths)
        return hits[np.lexsort((hits[:, START], hits[:, TEXT]))]

    def texts_with(self, hits: np.ndarray) -> np.ndarray:
        """In how many texts each run is, int64 [K]."""
        pairs = np.unique(hits[:, [TEXT, KEY]], axis=0)
        return np.bincount(pairs[:, 1], minlength=self.keys.size)


def normalized(texts: Sequence[str]) -> pa.Array:
    """Texts from anywhere in the form in which they are searched."""
    return repair(pa.array([encodable(text) for text in texts], pa.string()))


# ---- the step ----


def decontaminate(
    source: Path, folder: Path, settings: DecontaminateSettings, items: Items, *, executor: Executor = LOCAL
) -> dict[str, Any]:
    """Copy the documents of `source` that hold no item to `folder`, write `matches.parquet`, and return the summary.

    This has `benchmarks` (items, those too short to be found, those found, the documents they are in, and those that
    are `common`: in more than `BOILERPLATE` documents, which stay) and the first `matches`. A killed call resumes.
    """
    index = ItemIndex(items, settings.n_grams)

    def scan(task: tuple[Path, int]) -> list[list[int]]:
        """Return the hits in a file, whose documents are numbered from `first`."""
        rows, (path, first) = [], task
        for batch in read_documents(path, ["text"]):
            rows += (index.scan(batch.column("text")) + np.array([first, 0, 0, 0])).tolist()
            first += batch.num_rows
        return rows

    scanned = executor.map(scan, numbered_files(source), folder / "scans", threads=True, label="scanning")
    hits = np.concatenate([np.array(rows, np.int64).reshape(-1, 4) for rows in scanned])
    common = index.texts_with(hits) > index.boilerplate
    hits = hits[~common[hits[:, KEY]]]

    def items_in(batch: pa.RecordBatch, first: int, stats: Stats) -> Verdicts:
        verdicts = {}
        own = hits[slice(*np.searchsorted(hits[:, TEXT], [first, first + batch.num_rows]))]
        for text in np.unique(own[:, TEXT]).tolist():
            matches = _matches(batch.slice(text - first, 1).to_pylist()[0], own[own[:, TEXT] == text], index)
            stats.notes += matches
            best = max(matches, key=lambda match: int(match["words"]))
            detail = f"{best['benchmark']} {best['item']}: {best['text'][:SAMPLE_CHARACTERS]}"
            verdicts[text - first] = "in a benchmark", detail
        return verdicts

    total = copy_documents(source, folder, items_in, executor)
    pq.write_table(pa.Table.from_pylist(matches := total.notes, _MATCH), folder / "matches.parquet", compression="zstd")
    shutil.rmtree(folder / "scans")
    matched = {(match["benchmark"], match["item"]) for match in matches}
    documents = {(match["benchmark"], match["source"], match["document"]) for match in matches}
    numbers = {
        "items": Counter(item.benchmark for item in index.items),
        "too_short": index.too_short,
        "found": Counter(name for name, _ in matched),
        "documents": Counter(name for name, *_ in documents),
        "common": Counter(name for name, _ in index.items_with(common) - matched),
    }
    benchmarks = {name: {what: counts[name] for what, counts in numbers.items()} for name in numbers["items"]}
    return total.summary() | {"benchmarks": benchmarks, "matches": matches[:EXAMPLES]}


def _matches(document: dict[str, str], hits: np.ndarray, index: ItemIndex) -> list[dict[str, Any]]:
    """One match for every item that is in a document: the first stretch that the item's runs cover."""
    stretches: dict[int, tuple[int, int]] = {}
    for key, start, stop in hits[:, [KEY, START, STOP]].tolist():
        for number in index.of(key):
            begin, end = stretches.get(number, (start, stop))
            stretches[number] = begin, max(stop, end) if start <= end else end
    names, matches = {"document": document["id"], "source": document["source"], "url": document["url"]}, []
    for number, (start, stop) in sorted(stretches.items()):
        item, text = index.items[number], document["text"].encode()[start:stop].decode()
        matches.append(names | {"benchmark": item.benchmark, "item": item.id, "words": len(text.split()), "text": text})
    return matches


# ---- tuning data ----


def write_items(path: Path, items: Items, settings: DecontaminateSettings) -> Path:
    """Write items to a file, for tasks that call `contaminated`; returns the path."""
    write_json(path, {"n_grams": settings.n_grams, "items": list(items)})
    return path


@lru_cache(maxsize=1)
def _index_of(path: Path) -> ItemIndex:
    content = json.loads(path.read_text("utf-8"))
    return ItemIndex((BenchmarkItem(*item) for item in content["items"]), content["n_grams"])


def contaminated(texts: Sequence[str], items: Path) -> set[int]:
    """Which of some texts, such as whole conversations, hold an item in a file that `write_items` has written."""
    index = _index_of(items)
    hits = index.scan(normalized(texts))
    rare = index.texts_with(hits) <= index.boilerplate
    return set(hits[rare[hits[:, KEY]], TEXT].tolist())


# ---- after the fact: the text that a model was trained on ----


class Contamination(NamedTuple):
    """Which items of benchmarks, as (benchmark, item), stand in the text that a model was trained on."""

    benchmarks: frozenset[str]  # whose items were searched for
    texts: int  # that were searched
    found: frozenset[tuple[str, str]]
    # Items of which only runs in more than `BOILERPLATE` texts were found: copied that often, or an idiom.
    common: frozenset[tuple[str, str]] = frozenset()
    n_grams: int = DecontaminateSettings().n_grams  # words in a row that were searched for


def contamination(index: ItemIndex, texts: Iterable[pa.Array]) -> Contamination:
    """The items that stand in texts, which are pyarrow string arrays in normal form C."""
    texts_with, count = np.zeros(index.keys.size, np.int64), 0
    for column in texts:
        texts_with += index.texts_with(index.scan(column))
        count += len(column)
    few = texts_with <= index.boilerplate
    matched, common = index.items_with((texts_with > 0) & few), index.items_with(~few)
    benchmarks = frozenset(item.benchmark for item in index.items)
    return Contamination(benchmarks, count, matched, common - matched, index.n_grams)


def texts_of_rows(folder: Path, tokenizer: Tokenizer) -> Iterator[pa.Array]:
    """The texts of conversations in rows of tokens, without control tokens."""
    for path in find_shard_folders(folder).values():
        shards = TokenShards(path)
        border = shards.marks.end if shards.marks.begin is None else shards.marks.begin
        for rows in np.array_split(np.arange(shards.rows), -(-shards.rows // _ROWS)):
            tokens, _ = shards.read(rows)
            texts = [text for row in tokens for text in np.split(row, np.flatnonzero(row == border))]
            # One that is no more than a border is padding.
            yield normalized([tokenizer.decode(text.tolist()) for text in texts if text.size > 1])
