"""Stage `deduplicate`: of documents that are copies of each other one stays, and the clusters can be looked at."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from affinage.data.documents import (
    DocumentWriter,
    RowGroup,
    clear_documents,
    document_files,
    row_groups,
    text_bytes,
)
from affinage.data.duplicates import Duplicates, find_duplicates
from affinage.data.funnel import SAMPLE_CHARACTERS, SAMPLES_PER_REASON, Funnel
from affinage.data.tasks import Progress, run_in_threads
from affinage.recipe.data import DeduplicateSettings

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


@dataclass(frozen=True)
class _StoredTexts:
    """A row group, as `find_duplicates` reads it."""

    group: RowGroup

    @property
    def rows(self) -> int:
        return self.group.rows

    def text(self) -> pa.Array:
        return self.group.read(["text"]).column("text")


def deduplicate(
    documents_folder: Path,
    folder: Path,
    settings: DeduplicateSettings,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Copy the documents without duplicates to `folder`, write `clusters/clusters.parquet`, and return the summary.

    Which of several copies stays, and why the result depends on neither workers nor file order, is told at
    `duplicates.find_duplicates`. Removed documents are counted as `exact duplicate` or `near duplicate`, the samples
    say of what and how near; the summary also has `clusters`: how many, the largest, and `candidates`, `compared`,
    `capped` (see `duplicates.Duplicates`).
    """
    start = time.perf_counter()
    folder = Path(folder)
    clear_documents(folder)
    groups = [group for path in document_files(documents_folder) for group in row_groups(path)]
    names = _names(groups)
    found = find_duplicates([_StoredTexts(group) for group in groups], names, settings, workers)
    if progress is not None:
        progress(0.5)
    bounds = np.concatenate([[0], np.cumsum([group.rows for group in groups], dtype=np.int64)])

    def copy(path: Path) -> Funnel:
        return _copy_kept(path, folder, [(g, at) for g, at in zip(groups, bounds) if g.path == path], found, names)

    total = Funnel()
    for funnel in run_in_threads(copy, document_files(documents_folder), workers=workers):
        total.merge(funnel)
    clusters = _write_clusters(folder / "clusters", found, names)
    return total.summary(time.perf_counter() - start) | {
        "clusters": clusters,
        "candidates": found.candidates,
        "compared": found.compared,
        "capped": found.capped,
    }


def _names(groups: list[RowGroup]) -> pa.Table:
    schema = pa.schema([("id", pa.string()), ("source", pa.string())])
    return pa.Table.from_batches([group.read(["id", "source"]).select(["id", "source"]) for group in groups], schema)


def _copy_kept(
    path: Path, folder: Path, groups: list[tuple[RowGroup, int]], found: Duplicates, names: pa.Table
) -> Funnel:
    funnel = Funnel()
    with DocumentWriter(folder, path.stem, observe=funnel.leave) as writer:
        for group, at in groups:
            batch = group.read()
            funnel.enter(batch.num_rows, text_bytes(batch))
            here = np.arange(at, at + group.rows)
            stays = found.kept[here] == here
            for row in np.flatnonzero(~stays).tolist():
                _count_removed(funnel, batch, row, int(at) + row, found, names)
            writer.write(batch.filter(pa.array(stays)))
    return funnel


def _count_removed(
    funnel: Funnel, batch: pa.RecordBatch, row: int, document: int, found: Duplicates, names: pa.Table
) -> None:
    reason = "exact duplicate" if found.exact[document] else "near duplicate"
    if len(funnel.samples.get(reason, ())) == SAMPLES_PER_REASON:
        funnel.removed[reason] += 1
        return
    original = int(found.kept[document])
    detail = f"Jaccard {found.similarity[document]:.3f} to {names['id'][original]} of {names['source'][original]}"
    id, source, text = (batch.column(name)[row].as_py() for name in ("id", "source", "text"))
    funnel.remove(reason, id=id, source=source, text=text[:SAMPLE_CHARACTERS], detail=detail)


def _write_clusters(folder: Path, found: Duplicates, names: pa.Table) -> dict[str, Any]:
    """Write all documents that have a copy, cluster by cluster, the kept one first; the number and the largest."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = np.arange(found.kept.size)
    originals, members = np.unique(found.kept[found.kept != documents], return_counts=True)
    copies = np.flatnonzero(found.kept != documents)
    rows = np.concatenate([originals, copies])
    keepers = found.kept[rows]
    table = pa.table(
        {
            "source": names["source"].take(rows),
            "id": names["id"].take(rows),
            "cluster": names["id"].take(keepers),
            "cluster_source": names["source"].take(keepers),
            "kept": keepers == rows,
            "exact": found.exact[rows],
            "jaccard": found.similarity[rows],
        },
        schema=CLUSTER_SCHEMA,
    )
    order = ["cluster_source", "cluster", "kept", "jaccard", "source", "id"]
    directions = {"jaccard": "descending", "kept": "descending"}
    table = table.sort_by([(column, directions.get(column, "ascending")) for column in order])
    unfinished = folder / f"{CLUSTERS}.part"
    pq.write_table(table, unfinished, compression="zstd")
    os.replace(unfinished, folder / CLUSTERS)
    sizes = dict(zip(originals.tolist(), (members + 1).tolist()))
    ranked = sorted((-size, names["id"][i].as_py(), names["source"][i].as_py()) for i, size in _largest(sizes))
    return {
        "count": len(sizes),
        "largest": [
            {"id": id, "source": source, "documents": -size} for size, id, source in ranked[:SAMPLES_PER_REASON]
        ],
    }


def _largest(sizes: dict[int, int]) -> list[tuple[int, int]]:
    """The clusters at least as large as the fifth largest."""
    least = sorted(sizes.values(), reverse=True)[:SAMPLES_PER_REASON][-1:]
    return [(original, size) for original, size in sizes.items() if size >= least[0]]
