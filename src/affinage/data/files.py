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
import os
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa
import requests
from filelock import FileLock
from fsspec.core import has_magic, url_to_fs

from affinage.config.data import SourceSettings
from affinage.data.executor import with_retries
from affinage.errors import TransientError, UserError, first_line, is_transient
from affinage.json_files import encodable

CACHE_VARIABLE = "AFFINAGE_CACHE"
_HASH = "#sha256="  # after a web address: the hash that the file must have; servers do not see it
_WEB = ("http://", "https://")
_TIMEOUT = (10, 30)  # seconds to connect, and between two parts of an answer
_AS_IT_IS = {"Accept-Encoding": "identity"}  # the header of a request for the file, not for a compressed form of it
_KINDS = {
    "text": (".txt", ".md", ".markdown"),  # one document a file
    "lines": (".jsonl", ".ndjson"),  # one document a line
    "table": (".parquet",),  # one document a row
    "warc": (".warc", ".wet"),  # one document a web page
    "dump": (".xml",),  # one document an article of a MediaWiki dump
}
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
        if url.startswith(_WEB):
            place = f"{url}{_HASH}{source.sha256}" if source.sha256 else url
            copy = cached_path(place)
            if copy.is_file() and not source.sha256:
                with contextlib.suppress(requests.RequestException):  # without an answer the copy is what there is
                    if version_of(url) not in ("", _beside(url, ".version").read_text()):
                        copy.unlink()
            size = copy.stat().st_size if copy.is_file() else _ask(url)[1]
            files.append(Part(place, _name(url), kind(_name(url)), size))
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
    if not any(file.kind for file in files):
        what = f"no such file or folder, or nothing in it that can be read: {url!r}"
        what += f"; found {', '.join(file.name for file in files[:3])}" if files else ""
        fix = "Name a file, a folder or a URL of .parquet, .txt, .md, .jsonl, .warc, .wet, or MediaWiki's .xml, also "
        fix += "with .gz, .bz2, .xz or .zst. Relative paths start from `data.root`, else from the working directory."
        raise UserError(what, where=where, fix=fix)
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


def _name(url: str) -> str:
    return re.split("[?#]", url, maxsplit=1)[0].rstrip("/").rpartition("/")[2]


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
    if url.startswith(_WEB):
        return _ask(url)[0]
    content = json.dumps(_listed(url)[2], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


# ---- opening ----


def open_stored(file: Part) -> IO[bytes]:
    """The bytes of a file as they are stored."""
    place = str(cached(file.url)) if file.url.startswith(_WEB) else file.url
    filesystem, path = url_to_fs(place, use_listings_cache=False)
    return cast(IO[bytes], filesystem.open(path, "rb"))


@contextlib.contextmanager
def open_plain(file: Part) -> Iterator[Any]:
    """The decompressed bytes of a file; of one with damage all that come before it."""
    with open_stored(file) as raw, _OPENERS[compression_of(file.name)](raw) as stream:
        yield stream


@contextlib.contextmanager
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


# ---- downloads ----


def cached_path(url: str) -> Path:
    """Where the download of a URL is, or will be: in `$AFFINAGE_CACHE`, else ~/.cache/affinage."""
    folder = Path(os.path.expanduser(os.environ.get(CACHE_VARIABLE) or "~/.cache/affinage"))
    return folder / "files" / hashlib.sha256(url.encode()).hexdigest()[:24] / (_name(url) or "file")


def _beside(url: str, suffix: str) -> Path:
    """A file beside a download: its `.part`, its `.lock`, or its `.version`, as the server states it."""
    path = cached_path(url)
    return path.with_name(path.name + suffix)


def _version_in(answer: requests.Response) -> str:
    return answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""


def _ask(url: str) -> tuple[str, int]:
    """The version and the size of the file at a web address; "" and 0 where they are not stated."""
    answer = requests.head(url, allow_redirects=True, timeout=_TIMEOUT, headers=_AS_IT_IS)
    if answer.status_code in (405, 501):  # the server knows no HEAD
        return "", 0
    answer.raise_for_status()
    return _version_in(answer), int(answer.headers.get("Content-Length", 0))


def cached(url: str) -> Path:
    """The local copy of the file at a web address, which is downloaded if it is not there.

    An interrupted download is resumed if the server's file is still the same; its size is checked against what the
    server says, and its SHA-256 if the URL ends in `#sha256=` and that hash. Of several processes one downloads, the
    others wait. Raises UserError for a file that the server does not have or that is not the expected one, and
    TransientError where it cannot be reached.
    """
    path, part = cached_path(url), _beside(url, ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(_beside(url, ".lock")):
        if path.is_file():
            return path
        try:
            with_retries(partial(_download, url, part), url)
        except requests.RequestException as error:
            what = f"cannot download {url}: {first_line(error.__cause__ or error)}"
            raise UserError(what, fix="Is the address right, and are you allowed to read it?") from None
        expected = url.partition(_HASH)[2]
        with part.open("rb") as file:
            if expected and (digest := hashlib.file_digest(file, "sha256").hexdigest()) != expected:
                part.unlink()
                what = f"the file at {url} is not the expected one: its SHA-256 is {digest}"
                raise UserError(what, fix="Is `sha256` right? The file is downloaded again the next time.")
        return part.replace(path)


def _download(url: str, part: Path) -> None:
    """Append what is missing to `part`; all of the file, where the server has another one than `part` is of."""
    rest, version = {}, _beside(url, ".version")
    if part.is_file() and (former := version.read_text()):
        rest = {"Range": f"bytes={part.stat().st_size}-", "If-Range": former}
    with requests.get(url, headers=_AS_IT_IS | rest, stream=True, timeout=_TIMEOUT) as answer:
        if answer.status_code == 416 and rest:  # it ends where `part` ends, or before
            part.unlink()
            raise ConnectionError("the server has less than was downloaded")
        answer.raise_for_status()
        resumed = answer.status_code == 206
        if not resumed:
            version.write_text(_version_in(answer))
        with part.open("ab" if resumed else "wb") as file:
            for chunk in answer.iter_content(1 << 15):
                file.write(chunk)
