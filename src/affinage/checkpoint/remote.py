"""A folder at a URL, as fsspec reaches it: an object store such as S3 or Google's, or another machine's disk."""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

import fsspec
from fsspec.asyn import AsyncFileSystem

from affinage.data.token_shards import errors_at, upload
from affinage.errors import UserError, first_line
from affinage.secrets import masked

_PROBE = ".affinage"
_WHOLE_BYTES = 64_000_000  # a file up to this size is read before it is sent, so that one that grows arrives as it was


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
        with self._failing("list", ""):
            found, prefix = self._filesystem.find(self._root, detail=True), f"{self._root}/"
            own = sorted((path.removeprefix(prefix), facts) for path, facts in found.items() if path.startswith(prefix))
            return {name: int(facts.get("size") or 0) for name, facts in own}

    def read(self, name: str) -> bytes | None:
        """A small file; None if it is not there."""
        with self._failing("read", name), contextlib.suppress(FileNotFoundError):
            return bytes(self._filesystem.cat_file(self._at(name)))
        return None

    def write(self, name: str, contents: bytes) -> None:
        """Write a file of these bytes."""
        with self._failing("write", name):
            self._make_parent(name)
            upload(self._filesystem, self._at(name), contents)

    def put(self, file: Path, name: str) -> None:
        """Copy a file there. Raises FileNotFoundError if it is gone here."""
        if file.stat().st_size <= _WHOLE_BYTES:
            self.write(name, file.read_bytes())
            return
        with self._failing("write", name):
            self._make_parent(name)
            self._filesystem.put_file(str(file), self._at(name))

    def get(self, name: str, file: Path) -> None:
        """Copy a file from there; its folder is made."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with self._failing("read", name):
            self._filesystem.get_file(self._at(name), str(file))

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; those that are not there are no mistake."""
        for name in names:
            with self._failing("remove", name), contextlib.suppress(FileNotFoundError):
                self._filesystem.rm_file(self._at(name))

    def check(self) -> None:
        """Write, read and remove a small file here."""
        self.write(_PROBE, b"affinage")
        if self.read(_PROBE) != b"affinage":
            raise RemoteError(f"{masked(self.url)}: what was written there cannot be read again")
        self.remove([_PROBE])

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _make_parent(self, name: str) -> None:
        if self._makes_folders:
            self._filesystem.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)

    @contextlib.contextmanager
    def _failing(self, verb: str, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each library has its own
            what = f"cannot {verb} {self.url}/{name}: {type(error).__name__}: {first_line(error)}"
            raise RemoteError(masked(what)) from None


@contextlib.contextmanager
def reached(where: str, fix: str = "") -> Iterator[None]:
    """Raise a RemoteError in here as a UserError."""
    try:
        yield
    except RemoteError as error:
        fix = f"Is there a network, and may you read and write there? {fix}".rstrip()
        raise UserError(str(error), where=where, fix=fix) from error


def is_inside(name: object) -> bool:
    """Whether a name that somebody else wrote is of a file below a folder, and leads nowhere else."""
    if not isinstance(name, str) or not name or "\\" in name or "\0" in name:
        return False
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and path.as_posix() == name


def has_hash(path: Path, digest: str) -> bool:
    """Whether there is a file with this SHA-256."""
    if not path.is_file() or path.is_symlink():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == digest
