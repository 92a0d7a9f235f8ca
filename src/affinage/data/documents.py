"""Documents at rest between the data steps: Parquet files of bounded size, written whole or not at all."""

import contextlib
import os
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

SCHEMA = pa.schema(
    [
        ("id", pa.string()),  # the user's, or made from the place in the file
        ("source", pa.string()),
        ("language", pa.string()),  # ISO 639-1, or code; "" unknown; "en?" claimed by the record, for filter to check
        ("language_score", pa.float32()),  # probability by language id; 1 where the source is trusted; null: unknown
        ("url", pa.string()),
        ("license", pa.string()),
        ("text", pa.string()),
    ]
)
REPORTS = ("removed.parquet", "matches.parquet")  # beside the documents of a step
ROW_GROUP_BYTES = 8_000_000  # of text: what one task holds in memory
FILE_BYTES = 64_000_000  # of text: what one task of a parallel step works through


def text_bytes(batch: pa.RecordBatch | pa.Table) -> int:
    """UTF-8 bytes of all texts in the batch."""
    return pc.sum(pc.binary_length(batch.column("text"))).as_py() or 0


class DocumentWriter(contextlib.AbstractContextManager["DocumentWriter"]):
    """Writes documents to `<stem>-00000.parquet`, `<stem>-00001.parquet`, ... in a folder, in the order given.

    A file gets its name only when it is complete; after an exception no unfinished file remains. Use it as a context
    manager. At most one row group (`ROW_GROUP_BYTES` of text, or one longer document) is held in memory. `observe`
    receives every batch that is written. Without documents, one file without rows is written.
    """

    def __init__(
        self, folder: Path, stem: str = "documents", *, observe: Callable[[pa.RecordBatch], None] = lambda batch: None
    ) -> None:
        self.files: list[Path] = []
        self._folder, self._stem, self._observe = Path(folder), stem, observe
        self._folder.mkdir(parents=True, exist_ok=True)
        self._rows: list[dict[str, Any]] = []
        self._characters = 0  # of the rows
        self._batches: list[pa.RecordBatch] = []
        self._batches_bytes, self._file_bytes = 0, 0
        self._file: pq.ParquetWriter | None = None

    def add(self, *, id: str, source: str, text: str, **facts: Any) -> None:
        """Append one document; `facts` are its other columns."""
        defaults = {"language": "", "url": "", "license": ""}
        self._rows.append(defaults | facts | {"id": id, "source": source, "text": text})
        self._characters += len(text)
        if self._characters >= ROW_GROUP_BYTES or len(self._rows) >= 50_000:
            self._flush_rows()

    def write(self, batch: pa.RecordBatch) -> None:
        """Append a batch of documents."""
        self._flush_rows()
        if batch.num_rows:
            self._observe(batch)
            self._batches.append(batch)
            self._batches_bytes += text_bytes(batch)
            if self._batches_bytes >= ROW_GROUP_BYTES:
                self._write_row_group()

    def _flush_rows(self) -> None:
        if self._rows:
            rows, self._rows, self._characters = self._rows, [], 0
            self.write(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))

    def _write_row_group(self) -> None:
        if self._file is None:
            place = self._folder / f"{self._stem}-{len(self.files):05d}.parquet"
            options = {"compression": "zstd", "compression_level": 1, "write_statistics": False}
            self._file = pq.ParquetWriter(place.with_suffix(".parquet.part"), SCHEMA, **options)
            self.files.append(place)
        if self._batches:
            table = pa.Table.from_batches(self._batches, SCHEMA)
            self._file.write_table(table, row_group_size=table.num_rows)
            self._file_bytes += self._batches_bytes
            self._batches, self._batches_bytes = [], 0
        if self._file_bytes >= FILE_BYTES:
            self._finish_file()

    def _finish_file(self) -> None:
        if self._file is not None:
            self._file.close()
            os.replace(self.files[-1].with_suffix(".parquet.part"), self.files[-1])
            self._file, self._file_bytes = None, 0

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            self._flush_rows()
            if self._batches or not self.files:
                self._write_row_group()
            self._finish_file()
        elif self._file is not None:
            self._file.close()
            self.files[-1].with_suffix(".parquet.part").unlink(missing_ok=True)


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table as Parquet to `path`, or nothing."""
    part = path.with_name(f"{path.name}.part")
    pq.write_table(table, part, compression="zstd")
    os.replace(part, path)


def document_files(folder: Path) -> list[Path]:
    """The finished document files of a folder and of its partitions, in the order of their documents."""
    return sorted(path for path in Path(folder).rglob("*.parquet") if path.name not in REPORTS)


def clear_documents(folder: Path, stem: str = "", kept: Container[Path] = ()) -> None:
    """Remove what an earlier or interrupted attempt left in a folder and its partitions, but the files in `kept`.

    With `stem`, only what writers with this stem left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{stem}-" + "[0-9]" * 5 if stem else "*"
    for stale in [*folder.rglob(f"{name}.parquet"), *folder.rglob(f"{name}.parquet.part")]:
        if stale not in kept:
            stale.unlink()


@dataclass(frozen=True)
class RowGroup:
    """A part of a document file that is read at once: the unit in which steps read."""

    path: Path
    index: int
    rows: int

    def read(self, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """The documents of this row group as one batch."""
        table = pq.ParquetFile(self.path).read_row_group(self.index, columns=columns, use_threads=False)
        return table.combine_chunks().to_batches()[0]


def row_groups(path: Path) -> list[RowGroup]:
    """The row groups of one document file that hold documents."""
    metadata = pq.read_metadata(path)
    sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    return [RowGroup(path, i, rows) for i, rows in enumerate(sizes) if rows]


def read_documents(folder: Path, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Stream the documents of a folder in order, one row group (about 8 MB of text) at a time."""
    for path in document_files(folder):
        for group in row_groups(path):
            yield group.read(columns)
