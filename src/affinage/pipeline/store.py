"""Results of steps, each in a folder that is named by what the result is a function of.

Of a result `<step>-<key>/`, `request.json` holds what it is made from, and `result.json` what the step reports about
it. `manifest.json` is written last and holds the size and hash of every file: after a kill or a loss of power at any
moment, a folder with a manifest holds all files that it names, and one without is never read as a result. When a result
is deleted, these files go first, so that what a kill leaves of it is not mistaken for one that is half made.
"""

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from filelock import FileLock, Timeout
from pydantic import StringConstraints
from pydantic.dataclasses import dataclass

from affinage.errors import folder_is_gone
from affinage.json_files import sync, write_json
from affinage.pipeline.step import print_line
from affinage.results import MANIFEST, RESULT, read_json, versions

REQUEST = "request.json"
COPIED = "copied.txt"  # of a complete result: the URL where a copy of it is
FORMAT = 3  # of the folders and keys; with another one, every result is made again
_POLL = 0.5  # seconds, while another process makes a result
Name = Annotated[str, StringConstraints(pattern=r"^[\w-]+$")]  # becomes the name of a folder


@dataclass(frozen=True)
class Request:
    """What a result is a function of."""

    step: Name
    version: int  # of the step's code
    settings: dict[str, Any]  # the part of the recipe that decides the result, under the recipe's own keys
    inputs: dict[Name, Name]  # step -> key of the result that is read
    sources: dict[str, str]  # files from outside that are read -> fingerprint

    @cached_property
    def key(self) -> str:
        """The hexadecimal SHA-256 of all fields."""
        canonical = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


@dataclass(frozen=True)
class Store:
    """A folder of results, which many recipes may share."""

    folder: Path

    def find(self, step: str, key: str) -> Path:
        """Where the result of `step` with this key is, or will be."""
        return self.folder / f"{step}-{key[:12]}"

    def path(self, request: Request) -> Path:
        """Where the result of `request` is, or will be."""
        return self.find(request.step, request.key)

    def damage(self, request: Request) -> str:
        """What is wrong with the files of a result that has a manifest; "" if they have their sizes."""
        folder = self.path(request)
        for name, facts in (read_manifest(folder) or {"files": {}})["files"].items():
            try:
                size = (folder / name).stat().st_size
            except OSError:
                return f"{name} is missing"
            if size != facts["bytes"]:
                return f"{name} has {size} bytes instead of {facts['bytes']}"
        return ""

    def is_complete(self, request: Request) -> bool:
        """Whether the whole result is there."""
        return read_manifest(self.path(request)) is not None and not self.damage(request)

    def lock(self, name: str) -> FileLock:
        """A lock on a run or a result, which at most one process holds, and never one that has ended."""
        folder = self.folder / ".locks"
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / f"{name}.lock", timeout=0, mode=0o666)

    @contextlib.contextmanager
    def making(self, request: Request) -> Iterator[bool]:
        """Wait until no other process makes a result; inside it is this one's to make. Yields whether it is missing."""
        if self.is_complete(request):
            yield False
            return
        lock = self.lock(self.path(request).name)
        try:
            held = lock.acquire()
        except Timeout:
            print_line(f"{request.step}: waiting for another process, which is making it")
            held = lock.acquire(timeout=-1, poll_interval=_POLL)
        with held:
            yield not self.is_complete(request)

    def begin(self, request: Request, *, resume: bool) -> Path:
        """Returns the folder to write the result into: an empty one, or with `resume` what an earlier attempt left."""
        folder = self.path(request)
        if not resume:
            self.discard(request)
        folder.mkdir(parents=True, exist_ok=True)
        for name in (MANIFEST, COPIED):
            (folder / name).unlink(missing_ok=True)
        write_json(folder / REQUEST, asdict(request) | {"key": request.key})
        return folder

    def discard(self, request: Request) -> None:
        """Remove a result, complete or not."""
        folder = self.path(request)
        if folder.exists():
            for name in (REQUEST, MANIFEST):
                (folder / name).unlink(missing_ok=True)
            shutil.rmtree(folder)

    def finish(self, request: Request, summary: dict[str, Any], *, started: float) -> float:
        """Write `result.json` with the summary, and then the manifest, which makes the folder a result.

        Returns the seconds since the work `started`, by `time.monotonic`. When that was is in the manifest alone, so
        that the same work gives the same files. Raises UserError if the folder was deleted or moved since `begin`.
        """
        folder = self.path(request)
        if not (folder / REQUEST).is_file():
            raise folder_is_gone(folder, "while its result was made")
        write_json(folder / RESULT, summary)
        inside = sorted(path for path in folder.rglob("*") if path != folder / MANIFEST)
        files = {path.relative_to(folder).as_posix(): hash_on_disk(path) for path in inside if path.is_file()}
        sync([folder, *filter(Path.is_dir, inside)])
        seconds = round(time.monotonic() - started, 3)
        begun = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - seconds))
        made = {"files": files, "started": begun, "seconds": seconds, "versions": versions()}
        write_json(folder / MANIFEST, {"format": FORMAT, **asdict(request), "key": request.key, **made})
        sync([folder, folder.parent])
        return seconds


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Returns the manifest of a complete result, or None."""
    return read_json(folder / MANIFEST) or None


def read_request(folder: Path) -> Request | None:
    """Returns what a result, complete or not, is made from; None if the folder does not hold it.

    Names in it become names of folders, so a file with others, which a stranger may have written, is not read.
    """
    try:
        return Request(**read_json(folder / REQUEST))
    except ValueError:  # of another version
        return None


def content_hash(result: Path, under: str) -> str:
    """SHA-256 of the names and hashes of a result's files in one of its sub-folders: the same for the same bytes."""
    files = (read_manifest(result) or {"files": {}})["files"]
    inside = {name: facts["sha256"] for name, facts in files.items() if name.startswith(f"{under}/")}
    return hashlib.sha256(json.dumps(inside, sort_keys=True).encode()).hexdigest()


def hash_on_disk(path: Path) -> dict[str, Any]:
    """The size and hash of a file, once it is on the disk."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": digest}


def link(path: Path, target: Path) -> None:
    """Make `path` a relative symbolic link to `target` in one step, so that it is never absent in between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    part.symlink_to(os.path.relpath(target, path.parent))
    part.replace(path)
