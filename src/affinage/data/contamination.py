"""Which items of benchmarks stand in the text a model was trained on: decontamination's matching, after the fact."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from affinage.config.data import DecontaminateSettings
from affinage.data.documents import read_documents
from affinage.data.overlap import ItemIndex, normalized
from affinage.data.token_shards import find_shard_folders, open_shards
from affinage.data.tokenizer import Tokenizer

_TEXTS = 1000  # that are searched at once
_TOKENS = 4_000_000  # read at once


@dataclass(frozen=True)
class Contamination:
    """What was found: (benchmark, item) of every item that stands in the text, and of those that cannot be found."""

    found: frozenset[tuple[str, str]]
    too_short: dict[str, int]  # items by benchmark
    benchmarks: frozenset[str]  # that were searched for
    texts: int  # that were searched
    # Items of which only runs in more than `boilerplate` texts were found: copied that often, or an idiom.
    common: frozenset[tuple[str, str]] = frozenset()
    boilerplate: int = DecontaminateSettings().boilerplate
    ngram: int = DecontaminateSettings().n_grams  # words in a row that were searched for
    items: Mapping[str, int] = field(default_factory=dict)  # by benchmark, of which too_short is a part


class Occurrences(NamedTuple):
    """How many texts were searched, and in how many each run of words is, int64 [K]."""

    texts: int
    with_run: np.ndarray


def count_occurrences(texts: Iterable[pa.Array], index: ItemIndex) -> Occurrences:
    """Count the texts, given as pyarrow string arrays in normal form C, in which each run is."""
    with_run, count = np.zeros(index.keys.size, np.int64), 0
    for column in texts:
        with_run += index.texts_with(index.scan(column))
        count += len(column)
    return Occurrences(count, with_run)


def contamination(index: ItemIndex, searches: Iterable[Occurrences], settings: DecontaminateSettings) -> Contamination:
    """The items that stand in texts.

    A match is what `decontaminate` calls one: a run that is in no more than `settings.boilerplate` items of a benchmark
    and as many texts. Items that have none, but a run that is in more texts, are those that are `common`.
    """
    searches = list(searches)
    texts_with = sum((search.with_run for search in searches), np.zeros(index.keys.size, np.int64))
    few = texts_with <= settings.boilerplate
    found = index.items_with((texts_with > 0) & few)
    items = Counter(item.benchmark for item in index.items)
    return Contamination(
        found=found,
        too_short=dict(index.too_short),
        benchmarks=frozenset(items),
        texts=sum(search.texts for search in searches),
        common=index.items_with(~few) - found,
        boilerplate=settings.boilerplate,
        ngram=settings.n_grams,
        items=items,
    )


def texts_of_documents(folder: Path) -> Iterator[pa.Array]:
    """The texts of a folder of documents."""
    return (batch.column("text") for batch in read_documents(folder, ["text"]))


def texts_of_rows(folder: Path, tokenizer: Tokenizer) -> Iterator[pa.Array]:
    """The texts in rows of tokens, without control tokens; a text that goes on in the next row is one."""
    texts: list[str] = []
    for shards in find_shard_folders(folder).values():
        for tokens in _texts(shards):
            texts.append(tokenizer.decode(tokens))
            if len(texts) == _TEXTS:
                yield normalized(texts)
                texts = []
    if texts:
        yield normalized(texts)


def _texts(folder: Path) -> Iterator[list[int]]:
    """The tokens of every text in the shards of a folder."""
    files = open_shards(folder)
    height = max(1, _TOKENS // files.seq_len)
    border = files.marks.end if files.marks.begin is None else files.marks.begin
    held: list[int] = []  # of a text that may go on
    for start in range(0, files.rows, height):
        tokens = files.read(np.arange(start, min(start + height, files.rows)))[0].reshape(-1)
        tokens = tokens[(tokens != files.marks.pad) | (tokens == border)]
        first, *others = np.split(tokens, np.flatnonzero(tokens == border))
        held += first.tolist()
        for other in others:
            if held:
                yield held
            held = other.tolist()
    if held:
        yield held
