"""Reads MediaWiki XML dumps, such as Wikipedia's: the articles as plain text, streaming, in parts if they have streams.

A multistream dump is bzip2 streams end to end, of about 100 pages each, so that parts of it can be read side by side.
"""

import bz2
import re
import urllib.parse
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from typing import IO
from xml.sax.saxutils import unescape

from mwparserfromhell.parser import ParserError

from affinage.config.data import SourceSettings
from affinage.data import readers
from affinage.data.files import CHUNK_BYTES, DamagedFile, SourceFile, compression_of, open_plain, open_stored
from affinage.data.readers import BadRecord, Record
from affinage.data.wikitext import wikitext_to_text

LICENSE = "cc-by-sa-4.0"
_STREAM = re.compile(rb"BZh[1-9]\x31\x41\x59\x26\x53\x59")  # how a bzip2 stream begins: 10 bytes, at a whole byte
_HEAD_BYTES = 1_000_000
_LANGUAGE = re.compile(r'<mediawiki[^>]*\bxml:lang="([\w-]+)"')
_NAMESPACE = re.compile(r'<namespace key="(?:6|14)"[^>]*>([^<]*)</namespace>')  # links to files and categories: no text
_BASE = re.compile(r"<base>([^<]*)/[^/<]*</base>")


def read_dump(file: SourceFile, settings: SourceSettings) -> Iterator[Record | BadRecord]:
    """The articles (namespace 0, no redirects) of a dump, or of the streams that begin in the file's part of it.

    Ids are the page ids; what is no article is left out without being counted.
    """
    with open_plain(file) as stream:
        head = stream.read(_HEAD_BYTES).decode("utf-8", "replace")
    language, base = _LANGUAGE.search(head), _BASE.search(head)
    if "<mediawiki" not in head or base is None:
        raise DamagedFile("the file is no MediaWiki dump: it does not begin with <mediawiki> and <siteinfo>")
    dropped = frozenset({"file", "image", "category", *map(str.lower, _NAMESPACE.findall(head))})
    content = _streams(file) if compression_of(file.name) == ".bz2" else _whole(file)
    for page in _pages(content, file):
        record = page if isinstance(page, BadRecord) else _article(page, file.name, unescape(base[1]), dropped)
        if isinstance(record, Record):
            yield Record(**vars(record) | {"language": language[1] if language else "", "license": LICENSE})
        elif record is not None:
            yield record


def _whole(file: SourceFile) -> Iterator[bytes]:
    with open_plain(file) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk


def _streams(file: SourceFile) -> Iterator[bytes]:
    """The content of all bzip2 streams that begin in [file.start, file.stop), each to its end."""
    stop = file.bytes if file.stop is None else file.stop
    with open_stored(file) as raw:
        start = _next_stream(raw, file.start, stop)
        while start is not None:
            raw.seek(start)
            decompressor = bz2.BZ2Decompressor()
            while not decompressor.eof:
                chunk = raw.read(CHUNK_BYTES) if decompressor.needs_input else b""
                if not chunk and decompressor.needs_input:
                    raise EOFError("the last bzip2 stream has no end")
                yield decompressor.decompress(chunk, 1 << 20)
            start = _next_stream(raw, raw.tell() - len(decompressor.unused_data), stop)


def _next_stream(raw: IO[bytes], start: int, stop: int) -> int | None:
    """Where the first stream at or after `start` begins, if that is before `stop`."""
    raw.seek(start)
    window = b""  # the bytes from `start` on
    while start < stop and (chunk := raw.read(CHUNK_BYTES)):
        window += chunk
        if found := _STREAM.search(window):
            return start + found.start() if start + found.start() < stop else None
        start, window = start + max(0, len(window) - 9), window[-9:]
    return None


def _pages(content: Iterator[bytes], file: SourceFile) -> Iterator[bytes | BadRecord]:
    """The `<page>` elements, one by one; one over the limit is skipped without being held.

    Raises DamagedFile where the end of the dump should be in this content, and is not.
    """
    limit = min(16_000_000, readers.MAX_RECORD_BYTES)  # MediaWiki itself takes no article over 2 MB
    buffer, tail, number, skipping = b"", b"", 0, False
    for chunk in content:
        buffer += chunk
        tail = (tail + chunk[-100:])[-100:]
        *pages, buffer = buffer.split(b"</page>")
        for page in pages:
            number += not skipping
            if not skipping and (start := page.find(b"<page>")) >= 0:
                yield page[start:] + b"</page>"
            skipping = False
        if skipping or b"<page>" not in buffer:
            buffer = buffer[-7:]
        elif len(buffer) > limit:
            number, skipping = number + 1, True
            yield BadRecord(f"{file.name}#{number}", "too large", f"a page over {limit / 1e6:.0f} MB")
    if file.stop in (None, file.bytes) and tail and b"</mediawiki>" not in tail:
        raise DamagedFile("the file is cut off: the dump has no </mediawiki>")


def _article(page: bytes, name: str, base: str, dropped: frozenset[str]) -> Record | BadRecord | None:
    """The article in a `<page>`; URLs of the wiki begin with `base`, links to the namespaces `dropped` are no text."""
    try:
        element = ElementTree.fromstring(page)
        if element.findtext("ns") != "0" or element.find("redirect") is not None:
            return None
        id, title = element.findtext("id") or "", element.findtext("title") or ""
        text = wikitext_to_text(element.findtext("revision/text") or "", dropped)
    except (ElementTree.ParseError, ParserError, RecursionError) as error:
        return BadRecord(name, "wikitext cannot be parsed", str(error), page[:200].decode("utf-8", "replace"))
    if not text:
        return BadRecord(id, "empty", f"no text in the article {title!r}")
    return Record(id, f"{title}\n\n{text}", url=f"{base}/{urllib.parse.quote(title.replace(' ', '_'), safe='/:(),')}")
