"""Which items of benchmarks stand in the text a model was trained on: decontamination's matching, after the fact."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from affinage.config.data import DecontaminateSettings
from affinage.data.benchmark_items import BenchmarkItem
from affinage.data.dataloader import read_rows
from affinage.data.documents import document_files, row_groups
from affinage.data.overlap import Items, Scanner, index_items
from affinage.data.repair import repair
from affinage.data.token_shards import find_shard_folders, open_shards
from affinage.data.tokenizer import Tokenizer

_TEXTS = 1000  # that are looked through at once
_TOKENS = 4_000_000  # read at once


@dataclass(frozen=True)
class Contamination:
    """What was found: (benchmark, item) of every item that stands in the text, and of those that none can tell."""

    found: frozenset[tuple[str, str]]
    too_short: dict[str, int]  # items by benchmark
    benchmarks: frozenset[str]  # that were looked for
    texts: int  # that were looked through
    # Items that only runs in more than `boilerplate` texts tell of: copied that often, or an idiom of many texts.
    common: frozenset[tuple[str, str]] = frozenset()
    boilerplate: int = DecontaminateSettings().boilerplate
    ngram: int = DecontaminateSettings().n_grams  # words in a row that were looked for
    items: Mapping[str, int] = field(default_factory=dict)  # by benchmark, of which too_short is a part


@dataclass(frozen=True)
class Occurrences:
    """What looking through texts came to: how many they are, and in how many each run of words is, int64 [K]."""

    texts: int
    with_run: np.ndarray


def runs_of(items: Iterable[BenchmarkItem], settings: DecontaminateSettings) -> Items:
    """What is looked for: runs of `settings.n_grams` words, or shorter items whole."""
    return index_items(items, ngram=settings.n_grams, min_words=settings.min_words, boilerplate=settings.boilerplate)


def look_through(texts: Iterable[pa.Array], runs: Items) -> Occurrences:
    """Count the texts, given as pyarrow string arrays in normal form C, in which each run is."""
    scanner = Scanner(runs)
    with_run, count = np.zeros(runs.keys.size, np.int64), 0
    for some in texts:
        hits = scanner.scan(some)
        pairs = np.unique(np.stack([hits.text, hits.key]), axis=1)
        with_run += np.bincount(pairs[1], minlength=with_run.size)
        count += len(some)
    return Occurrences(count, with_run)


def contamination(runs: Items, found: Iterable[Occurrences], settings: DecontaminateSettings) -> Contamination:
    """The items that stand in texts.

    A match is what `decontaminate` calls one: a run that is in no more than `settings.boilerplate` items of a benchmark
    and as many texts. Items that have none, but a run that is in more texts, are those that are `common`.
    """
    looked = list(found)
    texts_with = sum((one.with_run for one in looked), np.zeros(runs.keys.size, np.int64))
    few = texts_with <= settings.boilerplate
    standing = runs.items_with((texts_with > 0) & few)
    return Contamination(
        found=standing,
        too_short=dict(runs.too_short),
        benchmarks=frozenset(item.benchmark for item in runs.items),
        texts=sum(one.texts for one in looked),
        common=runs.items_with(~few) - standing,
        boilerplate=settings.boilerplate,
        ngram=settings.n_grams,
        items=Counter(item.benchmark for item in runs.items),
    )


def texts_of_documents(folder: Path) -> Iterator[pa.Array]:
    """The texts of a folder of documents."""
    for path in document_files(folder):
        for group in row_groups(path):
            yield group.read(["text"]).column("text")


def texts_of_rows(folder: Path, tokenizer: Tokenizer) -> Iterator[pa.Array]:
    """What rows of tokens say, without control tokens; a text that goes on in the next row is one."""
    for rows in find_shard_folders(folder).values():
        yield from _in_batches(_texts(rows, tokenizer))


def _texts(folder: Path, tokenizer: Tokenizer) -> Iterator[str]:
    files = open_shards(folder)
    height = max(1, _TOKENS // files.seq_len)
    marks = files.marks
    border = marks.end if marks.begin is None else marks.begin
    held: list[int] = []
    for start in range(0, files.rows, height):
        tokens = read_rows(files, np.arange(start, min(start + height, files.rows)))[0].reshape(-1)
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
