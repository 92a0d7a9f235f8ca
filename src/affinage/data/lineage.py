"""Which document every token comes from, and where a text occurs: from a step to its documents, and back."""

import os
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from affinage.data.documents import read_documents
from affinage.data.packing import Layout

if TYPE_CHECKING:
    from affinage.data.token_shards import TokenShards
    from affinage.data.tokenizer import Tokenizer

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("url", pa.string()),
        ("row", pa.int64()),  # of the shard
        ("start", pa.int32()),  # tokens [start, stop) of the row ...
        ("stop", pa.int32()),
        ("offset", pa.int64()),  # ... are the document's, <s> included, from this one on
    ]
)
_SPANS_PER_TABLE = 65_536
_APOSTROPHES = "'\u2019\u02bc"
_SPECIAL = frozenset(r"\.^$*+?{}[]|()")


def spans(layout: Layout, names: pa.Table) -> Iterator[pa.Table]:
    """Return the lines of a shard's documents, one for each piece, sorted by row; `names` has id, source, url."""
    for first in range(0, len(layout.row), _SPANS_PER_TABLE):
        piece = slice(first, first + _SPANS_PER_TABLE)
        table = names.take(pa.array(layout.document[piece]))
        start = layout.start[piece]
        columns = {"row": layout.row[piece], "start": start, "stop": start + layout.length[piece]}
        for name, column in (columns | {"offset": layout.offset[piece]}).items():
            table = table.append_column(name, pa.array(column))
        yield table.cast(SCHEMA)


def write_lineage(path: Path, tables: Iterable[pa.Table]) -> None:
    """Write documents-….parquet from tables with the columns of `SCHEMA`, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    with pq.ParquetWriter(partial, SCHEMA, compression="zstd") as writer:
        for table in tables:
            writer.write_table(table)
    os.replace(partial, path)


def spans_of_rows(shards: "TokenShards", rows: Iterable[int]) -> dict[int, list[dict[str, Any]]]:
    """Return what lies in rows of a folder: for each of them its pieces of documents, from left to right."""
    found: dict[int, list[dict[str, Any]]] = {row: [] for row in sorted(set(rows))}
    files: dict[Path, dict[int, int]] = {}
    for row in found:
        file, local = shards.locate(row)
        files.setdefault(file, {})[local] = row
    for file, numbers in files.items():
        if not file.is_file():
            continue
        table = pq.read_table(file, filters=[("row", "in", list(numbers))])
        for span in table.sort_by([("row", "ascending"), ("start", "ascending")]).to_pylist():
            found[numbers[span["row"]]].append(span)
    return found


def spans_of_document(shards: "TokenShards", id: str, source: str) -> pa.Table:
    """Return the pieces of one document of a folder; their rows are numbered through all shards."""
    tables = []
    for first in shards.starts[:-1].tolist():
        file, _ = shards.locate(first)
        table = pq.read_table(file, filters=[("id", "==", id), ("source", "==", source)])
        at = table.schema.get_field_index("row")
        tables.append(table.set_column(at, "row", pc.add(table.column("row"), first)))
    return pa.concat_tables(tables)


@dataclass(frozen=True)
class Occurrences:
    """A document that holds a text, and at which characters the text begins in it."""

    id: str
    source: str
    language: str
    url: str
    text: str
    at: tuple[int, ...]


def occurrences(folder: Path, wanted: str) -> Iterator[Occurrences]:
    """Return the documents of a folder that hold `wanted`, in Unicode's NFC as filtered text is.

    Letter case does not matter, nor which apostrophe: nobody types the one that is printed.
    """
    pattern = "".join(map(_any_form, unicodedata.normalize("NFC", wanted)))
    every = re.compile(f"(?={pattern})", re.IGNORECASE)  # those that overlap, too
    for batch in read_documents(folder, ("id", "source", "language", "url", "text")):
        holding = pc.match_substring_regex(batch.column("text"), pattern, ignore_case=True)
        for document in batch.filter(holding).to_pylist():
            yield Occurrences(**document, at=tuple(found.start() for found in every.finditer(document["text"])))


def _any_form(character: str) -> str:
    """A character as Arrow's regular expressions and Python's both understand it."""
    if character in _APOSTROPHES:
        return f"[{_APOSTROPHES}]"
    return f"\\{character}" if character in _SPECIAL else character


def token_ranges(found: Occurrences, length: int, tokenizer: "Tokenizer") -> list[tuple[int, int]]:
    """Return the tokens [start, stop) of a document that hold each occurrence of a text of `length` characters.

    The document is its text between the ids of `Tokenizer.frame`: `<s> text </s>`, as a rule.
    """
    before = len(tokenizer.frame(found.language)[0])
    ids, _ = tokenizer.encode_flat([found.text])
    ends = np.cumsum(tokenizer.byte_lengths(found.text, ids))
    ranges = []
    for at in found.at:
        first = len(found.text[:at].encode())
        last = first + len(found.text[at : at + length].encode())
        start, stop = np.searchsorted(ends, first, side="right"), np.searchsorted(ends, last, side="left") + 1
        ranges.append((int(start) + before, int(stop) + before))
    return ranges


def rows_of(spans: pa.Table, tokens: tuple[int, int]) -> list[int]:
    """Return the rows that hold some of the tokens [start, stop) of a document, whose pieces are `spans`."""
    row, start, stop, offset = (spans.column(name).to_numpy() for name in ("row", "start", "stop", "offset"))
    return np.unique(row[(offset < tokens[1]) & (offset + stop - start > tokens[0])]).tolist()
