"""A folder at a URL, as fsspec reaches it: an object store such as S3 or Google's, or another machine's disk."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import fsspec
from fsspec.asyn import AsyncFileSystem

from affinage.data.token_shards import errors_at, upload
from affinage.errors import UserError
from affinage.secrets import masked

_PROBE = ".affinage"
_WHOLE_BYTES = 64_000_000  # a file up to this size is read before it is sent, so that one that grows arrives as it was

Result = TypeVar("Result")


class RemoteError(Exception):
    """What could not be read or written at a URL, and why, without secrets."""


class RemoteFolder:
    """Files below a URL, by their path from there. Every method raises RemoteError if it fails."""

    def __init__(self, url: str) -> None:
        """Opens no connection. Raises UserError for a URL of an unknown kind, or whose package is missing."""
        self.url = url.rstrip("/")
        with errors_at(self.url):
            self._filesystem, root = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        self._root = str(root).rstrip("/")
        self._makes_folders = not isinstance(self._filesystem, AsyncFileSystem)  # object stores have none

    def __truediv__(self, name: str) -> "RemoteFolder":
        return RemoteFolder(f"{self.url}/{name}")

    def sizes(self) -> dict[str, int]:
        """All files below, with their length in bytes; none if there is no such folder."""
        found = self._call("list", "", lambda: self._filesystem.find(self._root, detail=True))
        prefix = f"{self._root}/"
        return {
            path.removeprefix(prefix): int(facts.get("size") or 0)
            for path, facts in sorted(found.items())
            if path.startswith(prefix)
        }

    def names(self) -> list[str]:
        """What is directly in it, folders too, in order."""
        return list(dict.fromkeys(name.partition("/")[0] for name in self.sizes()))

    def read(self, name: str) -> bytes | None:
        """A small file; None if it is not there."""

        def read() -> bytes | None:
            with contextlib.suppress(FileNotFoundError):
                return bytes(self._filesystem.cat_file(self._at(name)))
            return None

        return self._call("read", name, read)

    def write(self, name: str, contents: bytes) -> None:
        """Write a file of these bytes."""

        def write() -> None:
            self._make_parent(name)
            upload(self._filesystem, self._at(name), contents)

        self._call("write", name, write)

    def put(self, file: Path, name: str) -> None:
        """Copy a file there. Raises FileNotFoundError if it is gone here."""
        if file.stat().st_size <= _WHOLE_BYTES:
            self.write(name, file.read_bytes())
            return
        self._make_parent(name)
        self._call("write", name, lambda: self._filesystem.put_file(str(file), self._at(name)))

    def get(self, name: str, file: Path) -> None:
        """Copy a file from there; its folder is made."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self._call("read", name, lambda: self._filesystem.get_file(self._at(name), str(file)))

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; those that are not there are no mistake."""

        def remove(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._filesystem.rm_file(self._at(name))

        for name in names:
            self._call("remove", name, lambda name=name: remove(name))  # type: ignore[misc]

    def check(self) -> None:
        """Try whether one may write, read and remove here."""
        self.write(_PROBE, b"affinage")
        if self.read(_PROBE) != b"affinage":
            raise RemoteError(f"{masked(self.url)}: what was written there cannot be read again")
        self.remove([_PROBE])

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _make_parent(self, name: str) -> None:
        if self._makes_folders:
            self._filesystem.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)

    def _call(self, verb: str, name: str, function: Callable[[], Result]) -> Result:
        try:
            return function()
        except Exception as error:  # each library has its own
            reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else ""
            place = f"{self.url}/{name}" if name else self.url
            what = f"cannot {verb} {place}: {type(error).__name__}{': ' if reason else ''}{reason}"
            raise RemoteError(masked(what)) from None


@contextlib.contextmanager
def reached(where: str, fix: str = "") -> Iterator[None]:
    """Raise a RemoteError in here as a UserError."""
    try:
        yield
    except RemoteError as error:
        fix = f"Is there a network, and may you read and write there? {fix}".rstrip()
        raise UserError(str(error), where=where, fix=fix) from error


def is_inside(name: Any) -> bool:
    """Whether a name that somebody else wrote is of a file below a folder, and leads nowhere else."""
    if not isinstance(name, str) or not name or "\\" in name or "\0" in name:
        return False
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and path.as_posix() == name
