"""Files at web addresses, downloaded once into a cache; a download that broke off is resumed, and what came is checked.

Files in buckets and on the Hub are read in place, by their own clients.
"""

import hashlib
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from filelock import FileLock
from fsspec.core import has_magic, url_to_fs

from affinage.data.atomic import write_json
from affinage.data.executor import with_retries
from affinage.errors import UserError, first_line, is_transient
from affinage.paths import from_home

CACHE_VARIABLE = "AFFINAGE_CACHE"
BLOCK_BYTES = 16_000_000  # fetched at once: a connection that breaks loses no more
_WAIT = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=30)  # seconds
_VERSION_KEYS = ("etag", "ETag", "md5Hash", "blob_id", "generation")  # of file systems' entries, and times of change:
_TIME_KEYS = ("LastModified", "last_modified", "Last-Modified", "updated", "mtime", "created")

_versions: dict[str, str] = {}  # URL -> the version that the server had when this process asked


class Unreachable(Exception):
    """The server does not answer now."""


def is_web(url: str) -> bool:
    """Whether a URL is a web address, of which a copy is downloaded."""
    return url.startswith(("http://", "https://"))


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it; passwords of web addresses are in ~/.netrc (or NETRC)."""
    options = {"client_kwargs": {"trust_env": True, "timeout": _WAIT}} if is_web(url) else {}
    filesystem, place = url_to_fs(url, use_listings_cache=False, **options)
    return filesystem, str(place)


def cache_folder() -> Path:
    """Where downloads are kept: `$AFFINAGE_CACHE`, else ~/.cache/affinage."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return from_home(chosen) if chosen else Path.home() / ".cache" / "affinage"


def cached_path(url: str) -> Path:
    """Where the download of a URL is, or will be."""
    digest = hashlib.sha256(url.encode()).hexdigest()[:24]
    return cache_folder() / "downloads" / digest / (url.split("?", 1)[0].rstrip("/").rpartition("/")[2] or "file")


# ---- versions ----


def version_of(url: str, *, again: bool = False) -> str:
    """The version of a file, folder or glob at a server or in a bucket: its ETag, else size and time of change.

    Returns "" where the server gives none. It is asked once in a process, unless `again`. Raises Unreachable if it does
    not answer (once; then its version is not known).
    """
    if url not in _versions or again:
        _versions[url] = ""
        try:
            _versions[url] = _version(url)
        except Exception as error:  # each library has its own
            if not is_web(url) or is_transient(error):  # else it does not answer such questions
                raise Unreachable(first_line(error.__cause__ or error)) from error
    return _versions[url]


def _version(url: str) -> str:
    filesystem, place = file_system(url)
    try:
        entry = filesystem.info(place)
        found = filesystem.find(place, detail=True) if entry["type"] == "directory" else {place: entry}
    except FileNotFoundError:
        if is_web(url):
            raise
        found = filesystem.glob(place, detail=True) if has_magic(place) else {}
    versions = {name: _version_in(entry) for name, entry in sorted(found.items())}
    if len(versions) == 1 or not all(versions.values()):
        return next(iter(versions.values())) if len(versions) == 1 else ""
    digest = hashlib.sha256(json.dumps(versions).encode()).hexdigest()
    return f"{len(versions)} files, {digest[:32]}"


def _version_in(entry: Any) -> str:
    if version := next((entry[key] for key in _VERSION_KEYS if entry.get(key)), None):
        return str(version)
    changed = next((entry[key] for key in _TIME_KEYS if entry.get(key)), None)
    return f"{entry.get('size')} bytes, {changed}" if changed else ""


def version_of_copy(url: str) -> str:
    """The version of the downloaded copy; "" if there is none, or its version is not known."""
    return str(_facts(url).get("version") or "") if cached_path(url).is_file() else ""


def forget(url: str) -> None:
    """Remove the downloaded copy of a URL."""
    _versions.pop(url, None)
    cached_path(url).unlink(missing_ok=True)


# ---- downloading ----


def cached(url: str, sha256: str = "") -> Path:
    """The local copy of the file at a web address, which is downloaded if it is not there.

    What an interrupted download left is kept beside it as `.part` and resumed, if the server's file is still the
    same; its size is checked against what the server says, its SHA-256 against `sha256` if that is given. Safe to
    call from several processes at once: one downloads, the others wait. Without `sha256`, a copy of another version
    than the server has now is downloaded again.

    Raises UserError for a file that the server does not have or that is not the expected one, and TransientError where
    the server cannot be reached.
    """
    path = cached_path(url)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(path.name + ".lock")):
        if not path.is_file() or (not sha256 and _was_replaced(url)):
            part = path.with_name(path.name + ".part")
            try:
                _download(url, part)
            except (FileNotFoundError, aiohttp.ClientError) as error:
                what = f"cannot download {url}: {first_line(error.__cause__ or error)}"
                raise UserError(what, fix="Is the address right, and are you allowed to read it?") from None
            with part.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            write_json(_facts_path(url), _facts(url) | {"sha256": digest})
            os.replace(part, path)
        found = _facts(url).get("sha256")
        if sha256 and found != sha256:
            path.unlink()
            raise UserError(
                f"the file at {url} is not the expected one: its SHA-256 is {found}, not {sha256}",
                fix="Is `sha256` right? The file is downloaded again the next time.",
            )
    return path


def _was_replaced(url: str) -> bool:
    """Whether the server has another version than the copy."""
    mine = version_of_copy(url)
    try:
        return bool(mine and version_of(url) and version_of(url) != mine)
    except Unreachable:
        return False


def _download(url: str, part: Path) -> None:
    """Append what is missing to `part`, block by block."""
    filesystem, place = file_system(url)
    entry = with_retries(partial(filesystem.info, place), url)
    size, version = entry.get("size"), _version_in(entry)
    if not version or _facts(url).get("version") != version:
        part.unlink(missing_ok=True)  # the rest would be of another file
    write_json(_facts_path(url), {"url": url, "version": version})
    in_blocks = size is not None and entry.get("partial") is not False
    with part.open("ab") as file:
        while in_blocks and file.tell() < size:
            start, stop = file.tell(), min(file.tell() + BLOCK_BYTES, size)
            try:
                block = with_retries(partial(_range, filesystem, place, start, stop, size), url)
            except ValueError:
                in_blocks = False
                break
            if len(block) != stop - start:
                raise UserError(f"cannot download {url}: the server sent {len(block)} bytes for {stop - start}")
            file.write(block)
            file.flush()
    if not in_blocks:  # streamed from its beginning
        with_retries(partial(filesystem.get_file, place, str(part)), url)
    if _version_in(with_retries(partial(filesystem.info, place), url)) != version:
        part.unlink()  # its blocks may be of two files
        raise UserError(f"{url} changed while it was downloaded", fix="Run the same command again.")


def _range(filesystem: Any, place: str, start: int, stop: int, size: int) -> bytes:
    """A part of a file. Raises ValueError for a server that sends whole files only."""
    with filesystem.open(place, size=size, cache_type="none") as remote:
        remote.seek(start)
        return bytes(remote.read(stop - start))


def _facts_path(url: str) -> Path:
    path = cached_path(url)
    return path.with_name(path.name + ".json")


def _facts(url: str) -> dict[str, Any]:
    """What is known about a download: its URL, version and hash."""
    try:
        return dict(json.loads(_facts_path(url).read_text()))
    except (OSError, ValueError):
        return {}
