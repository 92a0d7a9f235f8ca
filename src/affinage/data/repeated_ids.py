"""Ids that occur more than once in a source: lineage and the split need them to be one document's."""

import os
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from affinage.data.documents import document_files, row_groups
from affinage.data.finished import Finished
from affinage.data.order import document_keys, document_name, shuffle_keys

_TASK = "renamed"
_PURPOSE = "identity"  # of the keys by which ids are compared
_SAMPLES = 5

_Plan = dict[str, dict[str, str]]  # file: row: new id


def rename_repeated(folder: Path) -> dict[str, Any]:
    """Give the second and every later document of an id the id `<id>@2`, `<id>@3`, ... and count them by source.

    The names follow the order of the documents; one that another document has is passed over. Memory is 8 bytes a
    document, and the names of the repeated ones. A call that was interrupted is finished by the next, if its notes are
    still there.
    """
    finished = Finished(folder)
    plan = finished.get(_TASK) or _plan(folder)
    if plan["files"]:
        finished.put(_TASK, plan)
        for name, ids in plan["files"].items():
            _rename(folder / name, {int(row): id for row, id in ids.items()})
    return {key: plan[key] for key in ("documents", "by_source", "samples")}


def _plan(folder: Path) -> dict[str, Any]:
    batches = [(path, group) for path in document_files(folder) for group in row_groups(path)]
    keys = [document_keys(group.read(["id", "source"]), 0, _PURPOSE) for _, group in batches]
    empty: dict[str, Any] = {"documents": 0, "by_source": {}, "samples": [], "files": {}}
    if not keys:
        return empty
    found, counts = np.unique(np.concatenate(keys), return_counts=True)
    repeated = found[counts > 1]
    if not repeated.size:
        return empty
    files: _Plan = defaultdict(dict)
    seen: Counter[tuple[str, str]] = Counter()
    rows: Counter[Path] = Counter()
    sources: Counter[str] = Counter()
    samples: list[str] = []
    for (path, group), group_keys in zip(batches, keys):
        batch = group.read(["id", "source"])
        for row in np.flatnonzero(np.isin(group_keys, repeated)).tolist():
            id, source = (batch.column(name)[row].as_py() for name in ("id", "source"))
            seen[source, id] += 1
            if seen[source, id] > 1:
                while _is_taken(new := f"{id}@{seen[source, id]}", source, found):
                    seen[source, id] += 1
                files[path.name][str(rows[path] + row)] = new
                sources[source] += 1
                if len(samples) < _SAMPLES and id not in samples:
                    samples.append(id)
        rows[path] += group.rows
    return {"documents": sources.total(), "by_source": dict(sources), "samples": samples, "files": dict(files)}


def _is_taken(id: str, source: str, keys: np.ndarray) -> bool:
    """Whether a document has this id; `keys` are those of all documents, ascending."""
    key = shuffle_keys([document_name(source, id)], 0, _PURPOSE)[0]
    place = int(np.searchsorted(keys, key))
    return place < keys.size and bool(keys[place] == key)


def _rename(path: Path, ids: dict[int, str]) -> None:
    """Write a document file anew with other ids in some rows; done twice, it is the same."""
    renamed = path.with_suffix(".parquet.renamed")
    first = 0
    with pq.ParquetWriter(renamed, pq.read_schema(path), compression="zstd", compression_level=1) as file:
        for group in row_groups(path):
            batch = group.read()
            column = batch.column("id").to_pylist()
            for row in range(group.rows):
                column[row] = ids.get(first + row, column[row])
            place = batch.schema.get_field_index("id")
            file.write_batch(batch.set_column(place, "id", pa.array(column, pa.string())), row_group_size=group.rows)
            first += group.rows
    os.replace(renamed, path)
