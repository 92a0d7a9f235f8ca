"""Removed near-duplicates beside the documents that were kept, with what differs marked."""

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from affinage.data.documents import document_files

SHOWN = 6  # pairs
SEARCHED_BYTES = 2e9  # of Parquet; a larger corpus would keep a reader waiting for a handful of examples
BEFORE, LENGTH = 140, 460  # characters shown before the first difference, and in all
Piece = tuple[str, bool]  # text, whether the other side lacks it


@dataclass(frozen=True)
class NearDuplicate:
    """A removed document and the one kept in its place; `similarity` is Jaccard's."""

    removed_id: str
    removed_text: str
    kept_id: str
    kept_text: str
    similarity: float

    @property
    def pieces(self) -> tuple[list[Piece], list[Piece]]:
        """The parts of both texts, kept and removed, around their first difference."""
        start = max(0, len(os.path.commonprefix([self.kept_text, self.removed_text])) - BEFORE)  # noqa: RUF071
        start = self.kept_text.rfind(" ", 0, start) + 1 or start
        return differences(*(_cut(text, start) for text in (self.kept_text, self.removed_text)))


def near_duplicates(dedup: Path, documents: Path) -> tuple[NearDuplicate, ...]:
    """The pairs that are least alike, by which to judge a threshold.

    `dedup` is the folder of that step, with `removed.parquet`, and `documents` that of the step that it read.
    """
    files = document_files(documents)
    if not (dedup / "removed.parquet").is_file() or sum(file.stat().st_size for file in files) > SEARCHED_BYTES:
        return ()
    try:
        removed = pq.read_table(dedup / "removed.parquet", filters=[("exact", "==", False)])
        table = removed.sort_by([(name, "ascending") for name in ("jaccard", "source", "id")]).slice(0, SHOWN)
        pairs = table.to_pylist()
        wanted = ds.field("id").isin(sorted({pair[key] for pair in pairs for key in ("id", "duplicate_of")}))
        rows = ds.dataset(files).to_table(columns=["source", "id", "text"], filter=wanted).to_pylist() if pairs else []
        texts = {(row["source"], row["id"]): row["text"] for row in rows}
        return tuple(
            NearDuplicate(
                pair["id"],
                texts[pair["source"], pair["id"]],
                pair["duplicate_of"],
                texts[pair["duplicate_of_source"], pair["duplicate_of"]],
                pair["jaccard"],
            )
            for pair in pairs
        )
    except (pa.ArrowException, OSError, KeyError):
        return ()  # another version's columns, or a file that is gone: the report has no such section then


def _cut(text: str, start: int) -> str:
    return ("… " if start else "") + text[start : start + LENGTH] + (" …" if len(text) > start + LENGTH else "")


def differences(left: str, right: str) -> tuple[list[Piece], list[Piece]]:
    """Both texts cut into pieces, each marked as shared or as only on its side."""
    words_left, words_right = (re.findall(r"\s+|\w+|[^\w\s]", text) for text in (left, right))
    pieces: tuple[list[Piece], list[Piece]] = ([], [])
    matcher = difflib.SequenceMatcher(None, words_left, words_right, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        for side, words in zip(pieces, (words_left[i1:i2], words_right[j1:j2])):
            if words:
                side.append(("".join(words), tag != "equal"))
    return pieces
