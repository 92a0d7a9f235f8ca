"""Documents at rest between the data steps, in Parquet files of bounded size, and the statistics of a step."""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from affinage.cluster.executor import Executor, clear_completions

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
SAMPLES_PER_REASON, SAMPLE_CHARACTERS = 5, 200  # of removed documents, in statistics
FILE_BYTES = 64_000_000  # of text: what one task of a parallel step works through
Verdict = tuple[str, str]  # the reason for which a document is removed, and details
Verdicts = dict[int, Verdict]  # by the row of a batch


def text_bytes(batch: pa.RecordBatch | pa.Table) -> int:
    """UTF-8 bytes of all texts in the batch."""
    return pc.sum(pc.binary_length(batch.column("text"))).as_py() or 0


class DocumentWriter(contextlib.AbstractContextManager["DocumentWriter"]):
    """Writes documents to `<stem>-00000.parquet`, `<stem>-00001.parquet`, ... in a folder, in the order given.

    Files of the same stem, which an earlier attempt left, go first. At most one row group (`ROW_GROUP_BYTES` of text,
    or one longer document) is held in memory. What is written is counted in `stats`. There is always one file.
    """

    def __init__(self, folder: Path, stem: str = "documents", stats: "Stats | None" = None) -> None:
        self._folder, self._stem, self._stats = folder, stem, stats or Stats()
        self._rows: list[dict[str, Any]] = []
        self._characters = self._files = 0  # of the rows; begun
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(f"{stem}-{'[0-9]' * 5}.parquet"):
            stale.unlink()
        self._open()

    def _open(self) -> None:
        path = self._folder / f"{self._stem}-{self._files:05d}.parquet"
        self._file = pq.ParquetWriter(path, SCHEMA, compression="zstd", compression_level=1, write_statistics=False)
        self._files, self._file_bytes = self._files + 1, 0  # of text

    def add(self, *, id: str, source: str, text: str, **facts: Any) -> None:
        """Append one document; `facts` are its other columns."""
        defaults = {"language": "", "url": "", "license": ""}
        self._rows.append(defaults | facts | {"id": id, "source": source, "text": text})
        self._characters += len(text)
        if self._characters >= ROW_GROUP_BYTES or len(self._rows) >= 50_000:
            self._flush_rows()

    def write(self, batch: pa.RecordBatch) -> None:
        """Append a batch of documents as a row group."""
        self._flush_rows()
        if batch.num_rows:
            if self._file_bytes >= FILE_BYTES:
                self._file.close()
                self._open()
            self._stats.leave(batch)
            self._file.write_table(pa.Table.from_batches([batch], SCHEMA), row_group_size=batch.num_rows)
            self._file_bytes += text_bytes(batch)

    def _flush_rows(self) -> None:
        if self._rows:
            rows, self._rows, self._characters = self._rows, [], 0
            self.write(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            self._flush_rows()
        self._file.close()


def document_files(folder: Path) -> list[Path]:
    """The document files of a folder and of its partitions, in the order of their documents."""
    return sorted(path for path in folder.rglob("*.parquet") if path.name not in REPORTS)


def first_documents(paths: Iterable[Path]) -> list[int]:
    """The number of the first document of every file among those of all files, and the number of all."""
    return list(accumulate((pq.read_metadata(path).num_rows for path in paths), initial=0))


def numbered_files(folder: Path) -> list[tuple[Path, int]]:
    """The document files of a folder, each with the number of its first document among those of all."""
    return list(zip(paths := document_files(folder), first_documents(paths)))


def read_documents(
    place: Path, columns: Sequence[str] | None = None, groups: Sequence[int] | None = None
) -> Iterator[pa.RecordBatch]:
    """Stream the documents of a folder or file, one row group (about 8 MB of text) at a time, or those in `groups`."""
    for path in document_files(place) if place.is_dir() else [place]:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups) if groups is None else groups:
                table = file.read_row_group(group, columns=columns, use_threads=False)
                yield from table.combine_chunks().to_batches()


# ---- statistics ----


@dataclass
class Stats:
    """Counts of documents and UTF-8 bytes through one task or step; `total` adds those of tasks up."""

    counts: Counter[str] = field(default_factory=Counter)  # documents and bytes read, and what else a step counts
    removed: Counter[str] = field(default_factory=Counter)
    documents: Counter[str] = field(default_factory=Counter)  # passed on, by source and language joined by a line feed
    bytes: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[dict[str, str]]] = field(default_factory=dict)  # of the removed, by reason
    notes: list[dict[str, Any]] = field(default_factory=list)  # what else a step writes down about the removed

    def entering(self, path: Path, first: int = 0) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The row groups of a document file, which are counted; with each the number of its `first` document."""
        for batch in read_documents(path):
            self.counts.update(documents=batch.num_rows, bytes=text_bytes(batch))
            yield first, batch
            first += batch.num_rows

    def remove(self, reason: str, *, id: str, source: str, text: str, detail: str = "") -> None:
        """Count one removed document, and keep it as a sample if there are few of its kind."""
        self.removed[reason] += 1
        samples = self.samples.setdefault(reason, [])
        if len(samples) < SAMPLES_PER_REASON:
            samples.append({"id": id, "source": source, "text": text[:SAMPLE_CHARACTERS], "detail": detail})

    def remove_rows(self, batch: pa.RecordBatch, verdicts: Verdicts) -> pa.RecordBatch:
        """Count the documents of a batch that have verdicts as removed; returns the batch without them."""
        for row, (reason, detail) in sorted(verdicts.items()):
            [facts] = batch.slice(row, 1).select(["id", "source", "text"]).to_pylist()
            self.remove(reason, detail=detail, **facts)
        return batch.filter(pa.array([row not in verdicts for row in range(batch.num_rows)], pa.bool_()))

    def leave(self, batch: pa.RecordBatch) -> None:
        """Count a batch of documents that is passed on."""
        both = pc.binary_join_element_wise(batch.column("source"), batch.column("language"), "\n")
        groups = pa.table({"key": both, "bytes": pc.binary_length(batch.column("text"))}).group_by("key")
        for row in groups.aggregate([("bytes", "count"), ("bytes", "sum")]).to_pylist():
            self.documents[row["key"]] += row["bytes_count"]
            self.bytes[row["key"]] += row["bytes_sum"]

    @classmethod
    def total(cls, parts: Iterable[dict[str, Any]]) -> "Stats":
        """The sum of the statistics of tasks, each as `vars` gives them, whose order decides which samples stay."""
        total = cls()
        for part in parts:
            for name in ("counts", "removed", "documents", "bytes"):
                getattr(total, name).update(part[name])
            for reason, samples in part["samples"].items():
                total.samples[reason] = (total.samples.get(reason, []) + samples)[:SAMPLES_PER_REASON]
            total.notes += part["notes"]
        return total

    def by(self, name: Callable[[str, str], str]) -> dict[str, dict[str, int]]:
        """Documents and bytes passed on, by a name made of source and language."""
        totals: dict[str, Counter[str]] = defaultdict(Counter)
        for key, documents in self.documents.items():
            totals[name(*key.split("\n"))].update(documents=documents, bytes=self.bytes[key])
        return dict(sorted(totals.items()))

    def summary(self) -> dict[str, Any]:
        """The JSON-able summary of the step."""
        return {
            "documents_in": self.counts["documents"],
            "documents_out": self.documents.total(),
            "bytes_in": self.counts["bytes"],
            "bytes_out": self.bytes.total(),
            "removed": dict(sorted(self.removed.items(), key=lambda item: (-item[1], item[0]))),
            "samples": self.samples,
            "by_language": self.by(lambda source, language: language),
            "by_source": self.by(lambda source, language: source),
        }


def copy_documents(
    source: Path, folder: Path, judge: Callable[[pa.RecordBatch, int, Stats], Verdicts], executor: Executor
) -> Stats:
    """Copy all documents without those that have verdicts to the same places in another folder.

    `judge` receives each batch, how many documents of all files come before it, and the statistics of the task for
    notes. Returns the statistics of all. An interrupted call resumes with the missing files.
    """

    def copy(task: tuple[Path, int]) -> dict[str, Any]:
        (path, first), stats = task, Stats()
        with DocumentWriter(folder / path.parent.relative_to(source), path.stem, stats) as writer:
            for number, batch in stats.entering(path, first):
                writer.write(stats.remove_rows(batch, judge(batch, number, stats)))
        return vars(stats)

    total = Stats.total(executor.map(copy, numbered_files(source), folder, threads=True, label="copying"))
    clear_completions(folder)
    return total
