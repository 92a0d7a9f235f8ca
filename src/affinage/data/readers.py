"""Reads the records of one file, whatever its kind and compression; those that cannot be used come with the reason."""

import contextlib
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow.parquet as pq

from affinage.config.data import SourceSettings
from affinage.data.files import CHUNK_BYTES, DamagedFile, Part, SourceFile, open_plain, open_stored, reports_damage
from affinage.data.json_files import encodable
from affinage.errors import UserError, plain

MAX_RECORD_BYTES = 128_000_000  # of one document; a longer one is skipped, so that memory stays bounded
UNKNOWN_KIND = "unknown kind of file"
_FIELD = re.compile(r"\{([^{}]+)\}")


@dataclass(frozen=True)
class Record:
    """One document as its file has it. Fields that the file does not have are empty."""

    id: str
    text: str
    source: str = ""
    language: str = ""
    url: str = ""
    license: str = ""
    replaced: bool = False  # the text had lone surrogates, for which UTF-8 has no form


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot become a document: a reason to count, and the place and particulars to show."""

    id: str
    reason: str
    detail: str
    text: str = ""


Records = Iterator[Record | BadRecord]
Row = tuple[str, Mapping[str, Any]]  # its place, and its values by name


def read_records(part: Part, settings: SourceSettings) -> Records:
    """Stream the records of a file, or of its part, or of a part of a dataset; broken ones come as BadRecord.

    Ids that the file does not give are `<file>#<line>` (lines and rows count from 1), `<file>` for a text file, and
    `<file>@<byte>` for the lines of a file that is read in parts. Books come in several records.
    Raises DamagedFile where the file as a whole cannot be read on, UserError where a table has no column of text.
    """
    from affinage.data.wikipedia import read_dump

    readers: dict[str, Callable[[Any, SourceSettings], Iterator[Record | BadRecord | Row]]] = {
        "text": _read_text,
        "warc": _read_warc,
        "dump": read_dump,
        "": lambda file, settings: iter([BadRecord(file.name, UNKNOWN_KIND, "")]),
    }
    with reports_damage():
        for record in readers.get(part.kind, read_rows)(part, settings):
            record = record_of(*record, settings) if isinstance(record, tuple) else record
            if settings.kind == "gutenberg" and isinstance(record, Record):
                yield from _parts_of_book(record)
            else:
                yield record


# ---- objects and rows ----


def read_rows(part: Part, settings: SourceSettings, *, of_text: bool = True) -> Iterator[Row | BadRecord]:
    """Stream JSON objects, or the rows of a table or dataset, with their places; what cannot be read is a BadRecord.

    With `of_text` they have the columns of which a document is made, else all.
    """
    from affinage.data.hub_datasets import read_dataset

    readers: dict[str, Callable[..., Iterator[Row | BadRecord]]] = {"lines": _read_lines, "table": _read_table}
    with reports_damage():
        yield from readers.get(part.kind, read_dataset)(part, settings, of_text)


def needed_columns(settings: SourceSettings, names: list[str], where: str = "") -> list[str]:
    """Those of the columns of a table that may be read for a record of this source.

    Raises UserError if the column of text is not among them.
    """
    if not {settings.text_key, settings.text_key.partition(".")[0]} & set(names):
        fix = "Name the column that holds the text: sources: [{path: ..., text_key: COLUMN}]."
        what = f"it has no column {settings.text_key!r}; it has {', '.join(names)}"
        raise UserError(what, where=where, fix=fix)
    keys = ["source", "language", "lang", settings.text_key, settings.id_key, settings.license_key, settings.url_key]
    keys += _FIELD.findall(settings.url_key)
    needed = {part for key in keys for part in (key, key.partition(".")[0])}
    return [name for name in names if name in needed]


def record_of(place: str, fields: Mapping[str, Any], settings: SourceSettings) -> Record | BadRecord:
    """A record from a JSON object or the row of a table; its id is `place` if it has none of its own."""
    text = _look_up(fields, settings.text_key)
    if text is _ABSENT:
        names = encodable(", ".join(map(str, fields)))
        return BadRecord(place, "no text key", f"no {settings.text_key!r} among {names}: set `text_key` of the source")
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    except UnicodeDecodeError as error:
        return _not_utf8(place, error)
    if not isinstance(text, str):
        detail = f"{settings.text_key!r} is {type(text).__name__}"
        return BadRecord(place, "text is not a string", detail, str(text)[:200])
    if not text.strip():
        return BadRecord(place, "empty", f"{settings.text_key!r} is empty")
    whole, url = encodable(text), settings.url_key
    values = {key: _word(fields, key) for key in _FIELD.findall(url) or [url]}
    return Record(
        id=_word(fields, settings.id_key) or place,
        text=whole,
        source=_word(fields, "source"),
        language=_word(fields, "language") or _word(fields, "lang"),
        # a key, or a pattern of keys that all have a value
        url=values.get(url) or (_FIELD.sub(lambda match: values[match[1]], url) if all(values.values()) else ""),
        license=_word(fields, settings.license_key),
        replaced=whole != text,
    )


_ABSENT = object()


def _look_up(fields: Any, key: str) -> Any:
    """The value of a key, or _ABSENT; `a.b` is the key of that name, or else the key b within a."""
    if not isinstance(fields, Mapping):
        return _ABSENT
    outer, dot, inner = key.partition(".")
    return fields[key] if key in fields else _look_up(fields.get(outer), inner) if dot else _ABSENT


def _word(fields: Mapping[str, Any], key: str) -> str:
    """A word or whole number as text without control characters, a list of words joined; "" for anything else."""
    value = _look_up(fields, key)
    words = [word for word in (value if isinstance(value, list) else [value]) if isinstance(word, str | int)]
    return ", ".join(plain(encodable(str(word))) for word in words if not isinstance(word, bool) and word != "")


def _not_utf8(place: str, error: UnicodeDecodeError) -> BadRecord:
    glimpse = error.object[max(0, error.start - 60) : error.start + 140].decode("utf-8", "replace")
    detail = f"{error.reason} at byte {error.start}; convert it with iconv -f latin1 -t utf-8"
    return BadRecord(place, "not UTF-8", detail, glimpse)


# ---- books of Project Gutenberg ----

PART_CHARACTERS = 50_000  # of a book, about; a longer document than `data.filters.max_characters` is removed
_HEAD_CHARACTERS = 20_000  # headers are shorter
_START = re.compile(
    r"^\*{3} ?START OF (?:THE|THIS) PROJECT GUTENBERG.*?\*{3}[ \t]*$|^\*END[* ]{0,2}THE SMALL PRINT![^\n]*$"
    r"|^\*+ ?These (?:original )?(?:e-?texts|ebooks) (?:are|were) prepared[^\n]*$",
    re.I | re.M | re.S,
)
_END = re.compile(
    r"^\s*\**\s*(?:End of (?:the |this )?|Fin (?:de|du) )Proje(?:ct|t) Gutenberg|^\*{3} ?END OF TH(?:E|IS) PROJECT",
    re.I | re.M,
)
_BOOK = re.compile(r"\[\s*(?:e-?book|e-?text)\s*#\s*(\d+)", re.I)
_BOOK_IN_NAME = re.compile(r"(?:^|/|pg)(\d{1,6})(?:-\d)?(?:\.txt|\.utf8|$)", re.I)
_PRODUCED = re.compile(r"\A\s*(?:Produced|E-text prepared|Transcribed) (?:by|from)[^\n]*(?:\n[^\n]+)*\n", re.I)


def _parts_of_book(book: Record) -> Records:
    """A book without Project Gutenberg's header and license, cut at blank lines into records `<book>#<part>`."""
    text = book.text.replace("\r\n", "\n").replace("\r", "\n")
    head = text[:_HEAD_CHARACTERS]
    number = _BOOK.search(head) or _BOOK_IN_NAME.search(book.id)
    id, url = (number[1], f"https://www.gutenberg.org/ebooks/{number[1]}") if number else (book.id, "")
    if "this is a copyrighted project gutenberg" in head.lower():
        yield BadRecord(id, "under copyright", "its header says so", head[:200])
        return
    if start := _START.search(text, 0, _HEAD_CHARACTERS):
        text = text[start.end() :]
    if end := _END.search(text, len(text) // 2):
        text = text[: end.start()]
    text = _PRODUCED.sub("", text).strip("\n").rstrip()
    if not text:
        yield BadRecord(id, "empty", "nothing between header and license", head[:200])
    whole = replace(book, url=book.url or url, license=book.license or "public domain in the USA (Project Gutenberg)")
    position, begin = 0, 0
    while begin < len(text):
        blank = text.find("\n\n", begin + PART_CHARACTERS)
        stop = len(text) if blank < 0 else blank
        yield replace(whole, id=f"{id}#{position}", text=text[begin:stop].strip("\n"))
        position, begin = position + 1, stop


# ---- kinds of files ----


def _read_text(file: SourceFile, settings: SourceSettings) -> Records:
    with open_plain(file) as stream:
        content = stream.read(MAX_RECORD_BYTES + 1)
    if len(content) > MAX_RECORD_BYTES:
        yield BadRecord(file.name, "too large", f"over {MAX_RECORD_BYTES / 1e6:.0f} MB in one text file; split it")
    elif content.startswith(b"%PDF") or b"\0" in content:
        yield BadRecord(file.name, "binary", "this is a PDF, UTF-16 or no text: it has NUL bytes")
    else:
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            if settings.kind != "gutenberg":
                yield _not_utf8(file.name, error)
                return
            text = content.decode("cp1252", "replace")  # old books are in Windows' Latin letters
        yield Record(file.name, text) if text.strip() else BadRecord(file.name, "empty", "no text in the file")


def _read_lines(file: SourceFile, settings: SourceSettings, of_text: bool) -> Iterator[Row | BadRecord]:
    limit = MAX_RECORD_BYTES
    with open_plain(file) as stream:
        position = max(0, file.start - 1)
        if position:  # a line belongs to the part that its first byte is in
            stream.seek(position)
            position += _skip_line(stream)
        number = 0
        while (file.stop is None or position < file.stop) and (line := stream.readline(limit)):
            number += 1
            place = f"{file.name}#{number}" if file.stop is None else f"{file.name}@{position}"
            position += len(line)
            if len(line) == limit and not line.endswith(b"\n"):
                position += _skip_line(stream)
                yield BadRecord(place, "too large", f"a line over {limit / 1e6:.0f} MB")
            elif not line.isspace():
                glimpse = line[:140].decode("utf-8", "replace")
                try:
                    fields = json.loads(line.decode("utf-8-sig"))
                except UnicodeDecodeError as error:
                    yield _not_utf8(place, error)
                except (ValueError, RecursionError) as error:
                    yield BadRecord(place, "not JSON", getattr(error, "msg", str(error)), glimpse)
                else:
                    if isinstance(fields, dict):
                        yield place, fields
                    else:
                        yield BadRecord(place, "not a JSON object", f"it is a {type(fields).__name__}", glimpse)


def _skip_line(stream: Any) -> int:
    """Read to the end of the line without holding it; returns the bytes of it."""
    size = 0
    while rest := stream.readline(CHUNK_BYTES):
        size += len(rest)
        if rest.endswith(b"\n"):
            break
    return size


def _read_table(file: SourceFile, settings: SourceSettings, of_text: bool) -> Iterator[Row]:
    with open_stored(file) as raw:
        table, number = pq.ParquetFile(raw), 0
        names, where = table.schema_arrow.names, file.url.removeprefix("file://")
        columns = needed_columns(settings, names, where) if of_text else None
        for group in range(table.num_row_groups):
            metadata = table.metadata.row_group(group)
            if file.stop is None or file.start <= metadata.column(0).data_page_offset < file.stop:
                for batch in table.iter_batches(batch_size=256, row_groups=[group], columns=columns):
                    for offset, row in enumerate(batch.to_pylist(), number + 1):
                        yield f"{file.name}#{offset}", row
                    number += batch.num_rows
            else:
                number += metadata.num_rows


# ---- web archives ----


def _read_warc(file: SourceFile, settings: SourceSettings) -> Records:
    from fastwarc.warc import ArchiveIterator, WarcRecordType

    number, kinds = 0, WarcRecordType.response | WarcRecordType.conversion
    with open_plain(file) as stream:
        try:
            for number, entry in enumerate(ArchiveIterator(stream, record_types=kinds, parse_http=True), 1):
                yield _read_entry(entry, f"{file.name}#{number}")
        except (ValueError, RuntimeError) as error:
            raise DamagedFile(f"the file is damaged: {error}") from None
    if not number and file.bytes:
        raise DamagedFile("the file holds no web page: is it a web archive?")


def _read_entry(entry: Any, place: str) -> Record | BadRecord:
    from fastwarc.warc import WarcRecordType
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.encoding import bytes_to_str, detect_encoding

    id, limit = (entry.record_id or place).removeprefix("<urn:uuid:").removesuffix(">"), MAX_RECORD_BYTES
    url = entry.headers.get("WARC-Target-URI", "").strip("<>")
    if html := entry.record_type == WarcRecordType.response:
        kind = (entry.http_content_type or "").lower()
        status = None if entry.http_headers is None else entry.http_headers.status_code
        if not entry.is_http or status != 200:
            return BadRecord(id, "not found", f"status {status} of {url}")
        if not kind.startswith(("text/html", "application/xhtml+xml")):
            return BadRecord(id, "not HTML", f"{kind or 'no content type'} of {url}")
    content = entry.reader.read(limit + 1)
    if len(content) < min(entry.content_length, limit + 1):
        raise DamagedFile(f"the file is cut off in the record of {url}")
    if html:
        names = ("Content-Encoding", "Transfer-Encoding")
        coding = " ".join(filter(None, map(entry.http_headers.get, names)))
        # Many archives hold pages that were decoded already, under the header of before; FastWARC's own decoding would
        # end the whole archive there.
        if coding not in ("", "identity") and content.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] != b"<":
            try:
                content = zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(content, limit + 1)  # gzip or deflate
            except zlib.error:
                return BadRecord(id, "unknown compression", f"{coding} of {url}")
    if len(content) > limit:
        return BadRecord(id, "too large", f"a page over {limit / 1e6:.0f} MB: {url}")
    text = content.decode("utf-8", "replace")
    if html:  # in the charset that its header states, or else in the one it looks like: many state what is no charset
        for encoding in filter(None, (entry.http_charset, detect_encoding(content))):
            with contextlib.suppress(LookupError, ValueError):
                text = str(bytes_to_str(content, encoding, errors="replace"))
                break
        text = str(extract_plain_text(text, main_content=True, alt_texts=False, list_bullets=False))
    return Record(id, encodable(text), url=url) if text.strip() else BadRecord(id, "empty", f"no text in {url}")
