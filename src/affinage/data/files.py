"""The files of a source: which there are, what kind each is, and how to open it wherever and however it is stored."""

import bz2
import io
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Any, cast

import pyarrow as pa
import zstandard
from fsspec.core import has_magic

from affinage.config.data import SourceSettings
from affinage.data.downloads import cached, cached_path, file_system, is_web
from affinage.data.hub_answers import refusal_of
from affinage.data.places import is_url, leads_back, printable
from affinage.errors import TransientError, UserError, first_line, is_transient

READABLE = ".txt, .md, .jsonl, .warc, .wet, MediaWiki's .xml (each also .gz, .zst, .bz2, .xz) and .parquet"
CHUNK_BYTES = 1 << 16  # read at once
_PIECE_BYTES = 1 << 8  # decompressed at once: a few bytes can stand for 128 KB
_ZSTD_WINDOW = 1 << 31  # bytes; what `zstd --long=31` writes, as many published dumps are
_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(zlib.MAX_WBITS | 16),
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lzma.LZMADecompressor,
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj(),
}
_KINDS = {
    "text": (".txt", ".md", ".markdown"),  # one document a file
    "lines": (".jsonl", ".ndjson"),  # one document a line
    "table": (".parquet",),  # one document a row
    "warc": (".warc", ".wet"),  # one document a web page
    "dump": (".xml",),  # one document an article of a MediaWiki dump
}
# Source code is one document a file too, whatever its suffix; these are known not to be text.
_NO_CODE = (".png", ".jpg", ".gif", ".pdf", ".zip", ".tar", ".so", ".o", ".pyc", ".class", ".exe", ".bin", ".ico")
_EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3"}  # protocol: the extra of affinage with the packages for it


class DamagedFile(Exception):
    """A file that cannot be read to its end, or is not what its name says. `str()` of it is the reason."""


@dataclass(frozen=True)
class SourceFile:
    """One file of a source; `name` is its path within the source, the same on every machine."""

    url: str
    name: str
    bytes: int
    fetched: bool = False  # read from the cache of downloads, into which it comes first
    sha256: str = ""
    start: int = 0  # a part of a file: the lines, row groups or streams that begin in bytes [start, stop)
    stop: int | None = None


# ---- kinds ----


def compression_of(name: str) -> str:
    """The suffix that says how a file is compressed, or ""."""
    return next((suffix for suffix in _DECOMPRESSORS if name.lower().endswith(suffix)), "")


def kind_of(name: str, *, code: bool = False) -> str:
    """`text`, `lines`, `table`, `warc` or `dump` by the name's suffix; "" if affinage does not read such files.

    In a source of `code`, files of other names are text as well.
    """
    bare = name.lower().removesuffix(compression_of(name))
    found = next((kind for kind, suffixes in _KINDS.items() if bare.endswith(suffixes)), "")
    if found == "table" and compression_of(name):
        found = ""
    return "text" if code and found in ("", "dump") and not bare.endswith(_NO_CODE) else found


# ---- opening ----


class _Decompressed(io.RawIOBase):
    """The decompressed bytes of all members or frames of a file; of a damaged file all that come before the damage."""

    def __init__(self, raw: IO[bytes], compression: str) -> None:
        self._chunks, self._ready, self._read = self._decompress(raw, _DECOMPRESSORS[compression]), b"", 0

    @staticmethod
    def _decompress(raw: IO[bytes], new: Callable[[], Any]) -> Iterator[bytes]:
        member, compressed = None, b""
        while compressed or (compressed := raw.read(CHUNK_BYTES)):
            if member is None:
                compressed = compressed.lstrip(b"\0")  # padding between members, as tapes and some tools leave it
                if not compressed:
                    continue
                member = new()
            piece, compressed = compressed[:_PIECE_BYTES], compressed[_PIECE_BYTES:]
            yield member.decompress(piece, *([CHUNK_BYTES] if hasattr(member, "needs_input") else []))
            while not member.eof and not getattr(member, "needs_input", True):  # bz2's and lzma's hold the rest back
                yield member.decompress(b"", CHUNK_BYTES)
            if member.eof:
                compressed, member = member.unused_data + compressed, None
        if member is not None:
            raise EOFError("the compressed data has no end")

    def readable(self) -> bool:
        return True

    def tell(self) -> int:  # for FastWARC
        return self._read

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._ready = chunk
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        self._read += size
        return size


def open_stored(file: SourceFile) -> IO[bytes]:
    """The bytes of a file as they are stored."""
    filesystem, place = file_system(str(cached(file.url, file.sha256)) if file.fetched else file.url)
    return cast(IO[bytes], filesystem.open(place, "rb"))


def open_plain(file: SourceFile) -> IO[bytes]:
    """The decompressed bytes of a file."""
    raw, compression = open_stored(file), compression_of(file.name)
    return io.BufferedReader(_Decompressed(raw, compression), CHUNK_BYTES) if compression else raw


@contextmanager
def reports_damage() -> Iterator[None]:
    """Turn the many ways in which reading fails into DamagedFile, but not a network that fails: that passes."""
    try:
        yield
    except EOFError:
        raise DamagedFile("the file is cut off: its compressed data has no end") from None
    except (zlib.error, lzma.LZMAError, zstandard.ZstdError, pa.ArrowException, OSError) as error:
        if is_transient(error):
            raise
        raise DamagedFile(f"the file is damaged or cannot be read: {error}") from None


# ---- finding ----


def find(url: str, source: SourceSettings, where: str) -> tuple[list[SourceFile], list[str]]:
    """The readable files at a URL, sorted by name, and the names of the others in a folder.

    Raises UserError if there is none, and TransientError where the network fails.
    """
    try:
        files, unreadable = _find(url, source)
    except (ImportError, ValueError) as error:
        extra = _EXTRAS.get(url.partition("://")[0])
        fix = f"Install it: pip install 'affinage[{extra}]'." if extra else ""
        raise UserError(f"cannot open {url!r}: {error}", where=where, fix=fix) from None
    except Exception as error:  # OSError, and each library's own
        if refused := refusal_of(url, error, where):
            raise refused from None
        raise (TransientError if is_transient(error) else UserError)(
            f"cannot reach {url!r}: {first_line(error)}",
            where=where,
            fix="Is there a network, and are you allowed to read it? A copy can be named in data.mirror.",
        ) from None
    if not files and unreadable:
        found = ", ".join(unreadable[:3])
        what = f"no file of a kind that can be read in {url!r}; found {found}"
        raise UserError(what, where=where, fix=f"affinage reads {READABLE}.")
    if not files:
        raise UserError(
            f"no such file or folder, or nothing in it: {url!r}",
            where=where,
            fix="Put it there, or name text of yours (a file, a folder, a URL): --set data.sources='[my_text.txt]'. "
            "Relative paths start from `data.root` if it is set, else from the working directory.",
        )
    if source.sha256 and len(files) > 1:
        raise UserError(f"`sha256` is of one file, and {len(files)} are in {url!r}", where=where)
    return files, unreadable


def _find(url: str, source: SourceSettings) -> tuple[list[SourceFile], list[str]]:
    if is_web(url):
        return [_web_file(url, source)], []
    filesystem, path = file_system(url)
    # The literal path comes first: file names may contain the characters of a glob.
    info = _info(filesystem, path, url)
    if info is None and has_magic(path):
        base = re.split(r"[*?\[]", path, maxsplit=1)[0].rpartition("/")[0]
        matches = filesystem.glob(path, detail=True)
        # A link to a file has a type of its own, and is as good as the file.
        found = {file: info for file, info in matches.items() if info["type"] == "file" or filesystem.isfile(file)}
    elif info is not None and filesystem.isdir(path):
        base = path.rstrip("/")
        found = _all_in(filesystem, base)
    else:
        base, found = path.rstrip("/").rpartition("/")[0], {} if info is None else {path: info}
    files: list[SourceFile] = []
    unreadable: list[str] = []
    for path in sorted(found):
        name = printable(path.removeprefix(base).lstrip("/"))
        if any(part.startswith(".") for part in PurePosixPath(name).parts):
            continue
        if kind_of(name, code=source.kind == "code"):
            files.append(SourceFile(filesystem.unstrip_protocol(path), name, int(found[path].get("size") or 0)))
        else:
            unreadable.append(name)
    return files, unreadable


def _info(filesystem: Any, path: str, url: str) -> dict[str, Any] | None:
    """What is known of a file or folder; None where there is none. (`exists` is false also where it could not ask.)"""
    try:
        return dict(filesystem.info(path))
    except FileNotFoundError as error:
        if is_url(url) and refusal_of(url, error):
            raise
        return None


def _all_in(filesystem: Any, folder: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """All files below a folder, those behind links to folders too; a link to a folder that it is in leads nowhere."""
    found: dict[str, Any] = filesystem.find(folder, detail=True)
    above = (*above, os.path.realpath(folder))
    for path in [path for path, info in found.items() if info.get("islink")]:
        if filesystem.isdir(path):
            del found[path]
            if not leads_back(path, above):
                found |= _all_in(filesystem, path, above)
    return found


def _web_file(url: str, source: SourceSettings) -> SourceFile:
    """The file at a web address; what is in the cache needs no network."""
    name, copy = PurePosixPath(url.split("?", 1)[0]).name, cached_path(url)
    if source.download and copy.is_file():
        size = copy.stat().st_size
    else:
        filesystem, path = file_system(url)
        size = int(filesystem.info(path).get("size") or 0)  # raises FileNotFoundError where there is none
    return SourceFile(url, name, size, source.download, source.sha256)
