"""The files of a source: which there are, what kind each is, and how to open it wherever and however it is stored."""

import bz2
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Any, ClassVar, cast

import pyarrow as pa

from affinage.config.data import SourceSettings
from affinage.data.downloads import cached, file_system, is_web, listed, size_of
from affinage.data.places import printable
from affinage.errors import TransientError, UserError, first_line, is_transient

CHUNK_BYTES = 1 << 16  # read at once
_KINDS = {
    "text": (".txt", ".md", ".markdown"),  # one document a file
    "lines": (".jsonl", ".ndjson"),  # one document a line
    "table": (".parquet",),  # one document a row
    "warc": (".warc", ".wet"),  # one document a web page
    "dump": (".xml",),  # one document an article of a MediaWiki dump
}
# Source code is one document a file too, whatever its suffix; these are known not to be text.
_NO_CODE = (".png", ".jpg", ".gif", ".pdf", ".zip", ".tar", ".so", ".o", ".pyc", ".class", ".exe", ".bin", ".ico")


class DamagedFile(Exception):
    """A file that cannot be read to its end, or is not what its name says. `str()` of it is the reason."""


@dataclass(frozen=True)
class SourceFile:
    """One file of a source; `name` is its path within the source, the same on every machine."""

    url: str  # what is at a web address is read from the cache of downloads
    name: str
    kind: str  # see `kind_of`
    bytes: int
    sha256: str = ""
    start: int = 0  # a part of a file: the lines or row groups that begin in bytes [start, stop)
    stop: int | None = None

    @property
    def stored(self) -> int:
        """Bytes of it, or of the part, as stored."""
        return (self.bytes if self.stop is None else self.stop) - self.start


@dataclass(frozen=True)
class DatasetPart:
    """Part `index` of `parts` of a dataset: one of its files. `name` is for ids and messages."""

    name: str  # the same on every machine
    index: int
    parts: int
    kind: ClassVar[str] = "dataset"
    stored: ClassVar[int] = 1  # its bytes are not known


Part = SourceFile | DatasetPart


# ---- kinds and opening ----


_OPENERS: dict[str, Callable[[Any], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    # Arrow's: zstandard's own takes a file that is cut off for a whole one. A small buffer loses little before damage.
    ".zst": lambda raw: io.BufferedReader(pa.CompressedInputStream(raw, "zstd")),
    "": lambda raw: io.BufferedReader(raw, CHUNK_BYTES),
}


def compression_of(name: str) -> str:
    """The suffix that says how a file is compressed, or ""."""
    return next(suffix for suffix in _OPENERS if name.lower().endswith(suffix))


def kind_of(name: str, *, code: bool = False) -> str:
    """`text`, `lines`, `table`, `warc` or `dump` by the name's suffix; "" if affinage does not read such files.

    In a source of `code`, files of other names are text as well.
    """
    bare = re.sub(r"\.xml-p\d+p\d+$", ".xml", name.lower().removesuffix(compression_of(name)))  # parts of a dump
    kind = next((kind for kind, suffixes in _KINDS.items() if bare.endswith(suffixes)), "")
    if (kind == "table" and compression_of(name)) or (kind == "warc" and compression_of(name) == ".zst"):
        kind = ""
    return "text" if code and kind in ("", "dump") and not bare.endswith(_NO_CODE) else kind


def open_stored(file: SourceFile) -> IO[bytes]:
    """The bytes of a file as they are stored."""
    filesystem, place = file_system(str(cached(file.url, file.sha256)) if is_web(file.url) else file.url)
    return cast(IO[bytes], filesystem.open(place, "rb"))


@contextmanager
def open_plain(file: SourceFile) -> Iterator[Any]:
    """The decompressed bytes of a file; of one with damage all that come before it."""
    with open_stored(file) as raw, _OPENERS[compression_of(file.name)](raw) as stream:
        yield stream


@contextmanager
def reports_damage() -> Iterator[None]:
    """Turn the many ways in which reading fails into DamagedFile, but not a network that fails: that passes."""
    try:
        yield
    except EOFError:
        raise DamagedFile("the file is cut off: its compressed data has no end") from None
    except (zlib.error, lzma.LZMAError, pa.ArrowException, UnicodeError, OSError) as error:
        if is_transient(error):
            raise
        raise DamagedFile(f"the file is damaged or cannot be read: {error}") from None


# ---- finding ----


def find(url: str, source: SourceSettings, where: str) -> list[SourceFile]:
    """The files at a URL, sorted by name; those of a folder that are not readable have the kind "" and no bytes.

    Raises UserError if none is readable, and TransientError where the network fails.
    """
    files: list[SourceFile] = []
    code = source.kind == "code"
    try:
        if is_web(url):
            name = PurePosixPath(url.split("?", 1)[0]).name
            size = size_of(url, source.sha256)
            files.append(SourceFile(url, name, kind_of(name, code=code), size, source.sha256))
        else:
            filesystem, base, entries = listed(url)
            for path in sorted(path for path, entry in entries.items() if entry["type"] != "directory"):
                name = printable(path.removeprefix(base).lstrip("/"))
                if not any(part.startswith(".") for part in PurePosixPath(name).parts):
                    kind = kind_of(name, code=code)
                    size = int(entries[path].get("size") or 0) if kind else 0
                    files.append(SourceFile(filesystem.unstrip_protocol(path), name, kind, size))
    except FileNotFoundError:
        pass  # as where there is nothing in it
    except Exception as error:  # OSError, and each library's own
        fix = "Is there a network, and are you allowed to read it? gs:// needs pip install 'affinage[gcs]', s3:// "
        fix += "'affinage[s3]'. A copy can be named in data.mirror."
        kind_of_error = TransientError if is_transient(error) else UserError
        raise kind_of_error(f"cannot reach {url!r}: {first_line(error)}", where=where, fix=fix) from None
    if not any(file.kind for file in files):
        what = f"no such file or folder, or nothing in it that can be read: {url!r}"
        what += f"; found {', '.join(file.name for file in files[:3])}" if files else ""
        fix = "Name text of yours (a file, a folder, a URL): --set data.sources='[my_text.txt]', of kind .txt, .md, "
        fix += ".jsonl, .warc, .wet, MediaWiki's .xml (also .gz, .zst, .bz2, .xz) or .parquet. Relative paths start "
        fix += "from `data.root` if it is set, else from the working directory."
        raise UserError(what, where=where, fix=fix)
    return files
