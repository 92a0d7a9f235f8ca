"""The files of a source: which there are, what kind each is, and how to open it wherever and however it is stored.

Files at web addresses are downloaded once into a cache and checked; those in buckets and on the Hub are read in place.
"""

import bz2
import contextlib
import gzip
import hashlib
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, cast

import pyarrow as pa
from fsspec.core import has_magic, url_to_fs

from affinage.config.data import SourceSettings
from affinage.downloads import WEB, cached, look_up, name_in, stated
from affinage.errors import OF_NO_FILE, TransientError, UserError, errno_of, first_line, is_transient
from affinage.json_files import encodable

_KINDS = {
    "text": (".txt", ".md", ".markdown"),  # one document a file
    "lines": (".jsonl", ".ndjson"),  # one document a line
    "table": (".parquet",),  # one document a row
    "warc": (".warc", ".wet"),  # one document a web page
    "dump": (".xml",),  # one document an article of a MediaWiki dump
}
LINES = "one JSON object a line; of an array, `jq -c '.[]' a.json > a.jsonl` makes such lines"
# Source code is one document a file too, whatever its suffix; these are known not to be text.
_NO_CODE = (".png", ".jpg", ".gif", ".pdf", ".zip", ".tar", ".so", ".o", ".pyc", ".class", ".exe", ".bin", ".ico")
_OPENERS: dict[str, Callable[[Any], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    # Arrow's: zstandard's own takes a file that is cut off for a whole one. A small buffer loses little before damage.
    ".zst": lambda raw: io.BufferedReader(pa.CompressedInputStream(raw, "zstd")),
    "": lambda raw: io.BufferedReader(raw, 1 << 16),
}


class DamagedFile(Exception):
    """A file that cannot be read to its end, or is not what its name says. `str()` of it is the reason."""


@dataclass(frozen=True)
class Part:
    """A file of a source, a part of one, or a part of a dataset."""

    url: str  # "" of a dataset; what is at a web address is read from the cache of downloads, see `cached`
    name: str  # the path within the source, the same on every machine
    kind: str  # see `kind_of`, or dataset
    bytes: int  # as stored, of the file or the part; 1 of a part of a dataset, for which they are not known
    # Of a part of a file those of its lines or row groups that begin in bytes [start, stop). Of a part of a dataset
    # which one it is, and how many there are.
    start: int = 0
    stop: int | None = None


# ---- finding ----


def find(url: str, source: SourceSettings, where: str) -> list[Part]:
    """The files at a URL, sorted by name; those of a folder that are not readable have the kind "" and no bytes.

    Of a file at a web address, a copy here goes if its server has another version. Raises UserError if no file is
    readable, and TransientError where the network fails.
    """
    files: list[Part] = []
    kind = partial(kind_of, code=source.kind == "code")
    try:
        if url.startswith(WEB):
            place, size = look_up(url, source.sha256)
            files.append(Part(place, name_in(url), kind(name_in(url)), size))
        else:
            filesystem, base, entries = _listed(url)
            for path, entry in sorted(entries.items()):
                name = encodable(path.removeprefix(base).lstrip("/"))
                if entry["type"] != "directory" and not re.search(r"(^|/)\.", name):
                    size = int(entry.get("size") or 0) if kind(name) else 0
                    files.append(Part(filesystem.unstrip_protocol(path), name, kind(name), size))
    except FileNotFoundError:
        pass  # as where there is nothing in it
    except Exception as error:  # OSError, and each library's own
        fix = "Is there a network, and are you allowed to read it? gs:// needs pip install 'affinage[gcs]', s3:// "
        fix += "'affinage[s3]'. A copy can be named in data.mirror."
        kind_of_error = TransientError if is_transient(error) else UserError
        raise kind_of_error(f"cannot reach {url!r}: {first_line(error)}", where=where, fix=fix) from None
    if not any(file.kind and (file.bytes or url.startswith(WEB)) for file in files):  # servers may give no size
        found = ", ".join(f"{file.name} (empty)" if file.kind else file.name for file in files[:3])
        what = f"nothing in {url!r} can be read; there is {found}" if found else f"there is no file at {url!r}"
        fix = "Name a file, a folder or a URL of .parquet, .txt, .md, .jsonl, MediaWiki's .xml, .warc or .wet, also "
        fix += ".gz, .bz2, .xz or (no .warc, .wet) .zst. Relative paths start from `data.root` or the working folder."
        raise UserError(what, where=where, fix=f"It must have {LINES}." if re.search(r"\.json\b", found) else fix)
    return files


def compression_of(name: str) -> str:
    """The suffix that says how a file is compressed, or ""."""
    return next(suffix for suffix in _OPENERS if name.lower().endswith(suffix))


def kind_of(name: str, *, code: bool = False) -> str:
    """`text`, `lines`, `table`, `warc` or `dump` by the name's suffix; "" if affinage does not read such files.

    In a source of `code`, files of other names are text as well.
    """
    compression = compression_of(name)
    bare = re.sub(r"\.xml-p\d+p\d+$", ".xml", name.lower().removesuffix(compression))  # parts of a dump
    kind = next((kind for kind, suffixes in _KINDS.items() if bare.endswith(suffixes)), "")
    if (kind == "table" and compression) or (kind == "warc" and compression == ".zst"):
        kind = ""
    return "text" if code and kind in ("", "dump") and not bare.endswith(_NO_CODE) else kind


def _listed(url: str) -> tuple[Any, str, dict[str, dict[str, Any]]]:
    """What is at a URL: fsspec's file system, the folder that names start from, and the entries by path."""
    filesystem, path = url_to_fs(url, use_listings_cache=False)
    if has_magic(path) and not filesystem.exists(path):  # names of files may contain the characters of a glob
        folder = re.split(r"[*?\[]", path, maxsplit=1)[0].rpartition("/")[0]
        return filesystem, folder, filesystem.glob(path, detail=True)
    entry = filesystem.info(path)
    if entry["type"] == "directory":
        return filesystem, path.rstrip("/"), filesystem.find(path, detail=True)
    return filesystem, path.rpartition("/")[0], {path: entry}


def version_of(url: str) -> str:
    """The version of a file, folder or glob at a server or in a bucket: its ETag, else time of change.

    Returns "" where the server gives none. Raises the error of the library if it does not answer.
    """
    if url.startswith(WEB):
        return stated(url)[0]
    content = json.dumps(_listed(url)[2], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


# ---- opening ----


def open_stored(file: Part) -> IO[bytes]:
    """The bytes of a file as they are stored."""
    place = str(cached(file.url)) if file.url.startswith(WEB) else file.url
    filesystem, path = url_to_fs(place, use_listings_cache=False)
    return cast(IO[bytes], filesystem.open(path, "rb"))


@contextlib.contextmanager
def open_plain(file: Part) -> Iterator[Any]:
    """The decompressed bytes of a file; of one with damage all that come before it."""
    with open_stored(file) as raw, _OPENERS[compression_of(file.name)](raw) as stream:
        yield stream


@contextlib.contextmanager
def reports_damage() -> Iterator[None]:
    """Turn the many ways in which reading fails into DamagedFile, but not failures of a network or of this machine."""
    try:
        yield
    except EOFError:
        raise DamagedFile("the file is cut off: its compressed data has no end") from None
    except (zlib.error, lzma.LZMAError, pa.ArrowException, UnicodeError, OSError) as error:
        if is_transient(error) or errno_of(error) in OF_NO_FILE:
            raise
        raise DamagedFile(f"the file is damaged or cannot be read: {error}") from None
