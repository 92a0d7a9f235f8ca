"""Files at web addresses: downloaded once into a cache, resumed where a download was interrupted, and checked."""

import contextlib
import hashlib
import os
import re
from functools import partial
from pathlib import Path

import requests
from filelock import FileLock

from affinage.errors import UserError, first_line
from affinage.network import with_retries

CACHE_VARIABLE = "AFFINAGE_CACHE"
WEB = ("http://", "https://")
_HASH = "#sha256="  # after a web address: the hash that the file must have; servers do not see it
_TIMEOUT = (10, 30)  # seconds to connect, and between two parts of an answer
_AS_IT_IS = {"Accept-Encoding": "identity"}  # the header of a request for the file, not for a compressed form of it


def name_in(url: str) -> str:
    """The name of the file at a web address."""
    return re.split("[?#]", url, maxsplit=1)[0].rstrip("/").rpartition("/")[2]


def cached_path(url: str) -> Path:
    """Where the download of a URL is, or will be: in `$AFFINAGE_CACHE`, else ~/.cache/affinage."""
    folder = Path(os.path.expanduser(os.environ.get(CACHE_VARIABLE) or "~/.cache/affinage"))
    return folder / "files" / hashlib.sha256(url.encode()).hexdigest()[:24] / (name_in(url) or "file")


def _beside(url: str, suffix: str) -> Path:
    """A file beside a download: its `.part`, its `.lock`, or its `.version`, as the server states it."""
    path = cached_path(url)
    return path.with_name(path.name + suffix)


def _version_in(answer: requests.Response) -> str:
    return answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""


def stated(url: str) -> tuple[str, int]:
    """The version and the size of the file at a web address; "" and 0 where they are not stated."""
    answer = requests.head(url, allow_redirects=True, timeout=_TIMEOUT, headers=_AS_IT_IS)
    if answer.status_code in (405, 501):  # the server knows no HEAD
        return "", 0
    answer.raise_for_status()
    return _version_in(answer), int(answer.headers.get("Content-Length", 0))


def look_up(url: str, sha256: str) -> tuple[str, int]:
    """The address by which `cached` gets a file, with the hash that it must have ("" for any), and its size.

    A copy here goes if its server has another version. Raises the error of the library if there is neither.
    """
    place = f"{url}{_HASH}{sha256}" if sha256 else url
    copy = cached_path(place)
    if copy.is_file() and not sha256:
        with contextlib.suppress(requests.RequestException):  # without an answer the copy is what there is
            if stated(url)[0] not in ("", _beside(url, ".version").read_text()):
                copy.unlink()
    return place, copy.stat().st_size if copy.is_file() else stated(url)[1]


def cached(url: str) -> Path:
    """The local copy of the file at a web address, which is downloaded if it is not there.

    An interrupted download is resumed if the server's file is still the same; its size is checked against what the
    server says, and its SHA-256 if the URL ends in `#sha256=` and that hash. Of several processes one downloads, the
    others wait. Raises UserError for a file that the server does not have or that is not the expected one, and
    TransientError where it cannot be reached.
    """
    path, part = cached_path(url), _beside(url, ".part")
    if path.is_file():  # perhaps where nothing can be written
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what, fix = f"no downloads can be kept here: {error.strerror}", f"Set {CACHE_VARIABLE} to a folder of yours."
        raise UserError(what, where=str(path.parent), fix=fix) from error
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
