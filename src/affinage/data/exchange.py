"""Tables handed from tasks over the input to tasks over the output: every file holds a piece for each part."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa


def write_parts(path: Path, table: pa.Table, part: np.ndarray, parts: int) -> None:
    """Write the rows of `table` to one Arrow file, as one batch for each of the `parts`.

    `part` int64 [rows] says to which each row goes; rows of a part stay in their order.
    """
    if (np.diff(part) < 0).any():
        order = np.argsort(part, kind="stable")
        part, table = part[order], table.take(pa.array(order))
    cuts = np.searchsorted(part, np.arange(parts + 1))
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        for start, stop in zip(cuts[:-1].tolist(), cuts[1:].tolist()):
            piece = table.slice(start, stop - start).combine_chunks()
            batches = piece.to_batches()
            writer.write_batch(batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema))


def read_part(paths: Iterable[Path], part: int) -> pa.Table:
    """The rows of one part from all files, file after file."""
    batches = []
    for path in paths:
        with pa.OSFile(str(path), "rb") as source:
            batches.append(pa.ipc.open_file(source).get_batch(part))
    return pa.Table.from_batches(batches)
