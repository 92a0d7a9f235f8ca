"""What a web server sent, as archives keep it: cut into chunks and compressed, where its header says so."""

import zlib
from collections.abc import Mapping

import zstandard

from affinage.data import records

_ANY = zlib.MAX_WBITS | 32  # gzip or zlib, whichever the first bytes say


class UnknownCoding(Exception):
    """A compression that is not read here. `str()` of it is its name."""


def plain_body(content: bytes, headers: Mapping[str, str]) -> bytes:
    """The body of an answer without its transfer and content codings, at most `MAX_RECORD_BYTES` + 1 of it.

    Many archives hold bodies that were decoded already, under the header of before: what is not coded as the header
    says is taken as it is. Raises UnknownCoding for codings other than gzip, deflate and zstd.
    """
    if "chunked" in _codings(headers, "Transfer-Encoding"):
        content = _joined(content)
    for coding in reversed(_codings(headers, "Content-Encoding")):
        content = _inflated(content, coding)
    return content


def _codings(headers: Mapping[str, str], name: str) -> list[str]:
    told = (headers.get(name) or "").lower().split(",")
    return [coding for each in told if (coding := each.strip()) not in ("", "identity", "none")]


def _joined(content: bytes) -> bytes:
    """The chunks end to end (RFC 9112, section 7.1)."""
    parts: list[bytes] = []
    at = 0
    while at < len(content):
        end = content.find(b"\r\n", at)
        try:
            size = int(content[at : max(end, at)].split(b";")[0].strip(), 16)
        except ValueError:
            return content
        start, stop = end + 2, end + 2 + size
        if size < 0 or (stop < len(content) and content[stop : stop + 2] != b"\r\n"):
            return content
        if size == 0:
            break
        parts.append(content[start:stop])
        at = stop + 2
    return b"".join(parts)


def _inflated(content: bytes, coding: str) -> bytes:
    limit = records.MAX_RECORD_BYTES + 1
    try:
        match coding:
            case "gzip" | "x-gzip":
                return zlib.decompressobj(_ANY).decompress(content, limit)
            case "deflate":
                try:
                    return zlib.decompressobj(_ANY).decompress(content, limit)
                except zlib.error:  # without the header that it should have
                    return zlib.decompressobj(-zlib.MAX_WBITS).decompress(content, limit)
            case "zstd":
                with zstandard.ZstdDecompressor().stream_reader(content) as stream:
                    return stream.read(limit)
    except (zlib.error, zstandard.ZstdError):
        return content
    if _is_text(content):
        return content
    raise UnknownCoding(coding)


def _is_text(content: bytes) -> bool:
    return content.lstrip()[:1] == b"<"
