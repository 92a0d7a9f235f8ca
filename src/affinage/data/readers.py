"""Reads the records of one file, whatever its kind and compression, and says which of them cannot be used."""

import bz2
import codecs
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, cast

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from affinage.data.sources import SourceFile, kind_of

MAX_RECORD_BYTES = 128_000_000  # of one document; a longer line is skipped, so that memory stays bounded
CHUNK_BYTES = 1 << 16  # read at once; of a damaged file, the readable bytes of the last chunk are lost


@dataclass(frozen=True)
class Record:
    """One document as its file gives it. Fields the file does not have are empty."""

    id: str
    text: str
    source: str = ""
    language: str = ""
    url: str = ""
    licence: str = ""


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot become a document: a reason to count, and the place and particulars to show."""

    id: str
    reason: str
    detail: str
    text: str = ""


class DamagedFile(Exception):
    """A file that cannot be read to its end, or not as what its name says. `str()` of it tells why."""


class _ZstdReader(io.RawIOBase):
    """A stream of the decompressed bytes of all frames; unlike zstandard's own it notices a missing end."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._frame: Any = None
        self._compressed = b""
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            chunk = self._compressed or self._raw.read(CHUNK_BYTES)
            if not chunk:
                if self._frame is not None:
                    raise EOFError("the last zstd frame has no end")
                return 0
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._ready, self._compressed = self._frame.decompress(chunk), b""
            if self._frame.eof:
                self._compressed, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size


@contextmanager
def _damage_told() -> Iterator[None]:
    try:
        yield
    except EOFError:
        raise DamagedFile("the file is cut off: its compressed data has no end") from None
    except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError, pa.ArrowInvalid) as error:
        raise DamagedFile(f"the file is damaged: {error}") from None
    except FileNotFoundError:
        raise DamagedFile("the file is not there (any more)") from None
    except OSError as error:
        raise DamagedFile(f"the file cannot be read: {error}") from None


def _open(file: SourceFile) -> IO[bytes]:
    """The decompressed bytes of a file."""
    raw = cast(IO[bytes], fsspec.open(file.url, "rb").open())
    name = file.name.lower()
    if name.endswith(".gz"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if name.endswith(".bz2"):
        return bz2.BZ2File(raw)
    if name.endswith(".zst"):
        return io.BufferedReader(_ZstdReader(raw), CHUNK_BYTES)
    return raw


def read_records(file: SourceFile, text_key: str) -> Iterator[Record | BadRecord]:
    """Stream the records of a file; broken ones come as BadRecord.

    Ids that the file does not give are `<file>#<line>` (lines and rows count from 1), or `<file>` for a text file.
    Raises DamagedFile where the file as a whole cannot be read (on).
    """
    reader = {"text": _read_text, "lines": _read_lines, "table": _read_table}[kind_of(file.name)]
    with _damage_told():
        yield from reader(file, text_key)


def _read_text(file: SourceFile, text_key: str) -> Iterator[Record | BadRecord]:
    with _open(file) as stream:
        content = stream.read(MAX_RECORD_BYTES + 1)
    if len(content) > MAX_RECORD_BYTES:
        yield BadRecord(file.name, "too large", f"over {MAX_RECORD_BYTES / 1e6:.0f} MB in one text file; split it")
        return
    utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if not utf16 and b"\0" in content:
        yield BadRecord(file.name, "binary", f"a NUL byte at {content.index(0)}: this is not text")
        return
    try:
        text = content.decode("utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        yield BadRecord(file.name, "not UTF-8", f"{error.reason} at byte {error.start}", _glimpse(content, error.start))
        return
    yield Record(file.name, text) if text.strip() else BadRecord(file.name, "empty", "no text in the file")


def _read_lines(file: SourceFile, text_key: str) -> Iterator[Record | BadRecord]:
    with _open(file) as stream:
        lines = stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(cast(Any, stream), CHUNK_BYTES)
        number = 0
        while line := lines.readline(MAX_RECORD_BYTES):
            number += 1
            place = f"{file.name}#{number}"
            if len(line) == MAX_RECORD_BYTES and not line.endswith(b"\n"):
                while (rest := lines.readline(CHUNK_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield BadRecord(place, "too large", f"a line over {MAX_RECORD_BYTES / 1e6:.0f} MB")
            elif not line.isspace():
                yield _parse_line(line, place, text_key)


def _parse_line(line: bytes, place: str, text_key: str) -> Record | BadRecord:
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return BadRecord(place, "not UTF-8", f"{error.reason} at byte {error.start}", _glimpse(line, error.start))
    except (ValueError, RecursionError) as error:
        return BadRecord(place, "not JSON", str(error), _glimpse(line, 0))
    if not isinstance(fields, dict):
        return BadRecord(place, "not a JSON object", f"a {type(fields).__name__}", _glimpse(line, 0))
    return _record(fields, place, text_key)


def _record(fields: dict[str, Any], place: str, text_key: str) -> Record | BadRecord:
    """A record from the keys of a JSON object or the columns of a table row."""
    if text_key not in fields:
        return BadRecord(place, "no text key", f"no {text_key!r} among the keys {', '.join(map(str, fields))}")
    text = fields[text_key]
    if not isinstance(text, str):
        return BadRecord(place, "text is not a string", f"{text_key!r} is {type(text).__name__}", str(text)[:200])
    if not text.strip():
        return BadRecord(place, "empty", f"{text_key!r} is empty")
    return Record(
        id=_plain(fields, "id") or place,
        text=_encodable(text),
        source=_plain(fields, "source"),
        language=_plain(fields, "language") or _plain(fields, "lang"),
        url=_plain(fields, "url"),
        licence=_plain(fields, "licence") or _plain(fields, "license"),
    )


def _plain(fields: dict[str, Any], key: str) -> str:
    value = fields.get(key)
    if isinstance(value, bool) or not isinstance(value, str | int):
        return ""
    return _encodable(str(value))


def _encodable(text: str) -> str:
    """The text with lone surrogates (JSON's \\ud800) replaced by U+FFFD: UTF-8 has no form for them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _glimpse(content: bytes, position: int) -> str:
    return content[max(0, position - 60) : position + 140].decode("utf-8", "replace")


def _read_table(file: SourceFile, text_key: str) -> Iterator[Record | BadRecord]:
    with fsspec.open(file.url, "rb") as raw:
        table = pq.ParquetFile(raw)
        if text_key not in table.schema_arrow.names:
            raise DamagedFile(f"the table has no column {text_key!r}; it has {', '.join(table.schema_arrow.names)}")
        wanted = (text_key, "id", "source", "language", "lang", "url", "licence", "license")
        columns = [name for name in table.schema_arrow.names if name in wanted]
        number = 0
        for batch in table.iter_batches(batch_size=256, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield _record(row, f"{file.name}#{number}", text_key)
