"""Files at web addresses, downloaded once into a cache; a download that broke off is resumed, and what came is checked.

Files in buckets and on the Hub are read in place, by their own clients.
"""

import base64
import contextlib
import fcntl
import hashlib
import http.client
import json
import netrc
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec

from affinage.data.atomic import write_json
from affinage.errors import TransientError, UserError, first_line
from affinage.paths import from_home

CACHE_VARIABLE = "AFFINAGE_CACHE"
PAUSE = 1.0  # seconds before the second attempt; doubled each time
_ATTEMPTS = 4  # in a row that bring nothing
_TIMEOUT = 30.0  # seconds without a byte
_VERSION_TIMEOUT = 10.0  # seconds in which a server must give the version of a file
_CHUNK_BYTES = 1 << 20
_BROKEN_OFF = (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError)

_versions: dict[str, str] = {}  # URL -> the version that the server had when this process asked
_silent: set[str] = set()  # servers that did not answer this process, which are not asked again


class Unreachable(Exception):
    """Nothing came this time; it may next time."""


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

    Returns "" where the server gives none. It is asked once in a process, unless `again`.

    Raises:
        Unreachable: it does not answer.
    """
    server = url.split("/", 3)[2] if "://" in url else url
    if again:
        _versions.pop(url, None)
    elif server in _silent:
        raise Unreachable(f"{server} does not answer")
    if url not in _versions:
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
    request = _request(url, {"User-Agent": "affinage", "Accept-Encoding": "identity"})
    request.method = "HEAD"
    try:
        with urllib.request.urlopen(request, timeout=_VERSION_TIMEOUT) as answer:
            return _version_in(answer.headers)
    except urllib.error.HTTPError as error:
        if error.code in (408, 429) or (error.code >= 500 and error.code != 501):
            raise Unreachable(f"the server answers {error.code} {error.reason}") from None
        return ""  # it does not answer such questions
    except (OSError, *_BROKEN_OFF) as error:
        raise Unreachable(first_line(error)) from None


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
    known = ("etag", "ETag", "md5Hash", "blob_id", "generation")
    if mark := next((entry[name] for name in known if entry.get(name)), None):
        return str(mark)
    times = ("LastModified", "last_modified", "updated", "mtime", "created")
    changed = next((entry[name] for name in times if entry.get(name)), None)
    return f"{entry.get('size')} bytes, {changed}" if changed else ""


# ---- downloading ----


def cached(url: str, sha256: str = "", *, pause: float = PAUSE) -> Path:
    """The local copy of the file at a web address, which is downloaded if it is not there.

    What an interrupted download left is kept beside it as `.part` and resumed, if the server's file is still the
    same; its size is checked against what the server says, its SHA-256 against `sha256` if that is given. Safe to
    call from several processes at once: one downloads, the others wait. `pause` is the seconds before the second
    attempt. Without `sha256`, a copy of another version than the server has now is downloaded again.

    Raises:
        UserError: the server has no such file, or sent another one than expected.
        TransientError: the server cannot be reached.
    """
    path = cached_path(url)
    if not sha256 and _was_replaced(url):
        path.unlink(missing_ok=True)
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(path.name + ".lock")):
            if not path.is_file():
                _download(url, path, sha256, pause)
    if sha256 and _facts(path).get("sha256") != sha256:
        _refuse_hash(url, path, sha256, str(_facts(path).get("sha256")))
    return path


def _was_replaced(url: str) -> bool:
    """Whether the server has another version than the copy."""
    mine = version_of_copy(url)
    try:
        return bool(mine and version_of(url) and version_of(url) != mine)
    except Unreachable:
        return False


def _download(url: str, path: Path, sha256: str, pause: float) -> None:
    part = path.with_name(path.name + ".part")
    try:
        _download_all(url, path, part, pause)
    except OSError as error:
        raise UserError(
            f"the download cannot be written: {error.strerror or error}",
            where=str(part),
            fix=f"Is the disk full? {CACHE_VARIABLE}=FOLDER keeps downloads elsewhere; the download is resumed.",
        ) from None
    with part.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 and digest != sha256:
        part.unlink()
        _refuse_hash(url, path, sha256, digest)
    version = _facts(path).get("version", "")
    write_json(_facts_path(path), {"url": url, "bytes": part.stat().st_size, "sha256": digest, "version": version})
    os.replace(part, path)


def _download_all(url: str, path: Path, part: Path, pause: float) -> None:
    """Download into `part` until it is as long as the server says, with as many attempts as bring anything."""
    idle = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            total = _download_more(url, path, part)
            size = part.stat().st_size
            if size == total or (total is None and size):
                return
            if total is None:
                raise Unreachable("the server sent nothing")
            if size > total:
                part.unlink()
                raise Unreachable(f"{size} bytes came of a file of {total}")
            reason = f"the connection ended after {size} of {total} bytes"
        except Unreachable as error:
            reason = str(error)
        now = part.stat().st_size if part.exists() else 0
        idle = 0 if now > before else idle + 1
        if idle >= _ATTEMPTS:
            kept = f"; {now / 1e6:.1f} MB are kept, the next run resumes there" if now else ""
            raise TransientError(
                f"cannot download {url}: {reason}{kept}",
                fix="Is there a network? A copy on this machine can be the source's `path`, or in data.mirror.",
            )
        if idle:
            time.sleep(pause * 2 ** (idle - 1))


def _download_more(url: str, path: Path, part: Path) -> int | None:
    """Append what is missing to `part`; returns the bytes of the whole file, if the server gives them."""
    start = part.stat().st_size if part.exists() else 0
    mark = _facts(path).get("mark") if start else None
    headers = {"User-Agent": "affinage", "Accept-Encoding": "identity"}
    if start and mark:  # without a mark the rest may be of another file
        headers |= {"Range": f"bytes={start}-", "If-Range": mark}
    try:
        with urllib.request.urlopen(_request(url, headers), timeout=_TIMEOUT) as answer:
            if answer.status != 206:
                start = 0
            mark = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
            version = _version_in(answer.headers) if answer.status != 206 else _facts(path).get("version", "")
            write_json(_facts_path(path), {"url": url, "mark": mark, "version": version})
            length = answer.headers.get("Content-Length")
            _append(answer, part, start)
            return start + int(length) if length is not None else None
    except urllib.error.HTTPError as error:
        if error.code == 416:  # the part is as long as the file, or longer: the file is another one now
            part.unlink(missing_ok=True)
            raise Unreachable("the file changed on the server") from None
        if error.code in (408, 429) or error.code >= 500:
            raise Unreachable(f"the server answers {error.code} {error.reason}") from None
        raise UserError(
            f"cannot download {url}: the server answers {error.code} {error.reason}",
            fix="Is the address right, and are you allowed to read it?",
        ) from None
    except urllib.error.URLError as error:
        raise Unreachable(f"{error.reason}") from None
    except _BROKEN_OFF as error:
        raise Unreachable(f"the connection broke: {str(error).strip() or type(error).__name__}") from None


def _request(url: str, headers: dict[str, str]) -> urllib.request.Request:
    """A request, with the user and password that ~/.netrc (or the file NETRC) has for the server."""
    request = urllib.request.Request(url, headers=headers)
    host = request.host.rpartition(":")[0] or request.host
    try:
        known = netrc.netrc(os.environ.get("NETRC") or None).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        known = None
    if known is not None:
        credentials = base64.b64encode(f"{known[0]}:{known[2]}".encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {credentials}")  # for no server that it redirects to
    return request


def _append(answer: Any, part: Path, start: int) -> None:
    """Write what comes to `part` from byte `start` on; what came before a failure stays."""
    with part.open("r+b" if part.exists() else "wb") as file:
        file.seek(start)
        file.truncate()
        while chunk := answer.read(_CHUNK_BYTES):
            file.write(chunk)


def _facts_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _facts(path: Path) -> dict[str, Any]:
    """What is known about a download: its URL, size, hash and version."""
    try:
        return dict(json.loads(_facts_path(path).read_text()))
    except (OSError, ValueError):
        return {}


def _refuse_hash(url: str, path: Path, expected: str, found: str) -> None:
    raise UserError(
        f"the file at {url} is not the expected one: its SHA-256 is {found}, not {expected}",
        fix=f"Is `sha256` right? If so, delete {path.parent} and try again.",
    )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
