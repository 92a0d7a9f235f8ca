"""Removed near-duplicates beside the documents that were kept, with what differs marked."""

import difflib
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
        pairs = enumerate(zip(self.kept_text, self.removed_text))
        shorter = min(len(self.kept_text), len(self.removed_text))
        start = max(0, next((at for at, (one, other) in pairs if one != other), shorter) - BEFORE)
        if start:
            start = self.kept_text.rfind(" ", 0, start) + 1 or start
        return differences(*(_cut(text, start) for text in (self.kept_text, self.removed_text)))


def near_duplicates(dedup: Path, documents: Path) -> tuple[NearDuplicate, ...]:
    """The pairs least alike, which are those to judge a threshold by.

    Args:
        dedup: folder of that step, with `removed.parquet`.
        documents: folder of the step that it read.
    """
    files, found = document_files(documents), []
    if not (dedup / "removed.parquet").is_file() or sum(file.stat().st_size for file in files) > SEARCHED_BYTES:
        return ()
    try:
        removed = pq.read_table(dedup / "removed.parquet", filters=[("exact", "==", False)])
        pairs = removed.sort_by([(name, "ascending") for name in ("jaccard", "source", "id")]).slice(0, SHOWN)
        ids = {pair[key] for pair in pairs.to_pylist() for key in ("id", "duplicate_of")}
        if not files or not ids:
            return ()
        rows = ds.dataset(files).to_table(columns=["source", "id", "text"], filter=ds.field("id").isin(sorted(ids)))
        texts = {(row["source"], row["id"]): row["text"] for row in rows.to_pylist()}
        for pair in pairs.to_pylist():
            kept = texts.get((pair["duplicate_of_source"], pair["duplicate_of"]))
            text = texts.get((pair["source"], pair["id"]))
            if kept is not None and text is not None:
                found.append(NearDuplicate(pair["id"], text, pair["duplicate_of"], kept, pair["jaccard"]))
    except (pa.ArrowException, OSError, KeyError):
        return ()  # another version's columns, or a file that is gone: the report has no such section then
    return tuple(found)


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
