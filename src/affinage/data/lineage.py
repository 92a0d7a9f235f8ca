"""Which document every token of every row comes from."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from affinage.data.packing import Layout

DOCUMENTS = "documents.parquet"  # in every folder of rows
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("url", pa.string()),
        ("row", pa.int64()),
        ("start", pa.int32()),  # tokens [start, stop) of the row ...
        ("stop", pa.int32()),
        ("offset", pa.int64()),  # ... are the document's, <s> included, from this one on
    ]
)
_SPANS_PER_TABLE = 65_536


def spans(layout: Layout, names: pa.Table) -> Iterator[pa.Table]:
    """Lines of documents.parquet, one for each piece of a document, sorted by row; `names` has id, source, url."""
    for first in range(0, len(layout.row), _SPANS_PER_TABLE):
        piece = slice(first, first + _SPANS_PER_TABLE)
        table = names.take(pa.array(layout.document[piece]))
        start = layout.start[piece]
        columns = {"row": layout.row[piece], "start": start, "stop": start + layout.length[piece]}
        for name, column in (columns | {"offset": layout.offset[piece]}).items():
            table = table.append_column(name, pa.array(column))
        yield table.cast(SCHEMA)


def write_lineage(path: Path, tables: Iterable[pa.Table]) -> None:
    """Write documents.parquet from tables with the columns of `SCHEMA`."""
    partial = path.with_name(path.name + ".partial")
    with pq.ParquetWriter(partial, SCHEMA, compression="zstd") as writer:
        for table in tables:
            writer.write_table(table)
    os.replace(partial, path)


def spans_of_rows(folder: Path, rows: Iterable[int]) -> dict[int, list[dict[str, Any]]]:
    """What lies in rows of a folder: for each of them its lines of documents.parquet, from left to right."""
    wanted = sorted(set(rows))
    table = pq.read_table(folder / DOCUMENTS, filters=[("row", "in", wanted)])
    found: dict[int, list[dict[str, Any]]] = {row: [] for row in wanted}
    for span in table.sort_by([("row", "ascending"), ("start", "ascending")]).to_pylist():
        found[span["row"]].append(span)
    return found


def spans_of_document(folder: Path, id: str, source: str) -> pa.Table:
    """The lines of documents.parquet of one document of a folder."""
    return pq.read_table(folder / DOCUMENTS, filters=[("id", "==", id), ("source", "==", source)])
