"""Reads the records of one file, whatever its kind and compression, and says which of them cannot be used."""

import codecs
import io
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, cast

import pyarrow.parquet as pq

from affinage.config.sources import SourceSettings
from affinage.data import records
from affinage.data.file_kinds import kind_of
from affinage.data.foreign_json import of_a_line
from affinage.data.gutenberg import chapters
from affinage.data.opening import CHUNK_BYTES, SourceFile, damage_told, open_plain, open_stored
from affinage.data.records import BadRecord, Record, needed_columns, record_of
from affinage.data.table_rows import rows_of_batch
from affinage.data.warc import read_warc
from affinage.data.wikipedia import read_dump
from affinage.errors import UserError

Records = Iterator[Record | BadRecord]

_CHARSET = re.compile(rb"character set encoding:\s*([\w.-]+)", re.IGNORECASE)  # in the header of a Gutenberg book
_HEADER_BYTES = 8_000


def read_records(file: SourceFile, settings: SourceSettings) -> Records:
    """Stream the records of a file; broken ones come as BadRecord.

    Ids that the file does not give are `<file>#<line>` (lines and rows count from 1), or `<file>` for a text file.
    Raises DamagedFile where the file as a whole cannot be read (on), UserError where a table has no column of text.
    """
    readers: dict[str, Callable[[SourceFile, SourceSettings], Records]] = {
        "text": _read_text,
        "lines": _read_lines,
        "table": _read_table,
        "warc": read_warc,
        "dump": read_dump,
    }
    with damage_told():
        yield from as_kind(readers[kind_of(file.name, code=settings.kind == "code")](file, settings), settings)


def as_kind(found: Records, settings: SourceSettings) -> Records:
    """Records as documents of the source's kind: of a book its chapters, all else as it is."""
    if settings.kind != "gutenberg":
        yield from found
        return
    for record in found:
        if isinstance(record, BadRecord):
            yield record
        else:
            yield from chapters(record)


def _read_text(file: SourceFile, settings: SourceSettings) -> Records:
    limit = records.MAX_RECORD_BYTES
    with open_plain(file) as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        yield BadRecord(file.name, "too large", f"over {limit / 1e6:.0f} MB in one text file; split it")
        return
    if content.startswith(b"%PDF"):
        yield BadRecord(file.name, "binary", "this is a PDF, not text")
        return
    utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if not utf16 and b"\0" in content:
        yield BadRecord(file.name, "binary", f"a NUL byte at {content.index(0)}: this is not text")
        return
    stated = _CHARSET.search(content[:_HEADER_BYTES]) if settings.kind == "gutenberg" else None
    try:
        text = content.decode("utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        if stated is None:
            glimpse = _glimpse(content, error.start)
            yield BadRecord(file.name, "not UTF-8", f"{error.reason} at byte {error.start}", glimpse)
            return
        text = content.decode(_codec(stated[1]), "replace")
    yield Record(file.name, text) if text.strip() else BadRecord(file.name, "empty", "no text in the file")


def _codec(stated: bytes) -> str:
    """The codec of a stated charset; old books that state ASCII are in Windows' Latin letters."""
    try:
        name = codecs.lookup(stated.decode("ascii", "replace")).name
        b"a".decode(name, "replace")  # there are codecs of other things than text
    except LookupError:
        return "cp1252"
    return "cp1252" if name in ("ascii", "iso8859-1") else name


def _read_lines(file: SourceFile, settings: SourceSettings) -> Records:
    limit = records.MAX_RECORD_BYTES
    with open_plain(file) as stream:
        lines = stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(cast(Any, stream), CHUNK_BYTES)
        number, blank = 0, True
        while line := lines.readline(limit):
            number += 1
            place = f"{file.name}#{number}"
            blank = blank and line.isspace()
            if len(line) == limit and not line.endswith(b"\n"):
                while (rest := lines.readline(CHUNK_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield BadRecord(place, "too large", f"a line over {limit / 1e6:.0f} MB")
            elif not line.isspace():
                yield _parse_line(line, place, settings)
    if blank:
        yield BadRecord(file.name, "empty", "no text in the file")


def _parse_line(line: bytes, place: str, settings: SourceSettings) -> Record | BadRecord:
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return BadRecord(place, "not UTF-8", f"{error.reason} at byte {error.start}", _glimpse(line, error.start))
    except (ValueError, RecursionError) as error:
        return BadRecord(place, "not JSON", of_a_line(error), _glimpse(line, 0))
    if not isinstance(fields, dict):
        return BadRecord(place, "not a JSON object", f"a {type(fields).__name__}", _glimpse(line, 0))
    return record_of(fields, place, settings)


def _glimpse(content: bytes, position: int) -> str:
    return content[max(0, position - 60) : position + 140].decode("utf-8", "replace")


def _read_table(file: SourceFile, settings: SourceSettings) -> Records:
    with open_stored(file) as raw:
        table = pq.ParquetFile(raw)
        names = table.schema_arrow.names
        if not {settings.text_key, settings.text_key.partition(".")[0]} & set(names):
            raise UserError(
                f"the table has no column {settings.text_key!r}; it has {', '.join(names)}",
                where=file.url.removeprefix("file://"),
                fix="Name the column that holds the text: sources: [{path: ..., text_key: COLUMN}].",
            )
        columns = [name for name in names if name in needed_columns(settings)]
        number = 0
        for batch in table.iter_batches(batch_size=256, columns=columns):
            for row in rows_of_batch(batch):
                number += 1
                place = f"{file.name}#{number}"
                if isinstance(row, UnicodeDecodeError):
                    yield BadRecord(place, "not UTF-8", f"{row.reason} in a text", _glimpse(row.object, row.start))
                else:
                    yield record_of(row, place, settings)
