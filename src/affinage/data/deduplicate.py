"""Step `dedup`: one of several copies stays, and the clusters can be looked at."""

import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from affinage.config.data import DedupSettings
from affinage.data.clusters import write_clusters
from affinage.data.documents import (
    DocumentWriter,
    clear_documents,
    document_files,
    row_groups,
    text_bytes,
)
from affinage.data.duplicates import MEMORY, find_duplicates
from affinage.data.executor import LOCAL, Executor, Progress
from affinage.data.signatures import NAMES, Corpus
from affinage.data.stats import SAMPLE_CHARACTERS, SAMPLES_PER_REASON, Stats

_SCRATCH = "scratch"


@dataclass(frozen=True)
class StoredDocuments:
    """A document file, as `find_duplicates` reads it."""

    path: Path
    rows: int

    def read(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Its documents, one row group (about 8 MB of text) at a time."""
        for group in row_groups(self.path):
            yield group.read(columns)


@dataclass(frozen=True)
class _Task:
    corpus: Corpus
    shard: int
    path: Path
    folder: Path


def deduplicate(
    documents_folder: Path,
    folder: Path,
    settings: DedupSettings,
    *,
    memory: int = MEMORY,
    executor: Executor = LOCAL,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Copy the documents without duplicates to `folder`, write `clusters/clusters.parquet`, and return the summary.

    Which of several copies stays, and why the result depends on neither the executor, `memory` (bytes) nor file order,
    is told at `duplicates.find_duplicates`. Removed documents are counted as `exact duplicate` or `near duplicate`,
    the samples say of what and how near; the summary also has `clusters`: how many, the largest, and `candidates`,
    `compared`, `capped` (see `duplicates.Duplicates`).
    """
    start = time.perf_counter()
    folder = Path(folder)
    clear_documents(folder)
    scratch = folder / _SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)  # left by a run that was killed
    scratch.mkdir()
    shards = [
        StoredDocuments(path, sum(group.rows for group in row_groups(path)))
        for path in document_files(documents_folder)
    ]
    found = find_duplicates(shards, settings, scratch, memory=memory, executor=executor, progress=progress)
    tasks = [_Task(found.corpus, number, shard.path, folder) for number, shard in enumerate(shards)]
    total = Stats()
    for stats in executor.map(_copy_kept, tasks, threads=True):
        total.merge(stats)
    clusters = write_clusters(folder / "clusters", found, executor)
    shutil.rmtree(scratch)
    return total.summary(time.perf_counter() - start) | {
        "clusters": clusters,
        "candidates": found.candidates,
        "compared": found.compared,
        "capped": found.capped,
    }


def _copy_kept(task: _Task) -> Stats:
    """Copy one file without its duplicates."""
    stats = Stats()
    start = int(task.corpus.starts[task.shard])
    stays = task.corpus.known("kept", task.shard) == start + np.arange(task.corpus.shards[task.shard].rows)
    at = 0
    with DocumentWriter(task.folder, task.path.stem, observe=stats.leave) as writer:
        for group in row_groups(task.path):
            batch = group.read()
            stats.enter(batch.num_rows, text_bytes(batch))
            here = np.array(stays[at : at + group.rows])
            _count_removed(stats, task, batch, ~here, at)
            writer.write(batch.filter(pa.array(here)))
            at += group.rows
    return stats


def _count_removed(stats: Stats, task: _Task, batch: pa.RecordBatch, removed: np.ndarray, at: int) -> None:
    """Count the removed documents of a row group that begins at `at`; some are shown, with what they are copies of."""
    here = slice(at, at + batch.num_rows)
    exact = task.corpus.known("exact", task.shard)[here]
    for reason, rows in (
        ("exact duplicate", np.flatnonzero(removed & exact)),
        ("near duplicate", np.flatnonzero(removed & ~exact)),
    ):
        shown = rows[: SAMPLES_PER_REASON - len(stats.samples.get(reason, ()))].tolist()
        for row in shown:
            original = _name(task.corpus, int(task.corpus.known("kept", task.shard)[at + row]))
            similarity = task.corpus.known("similarity", task.shard)[at + row]
            detail = f"Jaccard {similarity:.3f} to {original['id']} of {original['source']}"
            id, source, text = (batch.column(name)[row].as_py() for name in ("id", "source", "text"))
            stats.remove(reason, id=id, source=source, text=text[:SAMPLE_CHARACTERS], detail=detail)
        if len(rows) > len(shown):
            stats.removed[reason] += len(rows) - len(shown)


def _name(corpus: Corpus, document: int) -> dict[str, str]:
    """Id and source of one document."""
    shard = int(np.searchsorted(corpus.starts, document, side="right")) - 1
    row = document - int(corpus.starts[shard])
    for batch in corpus.shards[shard].read(NAMES):
        if row < len(batch):
            return {name: batch.column(name)[row].as_py() for name in NAMES}
        row -= len(batch)
    raise IndexError(document)
