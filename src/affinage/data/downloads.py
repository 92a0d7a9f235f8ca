"""Files at web addresses, downloaded once into a cache and checked; buckets and the Hub are read in place."""

import contextlib
import hashlib
import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import requests
from filelock import FileLock
from fsspec.core import has_magic, url_to_fs

from affinage.data.executor import with_retries
from affinage.data.json_files import write_json
from affinage.errors import UserError, first_line

CACHE_VARIABLE = "AFFINAGE_CACHE"
_TIMEOUT = (10, 30)  # seconds to connect, and between two parts of an answer
_AS_IT_IS = {"Accept-Encoding": "identity"}  # the header of a request for the file, not for a compressed form of it

_versions: dict[str, str] = {}  # URL -> the version that the server had when this process asked last


def is_web(url: str) -> bool:
    """Whether a URL is a web address, of which a copy is downloaded."""
    return url.startswith(("http://", "https://"))


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it."""
    filesystem, place = url_to_fs(url, use_listings_cache=False)
    return filesystem, str(place)


def listed(url: str) -> tuple[Any, str, dict[str, dict[str, Any]]]:
    """What is at a URL: fsspec's file system, the folder that names start from, and the entries of the files by path.

    That is one file, those in a folder, or those that a glob matches. The literal path comes first: names of files may
    contain the characters of a glob. Raises the library's error, of which FileNotFoundError is one.
    """
    filesystem, path = file_system(url)
    try:
        entry = filesystem.info(path)
    except FileNotFoundError:
        if not has_magic(path):
            raise
        folder = re.split(r"[*?\[]", path, maxsplit=1)[0].rpartition("/")[0]
        return filesystem, folder, filesystem.glob(path, detail=True)
    if entry["type"] == "directory":
        return filesystem, path.rstrip("/"), filesystem.find(path, detail=True)
    return filesystem, path.rpartition("/")[0], {path: entry}


def cache_folder() -> Path:
    """Where downloads are kept: `$AFFINAGE_CACHE`, else ~/.cache/affinage."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(os.path.expanduser(chosen)) if chosen else Path.home() / ".cache" / "affinage"


def cached_path(url: str) -> Path:
    """Where the download of a URL is, or will be."""
    digest = hashlib.sha256(url.encode()).hexdigest()[:24]
    return cache_folder() / "downloads" / digest / (url.split("?", 1)[0].rstrip("/").rpartition("/")[2] or "file")


def _facts(url: str) -> tuple[Path, dict[str, Any]]:
    """What is known about a download (its URL, version and hash), and the file that holds it."""
    path = cached_path(url)
    path = path.with_name(path.name + ".json")
    return path, json.loads(path.read_text()) if path.is_file() else {}


# ---- versions ----


def version_of(url: str) -> str:
    """The version of a file, folder or glob at a server or in a bucket: its ETag, else size and time of change.

    Returns "" where the server gives none. Raises the error of the library if it does not answer.
    """
    if is_web(url):
        _versions[url] = _version_in(headers_of(url))
    else:
        content = json.dumps(listed(url)[2], sort_keys=True, default=str)
        _versions[url] = hashlib.sha256(content.encode()).hexdigest()[:32]
    return _versions[url]


def _version_in(headers: Any) -> str:
    changed = headers.get("Last-Modified")
    return headers.get("ETag") or (f"{headers.get('Content-Length')} bytes, {changed}" if changed else "")


def version_of_copy(url: str) -> str:
    """The version of the downloaded copy; "" if there is none, or its version is not known."""
    return str(_facts(url)[1].get("version") or "") if cached_path(url).is_file() else ""


# ---- downloading ----


def headers_of(url: str) -> Any:
    """The headers of the file at a web address; none where the server knows no HEAD. Raises requests' errors."""
    answer = requests.head(url, allow_redirects=True, timeout=_TIMEOUT, headers=_AS_IT_IS)
    if answer.status_code in (405, 501):
        return {}
    answer.raise_for_status()
    return answer.headers


def cached(url: str, sha256: str = "") -> Path:
    """The local copy of the file at a web address, which is downloaded if it is not there.

    What an interrupted download left is kept beside it as `.part` and resumed, if the server's file is still the
    same; its size is checked against what the server says, its SHA-256 against `sha256` if that is given. Of several
    processes one downloads, the others wait. Without `sha256`, a copy of another version than the server has now is
    downloaded again; a process asks once. Passwords are in ~/.netrc.

    Raises UserError for a file that the server does not have or that is not the expected one, and TransientError where
    the server cannot be reached.
    """
    path = cached_path(url)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(path.name + ".lock")):
        known = "" if sha256 else version_of_copy(url)
        if known and url not in _versions:
            _versions[url] = ""  # of a server that does not answer
            with contextlib.suppress(requests.RequestException):
                version_of(url)
        if not path.is_file() or (known and _versions[url] not in ("", known)):
            part = path.with_name(path.name + ".part")
            try:
                with_retries(partial(_download, url, part), url)
            except requests.RequestException as error:
                what = f"cannot download {url}: {first_line(error.__cause__ or error)}"
                raise UserError(what, fix="Is the address right, and are you allowed to read it?") from None
            with part.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            place, facts = _facts(url)
            write_json(place, facts | {"sha256": digest})
            os.replace(part, path)
        found = _facts(url)[1].get("sha256")
        if sha256 and found != sha256:
            path.unlink()
            what = f"the file at {url} is not the expected one: its SHA-256 is {found}, not {sha256}"
            raise UserError(what, fix="Is `sha256` right? The file is downloaded again the next time.")
    return path


def _download(url: str, part: Path) -> None:
    """Append what is missing to `part`; all of the file, where the server has another one than `part` is of."""
    place, facts = _facts(url)
    begun, validator = part.stat().st_size if part.is_file() else 0, facts.get("validator")
    rest = {"Range": f"bytes={begun}-", "If-Range": validator} if begun and validator else {}
    with requests.get(url, headers=_AS_IT_IS | rest, stream=True, timeout=_TIMEOUT) as answer:
        if answer.status_code == 416 and rest:  # it ends where `part` ends, or before
            part.unlink()
            raise ConnectionError("the server has less than was downloaded")
        answer.raise_for_status()
        resumed = answer.status_code == 206
        if not resumed:
            # What a server checks before it sends the rest; a weak ETag says that contents are alike, not the same.
            etag, changed = answer.headers.get("ETag", ""), answer.headers.get("Last-Modified")
            validator = changed if not etag or etag.startswith("W/") else etag
            write_json(place, {"url": url, "version": _version_in(answer.headers), "validator": validator})
        with part.open("ab" if resumed else "wb") as file:
            for chunk in answer.iter_content(1 << 15):
                file.write(chunk)
