"""Rows of Parquet tables that others wrote, whatever bytes are in their texts."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa


def rows_of_batch(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
    """The rows as objects; one with a text that is not UTF-8, which Parquet does not forbid, as the error."""
    try:
        yield from batch.to_pylist()
        return
    except UnicodeDecodeError:
        pass  # nothing has been given yet
    for number in range(batch.num_rows):
        try:
            yield from batch.slice(number, 1).to_pylist()
        except UnicodeDecodeError as error:
            yield error
