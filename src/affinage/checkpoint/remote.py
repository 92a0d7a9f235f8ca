"""A folder at a URL, as fsspec reaches it: an object store such as S3 or Google's, or another machine's disk."""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import fsspec
from fsspec.asyn import AsyncFileSystem

from affinage.data.token_shards import errors_at
from affinage.data.uploads import read_if_short, upload
from affinage.errors import UserError
from affinage.secrets import masked

_CHUNK = 16_000_000  # bytes
_PROBE = ".affinage"

Result = TypeVar("Result")


class RemoteError(Exception):
    """What could not be read or written at a URL, and why, without secrets."""


class RemoteFolder:
    """Files below a URL, by their path from there.

    Everything raises RemoteError where the place cannot be reached, or says no.
    """

    def __init__(self, url: str) -> None:
        """Nobody is asked anything yet. Raises UserError for a URL of an unknown kind, or whose package is missing."""
        self.url = url.rstrip("/")
        with errors_at(self.url):
            self._filesystem, self._root = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        self._makes_folders = not isinstance(self._filesystem, AsyncFileSystem)  # object stores have none

    def __truediv__(self, name: str) -> "RemoteFolder":
        return RemoteFolder(f"{self.url}/{name}")

    def sizes(self) -> dict[str, int]:
        """All files below, with their length in bytes; none where there is no such folder."""
        found = self._asked("list", "", lambda: self._filesystem.find(self._root, detail=True))
        prefix = f"{str(self._root).rstrip('/')}/"
        return {
            path.removeprefix(prefix): int(facts.get("size") or 0)
            for path, facts in sorted(found.items())
            if path.startswith(prefix)
        }

    def names(self) -> list[str]:
        """What is directly in it, folders too, in order."""

        def listed() -> list[str]:
            try:
                return list(self._filesystem.ls(self._root, detail=False))
            except FileNotFoundError:
                return []

        return sorted(path.rstrip("/").rpartition("/")[2] for path in self._asked("list", "", listed))

    def read(self, name: str) -> bytes | None:
        """A small file; None if it is not there."""

        def read() -> bytes | None:
            try:
                return bytes(self._filesystem.cat_file(self._at(name)))
            except FileNotFoundError:
                return None

        return self._asked("read", name, read)

    def sha256(self, name: str) -> str:
        """The hash of a file's contents, which are read to the end."""

        def digest() -> str:
            found = hashlib.sha256()
            with self._filesystem.open(self._at(name), "rb", cache_type="readahead", block_size=_CHUNK) as file:
                while chunk := file.read(_CHUNK):
                    found.update(chunk)
            return found.hexdigest()

        return self._asked("read", name, digest)

    def write(self, name: str, contents: bytes) -> None:
        """Make a file of these bytes."""

        def write() -> None:
            self._make_parent(name)
            upload(self._filesystem, self._at(name), contents)

        self._asked("write", name, write)

    def put(self, file: Path, name: str) -> None:
        """Copy a file there.

        Raises:
            FileNotFoundError: it is gone here.
        """
        if (contents := read_if_short(file)) is not None:
            self.write(name, contents)
            return

        def put() -> None:
            self._make_parent(name)
            self._filesystem.put_file(str(file), self._at(name))

        self._asked("write", name, put)

    def get(self, name: str, file: Path) -> None:
        """Copy a file from there; its folder is made."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self._asked("read", name, lambda: self._filesystem.get_file(self._at(name), str(file)))

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; those that are not there are no mistake."""

        def remove(name: str) -> None:
            try:
                self._filesystem.rm_file(self._at(name))
            except FileNotFoundError:
                return

        for name in names:
            self._asked("remove", name, lambda name=name: remove(name))  # type: ignore[misc]

    def check(self) -> None:
        """See that one may write, read and remove here."""
        self.write(_PROBE, b"affinage")
        if self.read(_PROBE) != b"affinage":
            raise RemoteError(f"{masked(self.url)}: what was written there cannot be read again")
        self.remove([_PROBE])

    def _at(self, name: str) -> str:
        return f"{str(self._root).rstrip('/')}/{name}"

    def _make_parent(self, name: str) -> None:
        if self._makes_folders:
            self._filesystem.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)

    def _asked(self, verb: str, name: str, ask: Callable[[], Result]) -> Result:
        try:
            return ask()
        except Exception as error:  # each library has its own
            reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else ""
            place = f"{self.url}/{name}" if name else self.url
            what = f"cannot {verb} {place}: {type(error).__name__}{': ' if reason else ''}{reason}"
            raise RemoteError(masked(what)) from None


@contextlib.contextmanager
def reached(where: str, fix: str = "") -> Iterator[None]:
    """Say of what cannot be reached in here that it is the user's to mend."""
    try:
        yield
    except RemoteError as error:
        fix = f"Is there a network, and may you read and write there? {fix}".rstrip()
        raise UserError(str(error), where=where, fix=fix) from error


def is_url(place: str) -> bool:
    """Whether this is a URL, and no path."""
    return "://" in place


def is_inside(name: Any) -> bool:
    """Whether a name that somebody else wrote is of a file below a folder, and leads nowhere else."""
    if not isinstance(name, str) or not name or "\\" in name or "\0" in name:
        return False
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and path.as_posix() == name
