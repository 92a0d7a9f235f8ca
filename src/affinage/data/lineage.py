"""Which document every token of every row comes from."""

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Integer

_ORIGIN = (("id", pa.string()), ("source", pa.string()), ("url", pa.string()))
SCHEMA = pa.schema([*_ORIGIN, ("row", pa.int64()), ("start", pa.int32()), ("stop", pa.int32())])


def spans_table(
    origins: pa.Table,
    document: Integer[np.ndarray, " spans"],
    row: Integer[np.ndarray, " spans"],
    start: Integer[np.ndarray, " spans"],
    stop: Integer[np.ndarray, " spans"],
) -> pa.Table:
    """Lines of documents.parquet: tokens [start, stop) of `row` are of `document`, a line of `origins`."""
    table = origins.take(pa.array(document))
    for name, column in (("row", row), ("start", start), ("stop", stop)):
        table = table.append_column(name, pa.array(column))
    return table.cast(SCHEMA)


def write_lineage(path: Path, tables: Iterable[pa.Table]) -> None:
    """Write documents.parquet from tables with the columns of `SCHEMA`."""
    partial = path.with_name(path.name + ".partial")
    with pq.ParquetWriter(partial, SCHEMA, compression="zstd") as writer:
        for table in tables:
            writer.write_table(table)
    os.replace(partial, path)
