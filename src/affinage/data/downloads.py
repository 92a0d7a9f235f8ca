"""Files at URLs, fetched once into a cache: an interrupted download goes on, and what came is checked."""

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
from affinage.data.hub_answers import refusal_of
from affinage.errors import UserError, first_line
from affinage.hardware.movement import waits_for_others
from affinage.paths import from_home

CACHE_VARIABLE = "AFFINAGE_CACHE"
_ATTEMPTS = 4  # in a row that bring nothing
PAUSE = 1.0  # seconds before the second attempt; doubled each time
_TIMEOUT = 30.0  # seconds without a byte
_CHUNK_BYTES = 1 << 20
_BROKEN_OFF = (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError)  # by who answers, or the way


class _Unreachable(Exception):
    """Nothing came this time; it may next time."""


def cache_folder() -> Path:
    """Where downloads are kept: `$AFFINAGE_CACHE`, else ~/.cache/affinage."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return from_home(chosen) if chosen else Path.home() / ".cache" / "affinage"


def cached_path(url: str) -> Path:
    """Where the download of a URL is, or will be."""
    digest = hashlib.sha256(url.encode()).hexdigest()[:24]
    return cache_folder() / "downloads" / digest / (url.split("?", 1)[0].rstrip("/").rpartition("/")[2] or "file")


def cached(url: str, sha256: str = "", *, pause: float = PAUSE) -> Path:
    """The local copy of the file at a URL, which is fetched if it is not there.

    What an interrupted download left is kept beside it as `.part` and gone on with, if the server's file is still the
    same one; its size is checked against what the server says, its SHA-256 against `sha256` if that is given. Safe to
    call from several processes at once: one fetches, the others wait. `pause` is the seconds before the second attempt.

    Raises:
        UserError: the server cannot be reached, has no such file, or sent another one than asked for.
    """
    path = cached_path(url)
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(path.name + ".lock")):
            if not path.is_file():
                _fetch(url, path, sha256, pause)
    if sha256 and _facts(path).get("sha256") != sha256:
        _refuse_hash(url, path, sha256, str(_facts(path).get("sha256")))
    return path


def _fetch(url: str, path: Path, sha256: str, pause: float) -> None:
    part = path.with_name(path.name + ".part")
    try:
        _fetch_all(url, path, part, pause)
    except OSError as error:
        raise UserError(
            f"the download cannot be written: {error.strerror or error}",
            where=str(part),
            fix=f"Is the disk full? {CACHE_VARIABLE}=FOLDER keeps downloads elsewhere; it goes on where it stopped.",
        ) from None
    digest = _sha256(part)
    if sha256 and digest != sha256:
        part.unlink()
        _refuse_hash(url, path, sha256, digest)
    write_json(_facts_path(path), {"url": url, "bytes": part.stat().st_size, "sha256": digest})
    os.replace(part, path)


def _fetch_all(url: str, path: Path, part: Path, pause: float) -> None:
    """Fetch into `part` until it is as long as the server says, with as many attempts as bring anything."""
    idle = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            total = _fetch_more(url, path, part)
            size = part.stat().st_size
            if size == total or (total is None and size):
                return
            if total is None:
                raise _Unreachable("the server sent nothing")
            if size > total:
                part.unlink()
                raise _Unreachable(f"{size} bytes came of a file of {total}")
            reason = f"the connection ended after {size} of {total} bytes"
        except _Unreachable as error:
            if refused := refusal_of(url, error.__cause__):
                raise refused from None
            reason = str(error)
        now = part.stat().st_size if part.exists() else 0
        idle = 0 if now > before else idle + 1
        if idle >= _ATTEMPTS:
            kept = f"; {now / 1e6:.1f} MB are kept, the next run goes on from there" if now else ""
            raise UserError(
                f"cannot download {url}: {reason}{kept}",
                fix="Is there a network? A copy on this machine can be the source's `path`, or in data.mirror.",
            )
        if idle:
            time.sleep(pause * 2 ** (idle - 1))


def _fetch_more(url: str, path: Path, part: Path) -> int | None:
    """Append what is missing to `part`; returns the bytes of the whole file, if the server says."""
    fetch = _from_http if url.startswith(("http://", "https://")) else _from_store
    return fetch(url, path, part)


def _from_http(url: str, path: Path, part: Path) -> int | None:
    start = part.stat().st_size if part.exists() else 0
    mark = _facts(path).get("mark") if start else None
    headers = {"User-Agent": "affinage", "Accept-Encoding": "identity"}
    if start and mark:  # without a mark nobody knows whether the rest would be of the same file
        headers |= {"Range": f"bytes={start}-", "If-Range": mark}
    try:
        with urllib.request.urlopen(_request(url, headers), timeout=_TIMEOUT) as answer:
            if answer.status != 206:
                start = 0
            mark = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
            write_json(_facts_path(path), {"url": url, "mark": mark})
            length = answer.headers.get("Content-Length")
            _append(answer, part, start)
            return start + int(length) if length is not None else None
    except urllib.error.HTTPError as error:
        if error.code == 416:  # the part is as long as the file, or longer: the file is another one now
            part.unlink(missing_ok=True)
            raise _Unreachable("the file changed on the server") from None
        if error.code in (408, 429) or error.code >= 500:
            raise _Unreachable(f"the server answers {error.code} {error.reason}") from None
        raise UserError(
            f"cannot download {url}: the server answers {error.code} {error.reason}",
            fix="Is the address right, and are you allowed to read it?",
        ) from None
    except urllib.error.URLError as error:
        raise _Unreachable(f"{error.reason}") from None
    except _BROKEN_OFF as error:
        raise _Unreachable(f"the connection broke: {str(error).strip() or type(error).__name__}") from None


def _request(url: str, headers: dict[str, str]) -> urllib.request.Request:
    """A request, with the user and password that ~/.netrc (or the file NETRC) has for the server."""
    request = urllib.request.Request(url, headers=headers)
    try:
        known = netrc.netrc(os.environ.get("NETRC") or None).authenticators(
            request.host.rpartition(":")[0] or request.host
        )
    except (OSError, netrc.NetrcParseError):
        known = None
    if known is not None:
        told = base64.b64encode(f"{known[0]}:{known[2]}".encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {told}")  # not for whom it is sent on to
    return request


def _append(answer: Any, part: Path, start: int) -> None:
    """Write what comes to `part` from byte `start` on; what came before a failure stays."""
    with part.open("r+b" if part.exists() else "wb") as file:
        file.seek(start)
        file.truncate()
        while True:
            try:
                chunk = answer.read(_CHUNK_BYTES)
            except Exception as error:  # each library has its own for a connection that breaks
                raise _Unreachable(f"the connection broke: {first_line(error)}") from error
            if not chunk:
                return
            file.write(chunk)


def _from_store(url: str, path: Path, part: Path) -> int | None:
    """From an object store: gs, s3, hf and what else fsspec reads."""
    start = part.stat().st_size if part.exists() else 0
    try:
        filesystem, place = fsspec.core.url_to_fs(url)
        info = filesystem.info(place)
        source = filesystem.open(place, "rb", cache_type="none")
    except FileNotFoundError:
        raise UserError(f"there is no file {url}") from None
    except Exception as error:
        raise _Unreachable(first_line(error)) from error
    mark = str(info.get("etag") or info.get("ETag") or info.get("md5Hash") or info.get("blob_id") or info.get("size"))
    if start and _facts(path).get("mark") != mark:
        start = 0
    write_json(_facts_path(path), {"url": url, "mark": mark})
    with source:
        source.seek(start)
        _append(source, part, start)
    return info.get("size")


def _facts_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _facts(path: Path) -> dict[str, Any]:
    """What is known about a download: its URL, size and hash; of an unfinished one, what tells the file's version."""
    try:
        return dict(json.loads(_facts_path(path).read_text()))
    except (OSError, ValueError):
        return {}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _refuse_hash(url: str, path: Path, wanted: str, found: str) -> None:
    raise UserError(
        f"the file at {url} is not the one asked for: its SHA-256 is {found}, not {wanted}",
        fix=f"Is `sha256` right? If so, delete {path.parent} and try again.",
    )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        with waits_for_others():
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
