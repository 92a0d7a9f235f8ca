"""Pages of web archives as servers sent them: in chunks, compressed, in charsets that are none."""

import gzip
import zlib

import pytest
import zstandard

from affinage.data.opening import SourceFile
from affinage.data.readers import read_records
from affinage.data.records import BadRecord
from affinage.recipe.data import SourceSettings
from source_forms import html, prose

PAGE = html("Bridges", [prose("en", 1), prose("en", 2)])


def chunked(body: bytes, size: int = 100) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x;note=1\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def raw_deflate(body: bytes) -> bytes:
    made = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return made.compress(body) + made.flush()


def archived(tmp_path, body: bytes, *headers: str, kind: str = "text/html"):
    """What is read of an archive with one page, as its server sent it."""
    head = "\r\n".join(["HTTP/1.1 200 OK", f"Content-Type: {kind}", *headers, "", ""])
    content = head.encode() + body
    warc = (
        "WARC/1.0\r\nWARC-Type: response\r\nWARC-Record-ID: <urn:uuid:1>\r\nWARC-Target-URI: https://a.example/\r\n"
        f"Content-Type: application/http; msgtype=response\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    path = tmp_path / "a.warc"
    path.write_bytes(warc.encode() + content + b"\r\n\r\n")
    file = SourceFile(str(path), path.name, path.stat().st_size)
    (record,) = read_records(file, SourceSettings(path=str(path)))
    return record


CODED = {
    "gzip": (gzip.compress(PAGE), "Content-Encoding: gzip"),
    "deflate": (zlib.compress(PAGE), "Content-Encoding: Deflate"),
    "raw deflate": (raw_deflate(PAGE), "Content-Encoding: deflate"),
    "zstd": (zstandard.compress(PAGE), "Content-Encoding: zstd"),
    "chunked": (chunked(PAGE), "Transfer-Encoding: chunked"),
    "chunked gzip": (chunked(gzip.compress(PAGE)), "Transfer-Encoding: chunked\r\nContent-Encoding: x-gzip"),
}


@pytest.mark.parametrize("coded", CODED)
def test_a_page_is_read_as_it_was_before_it_was_sent(tmp_path, coded):
    body, headers = CODED[coded]
    assert archived(tmp_path, body, headers).text == archived(tmp_path, PAGE).text
    assert prose("en", 1) in archived(tmp_path, body, headers).text


@pytest.mark.parametrize("header", ["Content-Encoding: gzip", "Content-Encoding: br", "Transfer-Encoding: chunked"])
def test_an_archive_that_has_undone_the_coding_and_kept_the_header(tmp_path, header):
    assert prose("en", 2) in archived(tmp_path, PAGE, header).text


def test_what_is_compressed_in_a_way_that_is_not_read_is_counted(tmp_path):
    found = archived(tmp_path, b"\x1b\x9f\x00\x00\xa4", "Content-Encoding: br")
    assert isinstance(found, BadRecord) and found.reason == "unknown compression" and "br" in found.detail


def test_a_small_body_that_swells_is_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr("affinage.data.records.MAX_RECORD_BYTES", 10_000)
    found = archived(tmp_path, gzip.compress(bytes(1_000_000)), "Content-Encoding: gzip")
    assert isinstance(found, BadRecord) and found.reason == "too large"


@pytest.mark.parametrize("charset", ["none", "utf8mb4", "rot13", "hex", "idna", '"'])
def test_a_charset_that_is_none_is_guessed(tmp_path, charset):
    body = "<p>déjà la fenêtre, où l’été s’attarde</p>".encode()
    assert "déjà la fenêtre" in archived(tmp_path, body, kind=f"text/html; charset={charset}").text
