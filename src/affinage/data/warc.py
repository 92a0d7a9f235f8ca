"""Reads web archives: the text of every HTML page (.warc), or the texts that were extracted before (.wet)."""

import contextlib
from collections.abc import Iterator
from typing import Any

from fastwarc.warc import ArchiveIterator, WarcRecordType
from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.encoding import bytes_to_str, detect_encoding

from affinage.config.sources import SourceSettings
from affinage.data import records
from affinage.data.http_body import UnknownCoding, plain_body
from affinage.data.opening import SourceFile, open_plain
from affinage.data.records import BadRecord, DamagedFile, Record, encodable

_HTML = ("text/html", "application/xhtml+xml")
_READ = WarcRecordType.response | WarcRecordType.conversion


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
    content = entry.reader.read(records.MAX_RECORD_BYTES + 1)
    if len(content) > records.MAX_RECORD_BYTES:
        return BadRecord(id, "too large", f"a page over {records.MAX_RECORD_BYTES / 1e6:.0f} MB: {url}")
    if len(content) < entry.content_length:
        raise DamagedFile(f"the file is cut off in the record of {url}")
    if html:
        try:
            content = plain_body(content, entry.http_headers)
        except UnknownCoding as coding:
            return BadRecord(id, "unknown compression", f"{coding} of {url}")
        if len(content) > records.MAX_RECORD_BYTES:
            return BadRecord(id, "too large", f"a page over {records.MAX_RECORD_BYTES / 1e6:.0f} MB: {url}")
    text = _text_of_page(content, entry.http_charset or "") if html else content.decode("utf-8", "replace")
    if not text.strip():
        return BadRecord(id, "empty", f"no text in {url}")
    return Record(id, encodable(text), url=url)


def _text_of_page(content: bytes, charset: str) -> str:
    """The main content of a page, its paragraphs on lines of their own."""
    html = _decoded(content, charset)
    return str(extract_plain_text(html, main_content=True, alt_texts=False, list_bullets=False))


def _decoded(content: bytes, charset: str) -> str:
    """A page in the charset that its header states, or else in the one it looks like: many state what is no charset."""
    for encoding in (charset, detect_encoding(content)):
        with contextlib.suppress(LookupError, ValueError):
            if encoding:
                return str(bytes_to_str(content, encoding, errors="replace"))
    return content.decode("utf-8", "replace")
