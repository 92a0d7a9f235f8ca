"""Near-duplicate documents beside those that were kept, looked up in what the data stages left."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from affinage.data.documents import document_files

SHOWN = 6  # pairs
SEARCHED_BYTES = 2e9  # of Parquet; a larger corpus would keep a reader waiting for a handful of examples


@dataclass(frozen=True)
class NearDuplicate:
    """A removed document and the one kept in its place; `similarity` is Jaccard's."""

    removed_id: str
    removed_text: str
    kept_id: str
    kept_text: str
    similarity: float


def near_duplicates(deduplicated: Path, cleaned: Path) -> tuple[NearDuplicate, ...]:
    """The pairs least alike, which are those to judge a threshold by.

    Args:
        deduplicated: folder of that stage, with `removed.parquet`.
        cleaned: folder of the documents that it read.
    """
    removed = deduplicated / "removed.parquet"
    files = document_files(cleaned)
    if not removed.is_file() or sum(file.stat().st_size for file in files) > SEARCHED_BYTES:
        return ()
    try:
        pairs = _least_alike(removed)
        texts = _texts(files, {key for pair in pairs for key in (_removed(pair), _kept(pair))})
    except (pa.ArrowException, OSError, KeyError):
        return ()  # another version's columns, or a file that is gone: the report has no such section then
    return tuple(
        NearDuplicate(pair["id"], texts[_removed(pair)], pair["duplicate_of"], texts[_kept(pair)], pair["jaccard"])
        for pair in pairs
        if _removed(pair) in texts and _kept(pair) in texts
    )


def _least_alike(removed: Path) -> list[dict[str, Any]]:
    table = pq.read_table(removed, filters=[("exact", "==", False)])
    order = [(name, "ascending") for name in ("jaccard", "source", "id")]
    return table.sort_by(order).slice(0, SHOWN).to_pylist()


def _removed(pair: dict[str, Any]) -> tuple[str, str]:
    return pair["source"], pair["id"]


def _kept(pair: dict[str, Any]) -> tuple[str, str]:
    return pair["duplicate_of_source"], pair["duplicate_of"]


def _texts(files: list[Path], wanted: set[tuple[str, str]]) -> dict[tuple[str, str], str]:
    if not files or not wanted:
        return {}
    condition = ds.field("id").isin(sorted({id for _, id in wanted}))
    rows = ds.dataset(files).to_table(columns=["source", "id", "text"], filter=condition).to_pylist()
    return {(row["source"], row["id"]): row["text"] for row in rows}
