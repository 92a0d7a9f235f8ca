"""Reads web archives: the text of every HTML page (.warc), or the texts that were extracted before (.wet)."""

import contextlib
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import zstandard
from fastwarc.warc import ArchiveIterator, WarcRecordType
from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.encoding import bytes_to_str, detect_encoding

from affinage.config.sources import SourceSettings
from affinage.data import readers
from affinage.data.files import DamagedFile, SourceFile, open_plain
from affinage.data.foreign_json import encodable
from affinage.data.readers import BadRecord, Record

_HTML = ("text/html", "application/xhtml+xml")
_READ = WarcRecordType.response | WarcRecordType.conversion
_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32


class _UnknownCoding(Exception):
    """A compression that is not read here. `str()` of it is its name."""


def read_warc(file: SourceFile, settings: SourceSettings) -> Iterator[Record | BadRecord]:
    """The main text of the HTML pages that were answered with status 200; ids and URLs are the archive's.

    Other answers are counted: redirects and errors (`not found`), pictures and scripts (`not HTML`), pages in a
    compression that is not read (`unknown compression`).
    """
    seen = False
    with open_plain(file) as stream:
        try:
            for number, entry in enumerate(ArchiveIterator(stream, record_types=_READ, parse_http=True), 1):
                seen = True
                yield _read_entry(entry, f"{file.name}#{number}")
        except (ValueError, RuntimeError) as error:
            raise DamagedFile(f"the file is damaged: {error}") from None
        if not seen and file.bytes:
            raise DamagedFile("the file holds no web page: is it a web archive?")


def _read_entry(entry: Any, place: str) -> Record | BadRecord:
    limit = readers.MAX_RECORD_BYTES
    id = (entry.record_id or place).removeprefix("<urn:uuid:").removesuffix(">")
    url = entry.headers.get("WARC-Target-URI", "").strip("<>")
    html = entry.record_type == WarcRecordType.response
    if html:
        kind = (entry.http_content_type or "").lower()
        if not entry.is_http or entry.http_headers is None or entry.http_headers.status_code != 200:
            status = entry.http_headers.status_code if entry.http_headers is not None else "none"
            return BadRecord(id, "not found", f"status {status} of {url}")
        if not kind.startswith(_HTML):
            return BadRecord(id, "not HTML", f"{kind or 'no content type'} of {url}")
    content = entry.reader.read(limit + 1)
    if len(content) <= limit < entry.content_length or len(content) < min(entry.content_length, limit):
        raise DamagedFile(f"the file is cut off in the record of {url}")
    if html:
        try:
            content = _decoded_body(content, entry.http_headers, limit + 1)
        except _UnknownCoding as coding:
            return BadRecord(id, "unknown compression", f"{coding} of {url}")
    if len(content) > limit:
        return BadRecord(id, "too large", f"a page over {limit / 1e6:.0f} MB: {url}")
    text = _text_of_page(content, entry.http_charset or "") if html else content.decode("utf-8", "replace")
    if not text.strip():
        return BadRecord(id, "empty", f"no text in {url}")
    return Record(id, encodable(text), url=url)


def _text_of_page(content: bytes, charset: str) -> str:
    """The main content of a page, its paragraphs on lines of their own.

    The page is in the charset that its header states, or else in the one it looks like: many state what is no charset.
    """
    html = content.decode("utf-8", "replace")
    for encoding in (charset, detect_encoding(content)):
        with contextlib.suppress(LookupError, ValueError):
            if encoding:
                html = str(bytes_to_str(content, encoding, errors="replace"))
                break
    return str(extract_plain_text(html, main_content=True, alt_texts=False, list_bullets=False))


def _decoded_body(content: bytes, headers: Mapping[str, str], limit: int) -> bytes:
    """The body of an answer without its transfer and content codings, at most `limit` bytes of it.

    Many archives hold bodies that were decoded already, under the header of before: a body that is not coded as the
    header says is taken as it is. FastWARC's own decoding ends the whole archive there.
    """
    codings = [
        [coding for each in (headers.get(name) or "").lower().split(",") if (coding := each.strip())]
        for name in ("Content-Encoding", "Transfer-Encoding")
    ]
    for coding in reversed([coding for both in codings for coding in both]):
        try:
            content = _decode(content, coding, limit)
        except (ValueError, zlib.error, zstandard.ZstdError):
            continue
    return content


def _decode(content: bytes, coding: str, limit: int) -> bytes:
    match coding:
        case "identity" | "none":
            return content
        case "chunked":
            return _joined(content)
        case "gzip" | "x-gzip":
            return zlib.decompressobj(_GZIP_OR_ZLIB).decompress(content, limit)
        case "deflate":
            try:
                return zlib.decompressobj(_GZIP_OR_ZLIB).decompress(content, limit)
            except zlib.error:  # without the header that it should have
                return zlib.decompressobj(-zlib.MAX_WBITS).decompress(content, limit)
        case "zstd":
            with zstandard.ZstdDecompressor().stream_reader(content) as stream:
                return stream.read(limit)
    if content.lstrip()[:1] == b"<":
        return content
    raise _UnknownCoding(coding)


def _joined(content: bytes) -> bytes:
    """The chunks end to end (RFC 9112, section 7.1). Raises ValueError if these are none."""
    parts: list[bytes] = []
    at = 0
    while at < len(content):
        end = content.find(b"\r\n", at)
        size = int(content[at : max(end, at)].split(b";")[0].strip(), 16)
        start, at = end + 2, end + 4 + size
        if size < 0 or (start + size < len(content) and content[start + size : at] != b"\r\n"):
            raise ValueError("not chunked")
        if size == 0:
            break
        parts.append(content[start : start + size])
    return b"".join(parts)
