"""The documents that have copies, cluster by cluster, for people to look at."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from affinage.data.duplicates import Duplicates
from affinage.data.exchange import read_part, write_parts
from affinage.data.executor import Executor
from affinage.data.signatures import CHUNK, Corpus
from affinage.data.stats import SAMPLES_PER_REASON

CLUSTERS = "clusters.parquet"  # in the folder `clusters`, for it holds no documents
CLUSTER_SCHEMA = pa.schema(
    [
        ("source", pa.string()),
        ("id", pa.string()),
        ("cluster", pa.string()),  # id of the document that stays
        ("cluster_source", pa.string()),
        ("kept", pa.bool_()),
        ("exact", pa.bool_()),  # the same content but for case and white space
        ("jaccard", pa.float64()),  # similarity to the document that stays
    ]
)
_ROWS = 200_000  # of the file that are sorted together
_ORDER = [
    ("cluster_source", "ascending"),
    ("cluster", "ascending"),
    ("kept", "descending"),
    ("jaccard", "descending"),
    ("source", "ascending"),
    ("id", "ascending"),
]


@dataclass(frozen=True)
class _Task:
    corpus: Corpus
    number: int  # of a shard, or of a part of the file
    bounds: np.ndarray  # where the parts of the file begin and end, as numbers of kept documents


def write_clusters(folder: Path, found: Duplicates, executor: Executor) -> dict[str, Any]:
    """Write `clusters.parquet` into `folder`, the kept document first in each cluster; the number and the largest.

    Clusters of up to 200,000 documents together are sorted by name; more, in the order of the documents that stay.
    """
    corpus, copies = found.corpus, found.corpus.per_document("copies", np.int32, 0)
    for start in range(0, corpus.size, CHUNK):
        kept = np.asarray(found.kept[start : start + CHUNK])
        np.add.at(copies, kept[kept != np.arange(start, start + kept.size)], 1)
    bounds = _bounds(corpus, copies)
    executor.map(_spread, [_Task(corpus, k, bounds) for k in range(len(corpus.shards))], threads=True)
    tasks = [_Task(corpus, part, bounds) for part in range(bounds.size - 1)]
    parts = executor.map(_write_part, tasks, threads=True)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{CLUSTERS}.part"
    with pq.ParquetWriter(unfinished, CLUSTER_SCHEMA, compression="zstd") as writer:
        for part in range(len(tasks)):
            writer.write_table(pq.read_table(_part_path(corpus, part)))
    os.replace(unfinished, folder / CLUSTERS)
    largest = sorted(entry for _, entries in parts for entry in entries)[:SAMPLES_PER_REASON]
    return {
        "count": sum(count for count, _ in parts),
        "largest": [{"id": id, "source": source, "documents": -size} for size, id, source in largest],
    }


def _bounds(corpus: Corpus, copies: np.ndarray) -> np.ndarray:
    """Cut the numbers of kept documents into ranges of about `_ROWS` documents with copies each."""
    bounds, load = [0], 0
    for start in range(0, corpus.size, CHUNK):
        here = np.asarray(copies[start : start + CHUNK], np.int64)
        total = load + np.cumsum(here + (here > 0))
        full = np.flatnonzero(np.diff(total // _ROWS, prepend=load // _ROWS))
        bounds += (start + full + 1).tolist()
        load = int(total[-1])
    return np.unique([*bounds, max(corpus.size, 1)])


def _spread_path(corpus: Corpus, shard: int) -> Path:
    return corpus.folder / f"clustered-{shard:06d}.arrow"


def _part_path(corpus: Corpus, part: int) -> Path:
    return corpus.folder / f"clusters-{part:05d}.parquet"


def _spread(task: _Task) -> None:
    """Hand the documents of a shard that have copies to the parts of the file that the kept ones are in."""
    corpus, shard = task.corpus, task.number
    kept, copies = np.array(corpus.known("kept", shard)), np.array(corpus.known("copies", shard))
    numbers = corpus.starts[shard] + np.arange(kept.size)
    rows = np.flatnonzero((copies > 0) | (kept != numbers))
    names = corpus.names(shard) if rows.size else corpus.names(shard).slice(0, 0)
    table = names.take(pa.array(rows))
    columns = {
        "keeper": kept[rows],
        "document": numbers[rows],
        "exact": np.array(corpus.known("exact", shard)[rows]),
        "jaccard": np.array(corpus.known("similarity", shard)[rows]),
    }
    for name, column in columns.items():
        table = table.append_column(name, pa.array(column))
    part = np.searchsorted(task.bounds, kept[rows], side="right") - 1
    write_parts(_spread_path(corpus, shard), table, part, task.bounds.size - 1)


def _write_part(task: _Task) -> tuple[int, list[tuple[int, str, str]]]:
    """Write one part of the file; how many clusters it has, and (minus size, id, source) of the largest."""
    corpus = task.corpus
    shards = range(len(corpus.shards))
    table = read_part([_spread_path(corpus, shard) for shard in shards], task.number) if corpus.shards else None
    if table is None or not table.num_rows:
        pq.write_table(CLUSTER_SCHEMA.empty_table(), _part_path(corpus, task.number))
        return 0, []
    documents, keepers = table["document"].to_numpy(), table["keeper"].to_numpy()
    at = np.searchsorted(documents, keepers)  # documents are in order: shard after shard
    columns = {
        "source": table["source"],
        "id": table["id"],
        "cluster": table["id"].take(pa.array(at)),
        "cluster_source": table["source"].take(pa.array(at)),
        "kept": documents == keepers,
        "exact": table["exact"],
        "jaccard": table["jaccard"],
    }
    pq.write_table(pa.table(columns, schema=CLUSTER_SCHEMA).sort_by(_ORDER), _part_path(corpus, task.number))
    places, sizes = np.unique(at, return_counts=True)
    entries = [
        (-int(size), table["id"][int(k)].as_py(), table["source"][int(k)].as_py()) for k, size in _most(places, sizes)
    ]
    return places.size, sorted(entries)[:SAMPLES_PER_REASON]


def _most(places: np.ndarray, sizes: np.ndarray) -> list[tuple[int, int]]:
    """The clusters at least as large as the fifth largest."""
    least = np.sort(sizes)[::-1][:SAMPLES_PER_REASON][-1]
    chosen = sizes >= least
    return list(zip(places[chosen].tolist(), sizes[chosen].tolist()))
