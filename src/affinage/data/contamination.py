"""Which items of benchmarks stand in the text a model was trained on: decontamination's matching, after the fact."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from affinage.data.benchmark_items import BenchmarkItem
from affinage.data.documents import document_files, row_groups
from affinage.data.overlap import Scanner, index_items
from affinage.data.repair import repair
from affinage.data.row_files import blocks_of_rows, find_row_folders, open_rows
from affinage.data.tokenizer import Tokenizer
from affinage.recipe.cleaning import DecontaminateSettings

_TEXTS = 1000  # that are looked through at once


@dataclass(frozen=True)
class Contamination:
    """What was found: (benchmark, item) of every item that stands in the text, and of those that none can tell."""

    found: frozenset[tuple[str, str]]
    too_short: dict[str, int]  # items by benchmark
    benchmarks: frozenset[str]  # that were looked for
    texts: int  # that were looked through


def find_contamination(
    items: Iterable[BenchmarkItem], texts: Iterable[pa.Array], settings: DecontaminateSettings
) -> Contamination:
    """Look for items in texts, given as pyarrow string arrays in normal form C.

    A match is what `decontaminate` calls one: a run of `settings.ngram` words, or a shorter item whole, that is in no
    more than `settings.boilerplate` items of a benchmark and as many texts.
    """
    index = index_items(items, ngram=settings.ngram, min_words=settings.min_words, boilerplate=settings.boilerplate)
    scanner = Scanner(index)
    texts_with = np.zeros(index.keys.size, np.int64)
    count = 0
    for some in texts:
        hits = scanner.scan(some)
        pairs = np.unique(np.stack([hits.text, hits.key]), axis=1)
        texts_with += np.bincount(pairs[1], minlength=texts_with.size)
        count += len(some)
    told = np.flatnonzero((texts_with > 0) & (texts_with <= settings.boilerplate))
    members = {member for key in told.tolist() for member in index.of(key).tolist()}
    found = frozenset((index.items[member].benchmark, index.items[member].id) for member in members)
    benchmarks = frozenset(item.benchmark for item in index.items)
    return Contamination(found, dict(index.too_short), benchmarks, count)


def texts_of_documents(folder: Path) -> Iterator[pa.Array]:
    """The texts of a folder of documents."""
    for path in document_files(folder):
        for group in row_groups(path):
            yield group.read(["text"]).column("text")


def texts_of_rows(folder: Path, tokenizer: Tokenizer) -> Iterator[pa.Array]:
    """What rows of tokens say, without control tokens; a text that goes on in the next row is one."""
    for rows in find_row_folders(folder).values():
        yield from _in_batches(_texts(rows, tokenizer))


def _texts(folder: Path, tokenizer: Tokenizer) -> Iterator[str]:
    files = open_rows(folder)
    marks = files.marks
    border = marks.end if marks.begin is None else marks.begin
    held: list[int] = []
    for start, stop in blocks_of_rows(0, files.rows, files.context):
        tokens = files.read_range(start, stop).reshape(-1)
        tokens = tokens[(tokens != marks.pad) | (tokens == border)]
        first, *others = np.split(tokens, np.flatnonzero(tokens == border))
        held += first.tolist()
        for other in others:
            yield from _said(held, tokenizer)
            held = other.tolist()
    yield from _said(held, tokenizer)


def _said(tokens: Sequence[int], tokenizer: Tokenizer) -> Iterator[str]:
    if tokens:
        yield tokenizer.decode(list(tokens))


def _in_batches(texts: Iterator[str]) -> Iterator[pa.Array]:
    some: list[str] = []
    for text in texts:
        some.append(text)
        if len(some) == _TEXTS:
            yield _repaired(some)
            some = []
    if some:
        yield _repaired(some)


def _repaired(texts: Sequence[str]) -> pa.Array:
    return repair(pa.array(texts, pa.string())).text
