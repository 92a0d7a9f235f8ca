"""Files at web addresses, downloaded once into a cache; a download that broke off is resumed, and what came is checked.

Files in buckets and on the Hub are read in place, by their own clients.
"""

import base64
import hashlib
import http.client
import json
import netrc
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
from filelock import FileLock

from affinage.data.atomic import write_json
from affinage.errors import TransientError, UserError, first_line
from affinage.paths import from_home

CACHE_VARIABLE = "AFFINAGE_CACHE"
PAUSE = 1.0  # seconds before the second attempt; doubled each time
_ATTEMPTS = 4  # in a row that bring nothing
_TIMEOUT = 30.0  # seconds without a byte
_VERSION_TIMEOUT = 10.0  # seconds in which a server must give the version of a file
_VERSION_KEYS = ("etag", "ETag", "md5Hash", "blob_id", "generation")  # of file systems' entries, and their times:
_TIME_KEYS = ("LastModified", "last_modified", "updated", "mtime", "created")

_versions: dict[str, str] = {}  # URL -> the version that the server had when this process asked
_silent: set[str] = set()  # servers that did not answer this process, which are not asked again


class Unreachable(Exception):
    """Nothing came this time; it may next time. `status` is the server's answer, if any."""

    status = 0


def is_web(url: str) -> bool:
    """Whether a URL is a web address, of which a copy is downloaded."""
    return url.startswith(("http://", "https://"))


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
    """The version of the file that a server, or a bucket, has now: its ETag, else size and time of change.

    Returns "" where the server gives none. It is asked once in a process, unless `again`. Raises Unreachable if it does
    not answer.
    """
    server = url.split("/", 3)[2] if "://" in url else url
    if url not in _versions or again:
        if server in _silent and not again:
            raise Unreachable("the server did not answer before")
        try:
            _versions[url] = _web_version(url) if is_web(url) else _stored_version(url)
        except Unreachable:
            _silent.add(server)
            raise
    return _versions[url]


def version_of_copy(url: str) -> str:
    """The version of the downloaded copy; "" if there is none, or its version is not known."""
    path = cached_path(url)
    return str(_facts(path).get("version") or "") if path.is_file() else ""


def forget(url: str) -> None:
    """Remove the downloaded copy of a URL."""
    _versions.pop(url, None)
    cached_path(url).unlink(missing_ok=True)


def _web_version(url: str) -> str:
    try:
        with _open(url, {}, "HEAD", _VERSION_TIMEOUT) as answer:
            return _version_in(answer.headers)
    except UserError:
        return ""  # it does not answer such questions


def _version_in(headers: Any) -> str:
    if headers.get("ETag"):
        return str(headers["ETag"])
    return f"{headers.get('Content-Length', '?')} bytes, {headers['Last-Modified']}" if headers["Last-Modified"] else ""


def _stored_version(url: str) -> str:
    """The version of one file in a bucket, or a hash of those of all files of a folder or glob."""
    try:
        filesystem, place = fsspec.core.url_to_fs(url, use_listings_cache=False)
        try:
            entry = filesystem.info(place)
            found = filesystem.find(place, detail=True) if entry["type"] == "directory" else {place: entry}
        except FileNotFoundError:
            found = filesystem.glob(place, detail=True) if fsspec.core.has_magic(place) else {}
    except Exception as error:  # each library has its own
        raise Unreachable(first_line(error)) from error
    versions = {name: _version_of_entry(entry) for name, entry in sorted(found.items())}
    if len(versions) == 1 or not all(versions.values()):
        return next(iter(versions.values())) if len(versions) == 1 else ""
    digest = hashlib.sha256(json.dumps(versions).encode()).hexdigest()
    return f"{len(versions)} files, {digest[:32]}"


def _version_of_entry(entry: Any) -> str:
    if version := next((entry[key] for key in _VERSION_KEYS if entry.get(key)), None):
        return str(version)
    changed = next((entry[key] for key in _TIME_KEYS if entry.get(key)), None)
    return f"{entry.get('size')} bytes, {changed}" if changed else ""


# ---- downloading ----


def cached(url: str, sha256: str = "", *, pause: float = PAUSE) -> Path:
    """The local copy of the file at a web address, which is downloaded if it is not there.

    What an interrupted download left is kept beside it as `.part` and resumed, if the server's file is still the
    same; its size is checked against what the server says, its SHA-256 against `sha256` if that is given. Safe to
    call from several processes at once: one downloads, the others wait. `pause` is the seconds before the second
    attempt. Without `sha256`, a copy of another version than the server has now is downloaded again.

    Raises UserError for a file that the server does not have or that is not the expected one, and TransientError where
    the server cannot be reached.
    """
    path = cached_path(url)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(path.name + ".lock")):
        if not path.is_file() or (not sha256 and _was_replaced(url)):
            part = path.with_name(path.name + ".part")
            _download(url, path, part, pause)
            with part.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            write_json(_facts_path(path), _facts(path) | {"sha256": digest})
            os.replace(part, path)
        found = _facts(path).get("sha256")
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


def _download(url: str, path: Path, part: Path, pause: float) -> None:
    """Download into `part` until it is as long as the server says, with as many attempts as bring anything."""
    idle = 0
    while True:
        before = _size(part)
        try:
            return _download_more(url, path, part)
        except Unreachable as error:
            now = _size(part)
            idle = 0 if now > before else idle + 1
            if idle >= _ATTEMPTS:
                kept = f"; {now / 1e6:.1f} MB are kept, the next run resumes there" if now else ""
                raise TransientError(
                    f"cannot download {url}: {error}{kept}",
                    fix="Is there a network? A copy on this machine can be the source's `path`, or in data.mirror.",
                ) from None
        if idle:
            time.sleep(pause * 2 ** (idle - 1))


def _download_more(url: str, path: Path, part: Path) -> None:
    """Append what is missing to `part`. Raises Unreachable where it is not all of it; what came stays."""
    start = _size(part)
    facts = _facts(path) if start else {}
    # Without a mark the rest may be of another file.
    headers = {"Range": f"bytes={start}-", "If-Range": facts["mark"]} if start and facts.get("mark") else {}
    try:
        answer = _open(url, headers)
    except Unreachable as error:
        if error.status == 416:  # the part is as long as the file, or longer: the file is another one now
            part.unlink(missing_ok=True)
        raise
    with answer, part.open("ab") as file:
        if answer.status != 206:
            file.truncate(0)
            mark = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
            facts = {"url": url, "mark": mark, "version": _version_in(answer.headers)}
        write_json(_facts_path(path), facts)
        length = answer.headers.get("Content-Length")
        total = None if length is None else (start if answer.status == 206 else 0) + int(length)
        try:
            shutil.copyfileobj(answer, file, 1 << 20)
        except (http.client.HTTPException, ConnectionError, TimeoutError) as error:
            raise Unreachable(f"the connection broke: {first_line(error)}") from None
    if total is not None and (size := _size(part)) != total:
        if size > total:
            part.unlink()
        raise Unreachable(f"the connection ended after {size} of {total} bytes")
    if not _size(part):
        raise Unreachable("the server sent nothing")


def _open(url: str, headers: Mapping[str, str], method: str = "GET", timeout: float = _TIMEOUT) -> Any:
    """The answer of a server, with the user and password that ~/.netrc (or the file NETRC) has for it.

    Raises UserError if the server refuses the request, and Unreachable for everything that may pass.
    """
    headers = {"User-Agent": "affinage", "Accept-Encoding": "identity", **headers}
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        known = netrc.netrc(os.environ.get("NETRC") or None).authenticators(
            request.host.rpartition(":")[0] or request.host
        )
    except (OSError, netrc.NetrcParseError):
        known = None
    if known is not None:
        credentials = base64.b64encode(f"{known[0]}:{known[2]}".encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {credentials}")  # for no server that it redirects to
    try:
        return urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        what = f"the server answers {error.code} {error.reason}"
        if error.code not in (408, 416, 429) and (error.code < 500 or error.code == 501):
            fix = "Is the address right, and are you allowed to read it?"
            raise UserError(f"cannot download {url}: {what}", fix=fix) from None
        unreachable = Unreachable(what)
        unreachable.status = error.code
        raise unreachable from None
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(first_line(error)) from None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _facts_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _facts(path: Path) -> dict[str, Any]:
    """What is known about a download: its URL, version and hash."""
    try:
        return dict(json.loads(_facts_path(path).read_text()))
    except (OSError, ValueError):
        return {}
