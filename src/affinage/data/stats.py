"""The statistics of a data step: what it read, what it removed and why, and what it passed on."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from affinage.data.documents import DocumentWriter, clear_documents, row_groups, text_bytes

SAMPLES_PER_REASON = 5
SAMPLE_CHARACTERS = 200


@dataclass
class Stats:
    """Counts of documents and UTF-8 bytes through one task or step; those of tasks add up with `merge`."""

    documents_in: int = 0
    bytes_in: int = 0
    documents_out: int = 0
    bytes_out: int = 0
    removed: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    documents: Counter[str] = field(default_factory=Counter)  # passed on, by source and language joined by a line feed
    bytes: Counter[str] = field(default_factory=Counter)

    def enter(self, documents: int, bytes: int) -> None:
        """Count documents that the step reads."""
        self.documents_in += documents
        self.bytes_in += bytes

    def remove(self, reason: str, *, id: str, source: str, text: str, detail: str = "") -> None:
        """Count one removed document, and keep it as a sample if there are few of its kind."""
        self.removed[reason] += 1
        samples = self.samples.setdefault(reason, [])
        if len(samples) < SAMPLES_PER_REASON:
            samples.append({"id": id, "source": source, "text": text[:SAMPLE_CHARACTERS], "detail": detail})

    def remove_rows(self, batch: pa.RecordBatch, verdicts: dict[int, tuple[str, str]]) -> pa.RecordBatch:
        """Count the documents of `verdicts`, {row: (reason, detail)}, as removed; returns the batch without them."""
        for row, (reason, detail) in sorted(verdicts.items()):
            facts = {name: batch.column(name)[row].as_py() for name in ("id", "source", "text")}
            self.remove(reason, detail=detail, **facts)
        return batch.filter(pa.array([row not in verdicts for row in range(batch.num_rows)], pa.bool_()))

    def leave(self, batch: pa.RecordBatch) -> None:
        """Count a batch of documents that is passed on."""
        self.documents_out += batch.num_rows
        self.bytes_out += text_bytes(batch)
        both = pc.binary_join_element_wise(batch.column("source"), batch.column("language"), "\n")
        groups = pa.table({"key": both, "bytes": pc.binary_length(batch.column("text"))}).group_by("key")
        for row in groups.aggregate([("bytes", "count"), ("bytes", "sum")]).to_pylist():
            self.documents[row["key"]] += row["bytes_count"]
            self.bytes[row["key"]] += row["bytes_sum"]

    def merge(self, other: dict[str, Any]) -> None:
        """Add the counts of another task, as `to_json` gives them; merging in order keeps the samples the same."""
        for name in ("documents_in", "bytes_in", "documents_out", "bytes_out"):
            setattr(self, name, getattr(self, name) + other[name])
        for name in ("removed", "documents", "bytes"):
            getattr(self, name).update(other[name])
        for reason, samples in other["samples"].items():
            mine = self.samples.setdefault(reason, [])
            mine.extend(samples[: SAMPLES_PER_REASON - len(mine)])

    def to_json(self) -> dict[str, Any]:
        """All counts as `merge` takes them."""
        return dict(vars(self))

    def by(self, name: Callable[[str, str], str]) -> dict[str, dict[str, int]]:
        """Documents and bytes passed on, by a name made of source and language."""
        totals: dict[str, dict[str, int]] = {}
        for key in sorted(self.documents, key=lambda key: name(*key.split("\n"))):
            total = totals.setdefault(name(*key.split("\n")), {"documents": 0, "bytes": 0})
            total["documents"] += self.documents[key]
            total["bytes"] += self.bytes[key]
        return totals

    def summary(self, seconds: float) -> dict[str, Any]:
        """The JSON-able summary of the step."""
        names = ("documents_in", "documents_out", "bytes_in", "bytes_out")
        return {name: getattr(self, name) for name in names} | {
            "removed": dict(sorted(self.removed.items(), key=lambda item: (-item[1], item[0]))),
            "samples": self.samples,
            "by_language": self.by(lambda source, language: language),
            "by_source": self.by(lambda source, language: source),
            "seconds": round(seconds, 3),
        }


def copy_documents(
    path: Path, folder: Path, stats: Stats, change: Callable[[pa.RecordBatch, int], pa.RecordBatch]
) -> None:
    """Copy one document file to a folder, counted in `stats`, as `change` returns each batch of it.

    `change` also receives how many documents of the file come before the batch.
    """
    clear_documents(folder, path.stem)
    before = 0
    with DocumentWriter(folder, path.stem, observe=stats.leave) as writer:
        for group in row_groups(path):
            batch = group.read()
            stats.enter(batch.num_rows, text_bytes(batch))
            writer.write(change(batch, before))
            before += batch.num_rows
