"""Reads the records of one file, whatever its kind and compression, or of one part of a dataset.

Records that cannot be used come with the reason.
"""

import json
import re
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from affinage.config.data import SourceSettings
from affinage.data.files import LINES, DamagedFile, Part, open_plain, open_stored, reports_damage
from affinage.data.places import is_on_hub
from affinage.errors import UserError, first_line, is_of_network, plain
from affinage.json_files import encodable
from affinage.network import limit_requests, refusal

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


Row = tuple[str, Mapping[str, Any]]  # its place, and its values by name


def read_records(part: Part, settings: SourceSettings) -> Iterator[Record | BadRecord]:
    """Stream the records of a file, or of its part, or of a part of a dataset; broken ones come as BadRecord.

    Ids that the file does not give are `<file>#<line>` (lines and rows count from 1), `<file>` for a text file, and
    `<file>@<byte>` for the lines of a file that is read in parts. Books come in several records.
    Raises DamagedFile where the file as a whole cannot be read on, UserError where a table has no column of text.
    """
    from affinage.data.wikipedia import read_dump

    readers: dict[str, Callable[[Part, SourceSettings], Iterable[Record | BadRecord | Row]]] = {
        "text": _read_text,
        "warc": _read_warc,
        "dump": read_dump,
        "": lambda file, settings: [BadRecord(file.name, UNKNOWN_KIND, "")],
    }
    with reports_damage():
        for record in readers.get(part.kind, read_rows)(part, settings):
            record = _record_of(*record, settings) if isinstance(record, tuple) else record
            if settings.kind == "gutenberg" and isinstance(record, Record):
                yield from _parts_of_book(record)
            else:
                yield record


# ---- objects and rows ----


def read_rows(part: Part, settings: SourceSettings) -> Iterator[Row | BadRecord]:
    """Stream JSON objects, or the rows of a table or dataset, with their places; what cannot be read is a BadRecord.

    With a `text_key` they have the columns of which a document is made, without one all.
    """
    readers = {"lines": _read_lines, "table": _read_table, "dataset": _read_dataset}
    with reports_damage():
        yield from readers[part.kind](part, settings)


def _needed_columns(settings: SourceSettings, names: list[str] | None, where: str = "") -> list[str] | None:
    """Those columns of a table that are read, None for all; a UserError if that of the text is not among them."""
    if not settings.text_key or names is None:
        return None
    if not {settings.text_key, settings.text_key.partition(".")[0]} & set(names):
        fix = "Name the column that holds the text: sources: [{path: ..., text_key: COLUMN}]."
        what = f"it has no column {settings.text_key!r}; it has {', '.join(names)}"
        raise UserError(what, where=where, fix=fix)
    keys = ["source", "language", "lang", settings.text_key, settings.id_key, settings.license_key, settings.url_key]
    keys += _FIELD.findall(settings.url_key)
    needed = {part for key in keys for part in (key, key.partition(".")[0])}
    return [name for name in names if name in needed]


def _record_of(place: str, fields: Mapping[str, Any], settings: SourceSettings) -> Record | BadRecord:
    """A record from a JSON object, the row of a table, or a text; its id is `place` if it has none of its own."""
    text, key, url = _look_up(fields, settings.text_key), settings.text_key, settings.url_key
    if text is _ABSENT:
        names = encodable(", ".join(map(str, fields)))
        return BadRecord(place, "no text key", f"no {key!r} among {names}: set `text_key` of the source")
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    except UnicodeDecodeError as error:
        if settings.kind != "gutenberg":
            return _not_utf8(place, error)
        text = text.decode("cp1252", "replace")  # old books are in Windows' Latin letters
    if not isinstance(text, str):
        return BadRecord(place, "text is not a string", f"{key!r} is {type(text).__name__}", str(text)[:200])
    if not text.strip():
        return BadRecord(place, "empty", "there is no text in it")
    whole, values = encodable(text), {key: _word(fields, key) for key in _FIELD.findall(url) or [url]}
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


def _parts_of_book(book: Record) -> Iterator[Record | BadRecord]:
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
    if end := _END.search(text, min(len(text) // 2, max(0, len(text) - 25_000))):  # licenses are shorter
        text = text[: end.start()]
    text = _PRODUCED.sub("", text).strip("\n").rstrip()
    if not text:
        yield BadRecord(id, "empty", "nothing between header and license", head[:200])
    whole = replace(book, url=book.url or url, license=book.license or "public domain in the USA (Project Gutenberg)")
    for position, part in enumerate(re.findall(rf"(?s).{{1,{PART_CHARACTERS}}}.*?(?=\n\n|\Z)", text)):
        yield replace(whole, id=f"{id}#{position}", text=part.strip("\n"))


# ---- text, lines and tables ----


def _read_text(file: Part, settings: SourceSettings) -> Iterator[Row | BadRecord]:
    with open_plain(file) as stream:
        content = stream.read(MAX_RECORD_BYTES + 1)
    if len(content) > MAX_RECORD_BYTES:
        yield BadRecord(file.name, "too large", f"over {MAX_RECORD_BYTES / 1e6:.0f} MB in one text file; split it")
    elif content.startswith(b"%PDF") or b"\0" in content:
        yield BadRecord(file.name, "binary", "this is a PDF, UTF-16 or no text: it has NUL bytes")
    else:
        yield file.name, {settings.text_key: content}


def _read_lines(file: Part, settings: SourceSettings) -> Iterator[Row | BadRecord]:
    with open_plain(file) as stream:
        number, position, inside = 0, max(0, file.start - 1), file.start > 0  # inside a line that is passed over
        if inside:  # a line belongs to the part that its first byte is in
            stream.seek(position)
        while (inside or file.stop is None or position < file.stop) and (line := stream.readline(MAX_RECORD_BYTES)):
            begins, inside = not inside, len(line) == MAX_RECORD_BYTES and not line.endswith(b"\n")
            number += begins
            place = f"{file.name}#{number}" if file.stop is None else f"{file.name}@{position}"
            position += len(line)
            if begins and inside:
                yield BadRecord(place, "too large", f"a line over {MAX_RECORD_BYTES / 1e6:.0f} MB")
            elif begins and not line.isspace():
                yield _parse_line(line, place)


def _parse_line(line: bytes, place: str) -> Row | BadRecord:
    try:
        fields = json.loads(text := line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return _not_utf8(place, error)
    except (ValueError, RecursionError) as error:
        what, at = getattr(error, "msg", error), getattr(error, "pos", 0)
        return BadRecord(place, "not JSON", f"{what} (char {at}); wanted: {LINES}", text[max(0, at - 60) : at + 140])
    if not isinstance(fields, dict):
        return BadRecord(place, "not a JSON object", f"it is a {type(fields).__name__}, not {LINES}", text[:140])
    return place, fields


def _read_table(file: Part, settings: SourceSettings) -> Iterator[Row | BadRecord]:
    with open_stored(file) as raw:
        table, number = pq.ParquetFile(raw), 0
        columns = _needed_columns(settings, table.schema_arrow.names, file.url.removeprefix("file://"))
        for group in range(table.num_row_groups):
            metadata = table.metadata.row_group(group)
            if file.stop is None or file.start <= metadata.column(0).data_page_offset < file.stop:
                batches = table.iter_batches(batch_size=256, row_groups=[group], columns=columns)
                rows = (row for batch in batches for row in batch.to_pylist())
                yield from ((f"{file.name}#{offset}", row) for offset, row in enumerate(rows, number + 1))
            number += metadata.num_rows


# ---- web archives ----


def _read_warc(file: Part, settings: SourceSettings) -> Iterator[Record | BadRecord]:
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
    from resiliparse.parse.encoding import bytes_to_str, detect_encoding, map_encoding_to_html5

    id, limit = (entry.record_id or place).removeprefix("<urn:uuid:").removesuffix(">"), MAX_RECORD_BYTES
    url = entry.headers.get("WARC-Target-URI", "").strip("<>")
    if html := entry.record_type == WarcRecordType.response:
        kind = (entry.http_content_type or "").lower()
        if not entry.is_http or entry.http_headers is None or entry.http_headers.status_code != 200:
            return BadRecord(id, "not found", f"no answer with status 200 of {url}")
        if not kind.startswith(("text/html", "application/xhtml+xml")):
            return BadRecord(id, "not HTML", f"{kind or 'no content type'} of {url}")
    content = entry.reader.read(limit + 1)
    if len(content) < min(entry.content_length, limit + 1):
        raise DamagedFile(f"the file is cut off in the record of {url}")
    if html:
        coding = " ".join(filter(None, map(entry.http_headers.get, ("Content-Encoding", "Transfer-Encoding"))))
        # Many archives hold pages that were decoded already, under the header of before; FastWARC's own decoding would
        # end the whole archive there.
        if coding not in ("", "identity") and content.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] != b"<":
            try:
                content = zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(content, limit + 1)  # gzip or deflate
            except zlib.error:
                return BadRecord(id, "unknown compression", f"{coding} of {url}")
    if len(content) > limit:
        return BadRecord(id, "too large", f"a page over {limit / 1e6:.0f} MB: {url}")
    if html:  # in the charset that its header states, or else in the one it looks like: many state what is no charset
        charset = map_encoding_to_html5(entry.http_charset or "", fallback_utf8=False) or detect_encoding(content)
        page = bytes_to_str(content, charset or "utf-8", errors="replace")
        text = str(extract_plain_text(page, main_content=True, alt_texts=False, list_bullets=False))
    else:
        text = content.decode("utf-8", "replace")
    return Record(id, encodable(text), url=url) if text.strip() else BadRecord(id, "empty", f"no text in {url}")


# ---- datasets of the Hub, or of a folder that `datasets` reads ----


def at_commit(source: SourceSettings, where: str) -> SourceSettings:
    """The settings with the commit that the dataset is at now as its revision, so that all of it is read at that one.

    Raises UserError if there is none or it is gated, and TransientError if the Hub cannot be reached.
    """
    from huggingface_hub import HfApi

    limit_requests()
    try:
        api = HfApi()
        info = api.dataset_info(source.dataset, revision=source.revision or None, timeout=15.0)
        api.auth_check(source.dataset, repo_type="dataset")  # a gated one shows its card to everybody
    except Exception as error:  # of the Hub, and whatever a network or a proxy can come up with
        raise refusal(error, "dataset", source.dataset, revision=source.revision, where=where) from None
    return source.model_copy(update={"revision": info.sha or source.revision})


def parts_of(source: SourceSettings, where: str) -> list[Part]:
    """A dataset, that of the Hub as `at_commit` returns it, in as many parts as it has files.

    Raises UserError if it cannot be opened or has no column of text.
    """
    try:
        count = max(1, _opened(source).num_shards)
    except Exception as error:
        if is_of_network(error):
            raise refusal(error, "dataset", source.dataset, revision=source.revision, where=where) from None
        what, fix = f"cannot open the dataset {source.dataset!r}: {first_line(error)}", getattr(error, "fix", "")
        raise UserError(what, where=where, fix=fix) from None
    name = source.dataset if is_on_hub(source) else Path(source.dataset).name
    names = [f"{name}/{index}-of-{count}" for index in range(count)] if count > 1 else [name]
    return [Part("", name, "dataset", 1, index, count) for index, name in enumerate(names)]


def _read_dataset(part: Part, source: SourceSettings) -> Iterator[Row | BadRecord]:
    dataset = _opened(source)
    try:
        rows = dataset.shard(num_shards=part.stop, index=part.start) if part.stop != 1 else dataset
        yield from ((f"{part.name}#{number}", row) for number, row in enumerate(rows, 1))
    except Exception as error:  # of `datasets`, pyarrow, the network
        if is_of_network(error) and is_on_hub(source):  # what damage loses would be lost for good
            raise refusal(error, "dataset", source.dataset, revision=source.revision, where=part.name) from None
        raise DamagedFile(f"the dataset cannot be read on: {type(error).__name__}: {first_line(error)}") from None


@lru_cache(maxsize=2)
def _opened(source: SourceSettings) -> Any:
    """The streamed dataset of a source, with the columns that are read."""
    import datasets

    datasets.config.TORCH_AVAILABLE = False  # else each process loads torch, for data loaders that nobody uses here
    # A URL, for a folder here with the name that the Hub knows it by would be read in its place. An empty cache, for
    # where the Hub fails, what somebody loaded earlier, of whatever commit, would be taken from it.
    limit_requests()
    with tempfile.TemporaryDirectory() as empty:
        dataset = datasets.load_dataset(
            f"hf://datasets/{source.dataset}" if is_on_hub(source) else source.dataset,
            source.config or None,
            data_dir=source.data_dir or None,
            split=source.split,
            revision=source.revision or None,
            cache_dir=empty,
            streaming=True,
        )
    columns = _needed_columns(source, dataset.column_names)
    return dataset.select_columns(columns) if columns else dataset
