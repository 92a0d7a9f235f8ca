"""Which document every token comes from, and where a text occurs: from a step to its documents, and back."""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from affinage.data.documents import read_documents

if TYPE_CHECKING:
    from affinage.data.token_shards import TokenShards
    from affinage.data.tokenizer import Tokenizer


def spans_of_row(shards: "TokenShards", row: int) -> list[dict[str, Any]]:
    """Return the pieces of documents in a row of a folder, from left to right: the columns of `token_shards.SCHEMA`."""
    file, number = shards.locate(row)
    return pq.read_table(file, filters=[("row", "==", number)]).sort_by("start").to_pylist()


def rows_of_document(shards: "TokenShards", id: str, source: str, ranges: Iterable[tuple[int, int]]) -> list[int]:
    """Return the rows of a folder that hold some of the tokens [start, stop) of a document."""
    rows: set[int] = set()
    for first in shards.starts[:-1].tolist():
        table = pq.read_table(shards.locate(first)[0], filters=[("id", "==", id), ("source", "==", source)])
        row, start, stop, offset = (table.column(name).to_numpy() for name in ("row", "start", "stop", "offset"))
        for begin, end in ranges:
            rows.update((first + row[(offset < end) & (offset + stop - start > begin)]).tolist())
    return sorted(rows)


def occurrences(folder: Path, wanted: str) -> Iterator[tuple[dict[str, str], list[int]]]:
    """Return the documents of a folder that hold a text in any letter case, and at which characters it begins in them.

    The text is put into Unicode's NFC, as filtered documents are.
    """
    wanted = unicodedata.normalize("NFC", wanted)
    every = re.compile(f"(?={re.escape(wanted)})", re.IGNORECASE)  # those that overlap, too
    for batch in read_documents(folder, ("id", "source", "language", "url", "text")):
        holding = pc.match_substring(batch.column("text"), wanted, ignore_case=True)
        for document in batch.filter(holding).to_pylist():
            yield document, [match.start() for match in every.finditer(document["text"])]


def token_ranges(
    document: dict[str, str], places: Iterable[int], length: int, tokenizer: "Tokenizer"
) -> list[tuple[int, int]]:
    """Return the tokens [start, stop) of a document that hold each occurrence of a text of `length` characters.

    The document is its text between the ids of `Tokenizer.frame`: `<s> text </s>`, as a rule.
    """
    text, before = document["text"], len(tokenizer.frame(document["language"])[0])
    ends = np.cumsum(tokenizer.byte_lengths(text, tokenizer.encode(text)))
    ranges = []
    for place in places:
        first = len(text[:place].encode())
        last = first + len(text[place : place + length].encode())
        start, stop = np.searchsorted(ends, first, side="right"), np.searchsorted(ends, last, side="left") + 1
        ranges.append((int(start) + before, int(stop) + before))
    return ranges
