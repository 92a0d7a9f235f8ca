"""What a data stage was given, what it removed and why, and what it passed on: the facts a report shows."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from affinage.data.documents import text_bytes

SAMPLES_PER_REASON = 5
SAMPLE_CHARACTERS = 200


@dataclass
class Funnel:
    """Counts of documents and UTF-8 bytes through one stage; those of parts of the work add up with `merge`."""

    documents_in: int = 0
    bytes_in: int = 0
    documents_out: int = 0
    bytes_out: int = 0
    removed: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    by_language: dict[str, list[int]] = field(default_factory=dict)  # [documents, bytes] passed on
    by_source: dict[str, list[int]] = field(default_factory=dict)
    by_both: dict[str, list[int]] = field(default_factory=dict)  # key: <source>.<language>

    def enter(self, documents: int, bytes: int) -> None:
        """Count what the stage was given."""
        self.documents_in += documents
        self.bytes_in += bytes

    def remove(self, reason: str, *, id: str, source: str, text: str, detail: str = "") -> None:
        """Count one removed document, and keep it as a sample if there are few of its kind."""
        self.removed[reason] += 1
        kept = self.samples.setdefault(reason, [])
        if len(kept) < SAMPLES_PER_REASON:
            kept.append({"id": id, "source": source, "text": text[:SAMPLE_CHARACTERS], "detail": detail})

    def leave(self, batch: pa.RecordBatch) -> None:
        """Count a batch of documents that is passed on."""
        self.documents_out += batch.num_rows
        self.bytes_out += text_bytes(batch)
        sizes = pc.binary_length(batch.column("text"))
        language, source = batch.column("language"), batch.column("source")
        both = pc.binary_join_element_wise(source, language, ".")
        for keys, totals in ((language, self.by_language), (source, self.by_source), (both, self.by_both)):
            groups = pa.table({"key": keys, "bytes": sizes}).group_by("key")
            for row in groups.aggregate([("bytes", "count"), ("bytes", "sum")]).to_pylist():
                total = totals.setdefault(row["key"], [0, 0])
                total[0] += row["bytes_count"]
                total[1] += row["bytes_sum"]

    def merge(self, other: "Funnel") -> None:
        """Add the counts of another part of the work; merging in document order keeps the samples the same."""
        self.documents_in += other.documents_in
        self.bytes_in += other.bytes_in
        self.documents_out += other.documents_out
        self.bytes_out += other.bytes_out
        self.removed.update(other.removed)
        for reason, samples in other.samples.items():
            kept = self.samples.setdefault(reason, [])
            kept.extend(samples[: SAMPLES_PER_REASON - len(kept)])
        for mine, theirs in (
            (self.by_language, other.by_language),
            (self.by_source, other.by_source),
            (self.by_both, other.by_both),
        ):
            for key, (documents, bytes) in theirs.items():
                total = mine.setdefault(key, [0, 0])
                total[0] += documents
                total[1] += bytes

    def to_json(self) -> dict[str, Any]:
        """All counts, to be read by `from_json`."""
        return dict(vars(self))

    @staticmethod
    def from_json(value: dict[str, Any]) -> "Funnel":
        """What `to_json` wrote."""
        return Funnel(**value | {"removed": Counter(value["removed"])})

    def by_group(self) -> dict[str, dict[str, int]]:
        """Documents and bytes passed on, by `<source>.<language>`."""
        return _named(self.by_both)

    def summary(self, seconds: float) -> dict[str, Any]:
        """The JSON-able summary of the stage."""
        return {
            "documents_in": self.documents_in,
            "documents_out": self.documents_out,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "removed": dict(sorted(self.removed.items(), key=lambda item: (-item[1], item[0]))),
            "samples": self.samples,
            "by_language": _named(self.by_language),
            "by_source": _named(self.by_source),
            "seconds": round(seconds, 3),
        }


def _named(totals: dict[str, list[int]]) -> dict[str, dict[str, int]]:
    return {key: {"documents": documents, "bytes": bytes} for key, (documents, bytes) in sorted(totals.items())}
