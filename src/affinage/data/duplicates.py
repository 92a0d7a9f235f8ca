"""Which texts are copies of which: exact ones by hash, near ones by MinHash-LSH with the Jaccard similarity checked.

Everything that grows with the corpus is on disk: signatures per shard; then one band at a time, in ranges of keys, is
sorted and leaves its pairs; the pairs' connected components, in batches, are compared. In memory is what the settings
allow. Numbers per document (about 50 bytes) are mapped files, which the system takes out of memory as it needs to.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from affinage.config.data import DedupSettings
from affinage.data.exchange import read_part, write_parts
from affinage.data.executor import LOCAL, Executor, Progress
from affinage.data.near_duplicates import find_near_duplicates
from affinage.data.signatures import (
    BYTES,
    CHUNK,
    CONTENT,
    CONTENT_2,
    NAMES,
    Corpus,
    Shard,
    in_range,
    ranges,
    sign_corpus,
)

MEMORY = 512_000_000  # bytes


@dataclass(frozen=True)
class Duplicates:
    """What is known of N texts, in their order; the arrays are mapped files in the scratch folder.

    kept: int64 [N], the text that stays in place of this one: itself if it is kept.
    similarity: float64 [N], the Jaccard similarity to the kept text; 1 for the kept.
    exact: bool [N], removed for the same content as another text.
    candidates: texts that shared a band with another. compared: pairs whose similarity was computed.
    capped: texts that were not compared with every kept text of a bucket (see near_duplicates.MAX_COMPARED).
    """

    corpus: Corpus
    kept: np.ndarray
    similarity: np.ndarray
    exact: np.ndarray
    candidates: int
    compared: int
    capped: int


@dataclass(frozen=True)
class _Range:
    """One of `count` ranges of a hash."""

    corpus: Corpus
    part: int
    count: int


@dataclass(frozen=True)
class _Members:
    """A shard, and how many ranges have texts to be named."""

    corpus: Corpus
    shard: int
    ranges: int


def find_duplicates(
    shards: Sequence[Shard],
    settings: DedupSettings,
    scratch: Path,
    *,
    memory: int = MEMORY,
    executor: Executor = LOCAL,
    progress: Progress | None = None,
) -> Duplicates:
    """Find the exact and near duplicates among the texts of all shards, with at most `memory` bytes for comparing.

    Of texts with the same content (case and white space apart) the best stays: the longest in bytes, then the one with
    the smallest id, then source. Then, from the best text to the worst: a text with J >= `settings.threshold` to a text
    that was kept is removed, any other is kept. So every removed text has a kept one this near, and no two kept ones
    are known to be this near. A union of all near pairs would not say so much: along a chain of small changes it
    removes texts unlike all that stay.
    The result depends neither on the executor nor on `memory`; with the texts in another order it is the same texts.
    `scratch`, an empty folder that all workers see, is the caller's to remove.
    """
    share = None if progress is None else (lambda done: progress(0.5 * done))
    corpus = sign_corpus(shards, settings, scratch, executor, share)
    kept = corpus.per_document("kept", np.int64)
    exact = corpus.per_document("exact", np.bool_, 0)
    similarity = corpus.per_document("similarity", np.float64, 1)
    _remove_exact(corpus, kept, exact, memory, executor)
    if progress is not None:
        progress(0.6)
    near = find_near_duplicates(corpus, settings, memory, executor)
    if progress is not None:
        progress(0.9)
    for path in near.found:
        found = np.load(path)
        kept[found["document"]], similarity[found["document"]] = found["kept"], found["similarity"]
    for start in range(0, corpus.size, CHUNK):
        here = start + np.flatnonzero(exact[start : start + CHUNK])
        # An exact copy follows its original, which may itself be a near copy of another.
        similarity[here] = similarity[kept[here]]
        kept[here] = kept[kept[here]]
    return Duplicates(corpus, kept, similarity, exact, near.candidates, near.compared, near.capped)


def _remove_exact(corpus: Corpus, kept: np.ndarray, exact: np.ndarray, memory: int, executor: Executor) -> None:
    """Note for every text with the same content as a better one which that is."""
    count = ranges(corpus.size, memory, executor.workers)
    tasks = [_Range(corpus, part, count) for part in range(count)]
    executor.map(_group_by_content, tasks, threads=True)
    executor.map(_name_members, [_Members(corpus, k, count) for k in range(len(corpus.shards))], threads=True)
    executor.map(_best_of_groups, tasks, threads=True)
    for task in tasks:
        removed, keepers = np.load(_removed(corpus, task.part))
        kept[removed], exact[removed] = keepers, True


def _members(corpus: Corpus, part: int) -> Path:
    return corpus.folder / f"same-content-{part:05d}.npy"


def _removed(corpus: Corpus, part: int) -> Path:
    return corpus.folder / f"same-content-removed-{part:05d}.npy"


def _named(corpus: Corpus, shard: int) -> Path:
    return corpus.folder / f"same-content-names-{shard:06d}.arrow"


def _group_by_content(task: _Range) -> None:
    """Write the texts of one range that share their content: their numbers, ascending, and those of their groups."""
    first, second, documents = [], [], []
    for shard, start in enumerate(task.corpus.starts[:-1].tolist()):
        signatures = task.corpus.signatures(shard)
        here = in_range(signatures[CONTENT], task.part, task.count)
        first.append(signatures[CONTENT][here])
        second.append(signatures[CONTENT_2][here])
        documents.append(start + here)
    content = np.array([np.concatenate(second), np.concatenate(first)]) if documents else np.zeros((2, 0), np.uint64)
    order = np.lexsort(content)
    new = np.ones(order.size, bool)
    new[1:] = (content[:, order[1:]] != content[:, order[:-1]]).any(0)
    last = np.append(new[1:], True)
    shared = ~(new & last)
    members = np.array([np.concatenate(documents)[order][shared], np.cumsum(new)[shared]]) if order.size else order
    members = members.reshape(2, -1).astype(np.int64)
    np.save(_members(task.corpus, task.part), members[:, np.argsort(members[0])])


def _name_members(task: _Members) -> None:
    """Hand the names of a shard's texts that share their content to the ranges they are in."""
    corpus, (start, stop) = task.corpus, task.corpus.starts[task.shard : task.shard + 2]
    rows, groups, parts = [], [], []
    for part in range(task.ranges):
        documents, group = np.load(_members(corpus, part), mmap_mode="r")
        mine = slice(*np.searchsorted(documents, [start, stop]))
        rows.append(documents[mine] - start)
        groups.append(group[mine])
        parts.append(np.full(rows[-1].size, part))
    row = np.concatenate(rows)
    names = corpus.names(task.shard) if row.size else corpus.names(task.shard).slice(0, 0)
    table = names.take(pa.array(row))
    sizes = np.asarray(corpus.signatures(task.shard)[BYTES][row])
    for name, column in (("document", start + row), ("group", np.concatenate(groups)), ("bytes", sizes)):
        table = table.append_column(name, pa.array(column))
    write_parts(_named(corpus, task.shard), table, np.concatenate(parts), task.ranges)


def _best_of_groups(task: _Range) -> None:
    """Write the texts of one range that go for their content, and the best of their groups, which stay."""
    corpus = task.corpus
    table = read_part([_named(corpus, shard) for shard in range(len(corpus.shards))], task.part)
    order = [("group", "ascending"), ("bytes", "descending"), *((name, "ascending") for name in NAMES)]
    ordered = table.take(pc.sort_indices(table, sort_keys=[*order, ("document", "ascending")]))
    documents, group = ordered["document"].to_numpy(), ordered["group"].to_numpy()
    best = np.ones(documents.size, bool)
    best[1:] = group[1:] != group[:-1]
    keepers = documents[best][np.cumsum(best) - 1]
    np.save(_removed(corpus, task.part), np.array([documents[~best], keepers[~best]]))
