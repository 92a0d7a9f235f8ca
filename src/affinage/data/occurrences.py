"""Where a text occurs: in which documents, and in which tokens of them."""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from affinage.data.documents import read_documents
from affinage.data.tokenizer import Tokenizer

_APOSTROPHES = "'\u2019\u02bc"
_SPECIAL = frozenset(r"\.^$*+?{}[]|()")
_COLUMNS = ("id", "source", "language", "url", "text")


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
    """The documents of a folder that hold `wanted`, in Unicode's NFC as cleaned text is.

    Letter case does not matter, nor which apostrophe: nobody types the one that is printed.
    """
    pattern = "".join(map(_any_form, unicodedata.normalize("NFC", wanted)))
    every = re.compile(f"(?={pattern})", re.IGNORECASE)  # those that overlap, too
    for batch in read_documents(folder, _COLUMNS):
        holding = pc.match_substring_regex(batch.column("text"), pattern, ignore_case=True)
        for document in batch.filter(holding).to_pylist():
            yield Occurrences(**document, at=tuple(found.start() for found in every.finditer(document["text"])))


def _any_form(character: str) -> str:
    """A character as Arrow's regular expressions and Python's both understand it."""
    if character in _APOSTROPHES:
        return f"[{_APOSTROPHES}]"
    return f"\\{character}" if character in _SPECIAL else character


def token_ranges(found: Occurrences, length: int, tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """The tokens [start, stop) of a document that hold each occurrence of a text of `length` characters.

    The document is its text between the marks of `Tokenizer.frame`: `<s> text </s>`, as a rule.
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
    """The rows that hold some of the tokens [start, stop) of a document, of which `spans` are the lines of lineage."""
    columns = (spans.column(name).to_numpy() for name in ("row", "start", "stop", "offset"))
    row, start, stop, offset = columns
    return np.unique(row[(offset < tokens[1]) & (offset + stop - start > tokens[0])]).tolist()
