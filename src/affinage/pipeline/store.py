"""Results of steps, each in a folder that is named by what the result is a function of.

A result is a folder `<step>-<key>/`. Its `request.json` holds what it was made from, its `result.json` what the step
reports about it (see `affinage.results`). Its `manifest.json` is written last and holds the size and hash of every
file: a folder without one is incomplete and is never read as a result. After a kill or a loss of power at any moment,
a folder with a manifest holds all files that the manifest names. A result is deleted by one rename first, so that a
half-deleted one cannot be mistaken for a half-made one.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import affinage
from affinage.errors import UserError
from affinage.results import MANIFEST, RESULT, read_json

REQUEST = "request.json"
FORMAT = 3  # of the folders and keys; with another one, every result is made again
_FIELDS = ("step", "version", "settings", "inputs", "sources")
_NAME = re.compile(r"[\w-]+")
_REPORTED = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "sentencepiece",
    "lm-eval",
)


@dataclass(frozen=True)
class Request:
    """What a result is a function of."""

    step: str
    version: int  # of the step's code
    settings: dict[str, Any]  # the part of the recipe that decides the result, under the recipe's own keys
    inputs: dict[str, str]  # step -> key of the result that is read
    sources: dict[str, str]  # files from outside that are read -> fingerprint

    @cached_property
    def key(self) -> str:
        """The hexadecimal SHA-256 of all fields."""
        canonical = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @staticmethod
    def from_json(value: dict[str, Any]) -> "Request":
        """Returns the request that a `request.json` or a `manifest.json` holds."""
        return Request(**{name: value[name] for name in _FIELDS})


@dataclass(frozen=True)
class Store:
    """A folder of results, which many recipes may share."""

    folder: Path

    def path(self, request: Request) -> Path:
        """Where the result of `request` is, or will be."""
        return self.find(request.step, request.key)

    def find(self, step: str, key: str) -> Path:
        """Where the result of `step` with this key is, or will be."""
        return self.folder / f"{step}-{key[:12]}"

    def damage(self, request: Request) -> str:
        """What is wrong with a result that has a manifest, such as a file that is missing; "" if nothing.

        Only files that were written or moved after the manifest are read, as where a folder was copied, and only once.
        """
        folder = self.path(request)
        manifest = read_manifest(folder)
        if manifest is None:
            return ""
        sealed, later = (folder / MANIFEST).stat().st_mtime_ns, []
        for name, facts in {REQUEST: {}, **manifest["files"]}.items():
            try:
                found = (folder / name).stat()
            except OSError:
                return f"{name} is missing"
            if found.st_size != facts.get("bytes", found.st_size):
                return f"{name} has {found.st_size} bytes instead of {facts['bytes']}"
            if facts and max(found.st_mtime_ns, found.st_ctime_ns) > sealed:
                later.append(name)
        for name in later:
            if _hash(folder / name)["sha256"] != manifest["files"][name]["sha256"]:
                return f"{name} was changed after it was made"
        if later:
            with contextlib.suppress(OSError):  # another user's result is read each time
                os.utime(folder / MANIFEST)
        return ""

    def is_complete(self, request: Request) -> bool:
        """Whether the whole result is there."""
        return read_manifest(self.path(request)) is not None and not self.damage(request)

    def begin(self, request: Request, *, resume: bool) -> Path:
        """Returns the folder to write the result into: an empty one, or with `resume` what an earlier attempt left."""
        folder = self.path(request)
        if not resume:
            self.discard(request)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)
        write_json(folder / REQUEST, asdict(request) | {"key": request.key})
        return folder

    def is_begun(self, request: Request) -> bool:
        """Whether the folder that `begin` returned is still there."""
        return (self.path(request) / REQUEST).is_file()

    def discard(self, request: Request) -> None:
        """Remove a result, complete or not."""
        folder = self.path(request)
        if folder.exists():
            doomed = self.folder / f".discarded-{folder.name}-{time.time_ns()}"
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)  # another process may be sweeping

    def finish(self, request: Request, summary: dict[str, Any], *, started: float, clock: float) -> dict[str, Any]:
        """Write `result.json` and then the manifest, which makes the folder a result; returns the manifest.

        Args:
            request: of the result.
            summary: JSON-able facts about it; see `affinage.results`.
            started: when the work began, in seconds since 1970.
            clock: what `time.monotonic()` was then.

        Raises:
            UserError: the folder was deleted or moved while the result was made.
        """
        folder = self.path(request)
        if not self.is_begun(request):
            raise deleted(folder)
        write_json(folder / RESULT, summary)
        written = (file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
        names = sorted(name for name in written if name != MANIFEST)
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            facts = list(pool.map(lambda name: _hash(folder / name, to_disk=True), names))
        for inner in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
            _sync_folder(inner)
        manifest = {
            "format": FORMAT,
            **asdict(request),
            "key": request.key,
            "files": dict(zip(names, facts, strict=True)),
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
            "seconds": round(time.monotonic() - clock, 3),
            "versions": versions(),
        }
        write_json(folder / MANIFEST, manifest)
        return manifest

    def sweep(self) -> None:
        """Remove what killed processes have left of discarded results."""
        for doomed in self.folder.glob(".discarded-*"):
            shutil.rmtree(doomed, ignore_errors=True)


def deleted(folder: Path) -> UserError:
    """The error if the folder of a result is gone before the result is complete."""
    fix = "Put it back, or make it again; both times, run the same command."
    return UserError("the folder of this result was deleted or moved while it was made", where=str(folder), fix=fix)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Returns the manifest of a complete result, or None."""
    return read_json(folder / MANIFEST) or None


def content_hash(result: Path, under: str) -> str:
    """SHA-256 of the names and hashes of a result's files in one of its sub-folders: the same for the same bytes."""
    files = (read_manifest(result) or {"files": {}})["files"]
    inside = {name: facts["sha256"] for name, facts in files.items() if name.startswith(f"{under}/")}
    return hashlib.sha256(json.dumps(inside, sort_keys=True).encode()).hexdigest()


def read_request(folder: Path) -> tuple[Request, str] | None:
    """Returns what a result, complete or not, is made from, and its key; None if the folder does not hold it."""
    value = read_json(folder / REQUEST)
    try:
        if not all(map(_NAME.fullmatch, _names_in(value))):
            return None
        return Request.from_json(value), value["key"]
    except (KeyError, TypeError, AttributeError):
        return None  # of another version


def _names_in(request: dict[str, Any]) -> Iterator[str]:
    """The names of folders, which must not lead elsewhere in a file that a stranger wrote."""
    yield from (request["step"], request["key"])
    for name, key in request["inputs"].items():
        yield from (name, key)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that after a crash it is either the old one or the new one, whole."""
    text = json.dumps(value, indent=1, ensure_ascii=False, default=_plain)
    temporary = path.with_name(f".{path.name}.part")  # always the same name, so that kills leave one at most
    with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as file:  # half a surrogate pair, as in JSON
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _sync_folder(path.parent)


def link(path: Path, target: Path) -> None:
    """Make `path` a relative symbolic link to `target` in one step, so that it is never absent in between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")  # always the same name, so that kills leave one at most
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(target, path.parent))
    temporary.replace(path)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a manifest names."""
    found = {"affinage": affinage.__version__, "python": platform.python_version()}
    for package in _REPORTED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()  # a NumPy or JAX number or array
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no place in JSON")


def _hash(path: Path, *, to_disk: bool = False) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if to_disk:
            os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": digest}


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
