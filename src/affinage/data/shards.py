"""Where the files of rows are written to: a folder here or anywhere fsspec reaches, one complete shard after another.

A shard that is complete has a record beside it, `<shard>.json`, with its size and hash. After a kill the shards with a
record are left as they are; the records go when rows.json, which holds the same, is there.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from affinage.data.atomic import atomic_file, write_json
from affinage.data.uploads import upload, upload_file
from affinage.errors import UserError
from affinage.paths import from_home

_CHUNK = 16_000_000  # bytes
_EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3"}  # protocol -> extra of affinage that brings its package


def is_local(place: str) -> bool:
    """Whether a path or URL is of this machine's file system."""
    return "://" not in place or place.startswith(("file://", "local://"))


def local_path(place: str) -> Path:
    """The path that a local path or URL means."""
    return Path(fsspec.core.strip_protocol(place)) if "://" in place else from_home(place)


def open_url(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it. Raises UserError where a package is missing or nobody answers."""
    with told(url):
        filesystem, path = fsspec.core.url_to_fs(url)
        return filesystem, str(path)


def check_url(url: str) -> None:
    """Raise UserError for a URL of a kind that is not known, or whose package is missing; nobody is asked anything."""
    if not is_local(url):
        with told(url):
            fsspec.get_filesystem_class(url.partition("://")[0])


@contextlib.contextmanager
def told(url: str) -> Iterator[None]:
    """Say of failures in here that they happened at a URL."""
    try:
        yield
    except ImportError as error:
        extra = _EXTRAS.get(url.partition("://")[0])
        fix = f"pip install 'affinage[{extra}]'" if extra else ""
        raise UserError(f"this place cannot be opened: {error}", where=url, fix=fix) from error
    except ValueError as error:
        raise UserError(f"this place cannot be opened: {error}", where=url) from error
    except (OSError, TimeoutError) as error:
        fix = "Is there a network, and may you read and write there? What is complete is kept; run again to go on."
        raise UserError(f"{type(error).__name__}: {error}", where=url, fix=fix) from error


class ShardFolder:
    """One folder that gets shards."""

    def __init__(self, place: str, scratch: Path) -> None:
        """`place` is a path or an fsspec URL; shards for somewhere else pass through `scratch`."""
        self._local = local_path(place) if is_local(place) else None
        self._scratch = scratch
        self._place = place
        if self._local is not None:
            self._local.mkdir(parents=True, exist_ok=True)
        else:
            scratch.mkdir(parents=True, exist_ok=True)
            self._filesystem, self._path = open_url(place)
            with told(place):
                self._filesystem.makedirs(self._path, exist_ok=True)

    def record(self, name: str) -> dict[str, Any] | None:
        """What was written of a shard, if it is there, whole."""
        try:
            if self._local is not None:
                facts = json.loads((self._local / f"{name}.json").read_text(encoding="utf-8"))
                size = (self._local / name).stat().st_size
            else:
                facts = json.loads(self._filesystem.cat_file(f"{self._path}/{name}.json"))
                size = self._filesystem.size(f"{self._path}/{name}")
        except (OSError, ValueError):
            return None
        return facts if size == facts["bytes"] else None

    def write(self, name: str, blocks: Iterable[np.ndarray], shape: tuple[int, int], dtype: Any) -> dict[str, Any]:
        """Write one shard and then its record; gives {rows, bytes, sha256}."""
        here = self._scratch if self._local is None else self._local
        facts = write_array_of_blocks(here / name, blocks, shape, dtype)
        if self._local is not None:
            self.put(f"{name}.json", facts)
            return facts
        self.copy(here / name)
        (here / name).unlink()
        self.put(f"{name}.json", facts)
        return facts

    def copy(self, file: Path) -> None:
        """Put a finished file here too. An object store shows an upload when it is complete, not before."""
        if self._local is not None:
            with atomic_file(self._local / file.name) as copy, file.open("rb") as original:
                while chunk := original.read(_CHUNK):
                    copy.write(chunk)
            return
        with told(self._place):
            upload_file(self._filesystem, f"{self._path}/{file.name}", file)

    def put(self, name: str, facts: dict[str, Any]) -> None:
        """Write facts as a JSON file."""
        if self._local is not None:
            write_json(self._local / name, facts)
            return
        with told(self._place):
            upload(self._filesystem, f"{self._path}/{name}", json.dumps(facts, ensure_ascii=False, indent=2).encode())

    def forget_records(self, names: Iterable[str]) -> None:
        """Remove the records of shards."""
        if self._local is not None:
            for name in names:
                (self._local / f"{name}.json").unlink(missing_ok=True)
            return
        with told(self._place):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    self._filesystem.rm_file(f"{self._path}/{name}.json")


def write_array_of_blocks(
    path: Path, blocks: Iterable[np.ndarray], shape: tuple[int, int], dtype: Any
) -> dict[str, Any]:
    """Write blocks of rows, in order, as one .npy file that is whole or absent; gives {rows, bytes, sha256}."""
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    with atomic_file(path) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for block in blocks:
            file.write(np.ascontiguousarray(block, dtype).data.cast("B"))
        return {"rows": shape[0], "bytes": file.bytes, "sha256": file.sha256}


class RemoteShard:
    """A shard that stays where it is: slices of it are read by one range request each."""

    def __init__(self, filesystem: Any, path: str, shape: tuple[int, int], dtype: Any, bytes: int) -> None:
        self._filesystem, self._path = filesystem, path
        self.shape, self.dtype = shape, np.dtype(dtype)
        self._stride = shape[1] * self.dtype.itemsize
        self._header = bytes - shape[0] * self._stride

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        first, last, _ = rows.indices(len(self))
        begin, end = (self._header + row * self._stride for row in (first, last))
        with told(self._path):
            content = self._filesystem.cat_file(self._path, start=begin, end=end)
        if len(content) != end - begin:
            raise UserError(
                f"bytes {begin} to {end} were asked for, {len(content)} came",
                where=self._path,
                fix="The file was changed after it was written; make the rows anew with --force tokenize.",
            )
        return np.frombuffer(content, self.dtype).reshape(-1, self.shape[1])


def file_sizes(filesystem: Any, folder: str) -> dict[str, int]:
    """Size by name of the files in a folder of a file system; one request, as a rule."""
    try:
        found = filesystem.ls(folder, detail=True)
    except FileNotFoundError:
        return {}
    return {os.path.basename(entry["name"]): int(entry["size"] or 0) for entry in found if entry["type"] == "file"}
