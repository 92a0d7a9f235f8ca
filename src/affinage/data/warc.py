"""Reads web archives: the text of every HTML page (.warc), or the texts that were extracted before (.wet)."""

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any

from fastwarc.warc import ArchiveIterator, WarcRecordType
from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.encoding import bytes_to_str, detect_encoding

from affinage.config.data import SourceSettings
from affinage.data import readers
from affinage.data.files import DamagedFile, SourceFile, open_plain
from affinage.data.json_files import encodable
from affinage.data.readers import BadRecord, Record

_READ = WarcRecordType.response | WarcRecordType.conversion


def read_warc(file: SourceFile, settings: SourceSettings) -> Iterator[Record | BadRecord]:
    """The main text of the HTML pages that were answered with status 200; ids and URLs are the archive's.

    Other answers are counted: redirects and errors (`not found`), pictures and scripts (`not HTML`), pages in a
    compression that is not read (`unknown compression`).
    """
    number = 0
    with open_plain(file) as stream:
        try:
            for number, entry in enumerate(ArchiveIterator(stream, record_types=_READ, parse_http=True), 1):
                yield _read_entry(entry, f"{file.name}#{number}")
        except (ValueError, RuntimeError) as error:
            raise DamagedFile(f"the file is damaged: {error}") from None
    if not number and file.bytes:
        raise DamagedFile("the file holds no web page: is it a web archive?")


def _read_entry(entry: Any, place: str) -> Record | BadRecord:
    limit = readers.MAX_RECORD_BYTES
    id = (entry.record_id or place).removeprefix("<urn:uuid:").removesuffix(">")
    url = entry.headers.get("WARC-Target-URI", "").strip("<>")
    html = entry.record_type == WarcRecordType.response
    if html:
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
