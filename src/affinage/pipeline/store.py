"""Results of stages, addressed by what they are a function of.

A result is a folder `<stage>-<key>/`. Its `request.json` says what it was made from, and its `manifest.json`, written
last, holds the size and hash of every file: a folder without one is incomplete and is never read as a result.
What is promised: after a kill or a loss of power at any moment, a folder with a manifest holds all that the manifest
names. Deleting a result is one rename, so a half-deleted one cannot be mistaken for a half-made one.
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

MANIFEST = "manifest.json"
REQUEST = "request.json"
_NAME = re.compile(r"[\w-]+")
FORMAT = 1  # of the folders; a change makes every result anew
_REPORTED = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "sentencepiece",
    "lm-eval",
)


@dataclass(frozen=True)
class Request:
    """All that a result is a function of."""

    stage: str
    settings: dict[str, Any]  # the part of the recipe that the stage reads, under the recipe's own keys
    inputs: dict[str, str]  # stage -> key of the result it reads
    sources: dict[str, str]  # the user's own files it reads -> fingerprint
    code: dict[str, str]  # source file -> hash

    @cached_property
    def key(self) -> str:
        """Hexadecimal SHA-256 of everything above."""
        canonical = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @staticmethod
    def from_json(value: dict[str, Any]) -> "Request":
        """The request that a `request.json` or a `manifest.json` holds."""
        return Request(**{name: value[name] for name in ("stage", "settings", "inputs", "sources", "code")})


@dataclass(frozen=True)
class Store:
    """A folder of results. Many recipes may share it; which process may write a result `stages.locks` says."""

    folder: Path

    def path(self, request: Request) -> Path:
        """Where the result of `request` is, or will be."""
        return self.folder / f"{request.stage}-{request.key[:12]}"

    def find(self, stage: str, key: str) -> Path:
        """Where the result of `stage` with this key is, or will be."""
        return self.folder / f"{stage}-{key[:12]}"

    def damage(self, request: Request) -> str:
        """What is wrong with a result that has a manifest: a file that is gone, or is not what it was; "" if nothing.

        Only files that were written or moved after the manifest are read, as where a folder was copied, and only once.
        """
        folder = self.path(request)
        manifest = read_manifest(folder)
        if manifest is None:
            return ""
        sealed, later = (folder / MANIFEST).stat().st_mtime_ns, []
        for name, facts in manifest["files"].items():
            try:
                found = (folder / name).stat()
            except OSError:
                return f"{name} is missing"
            if found.st_size != facts["bytes"]:
                return f"{name} has {found.st_size} bytes instead of {facts['bytes']}"
            if max(found.st_mtime_ns, found.st_ctime_ns) > sealed:
                later.append(name)
        for name in later:
            if _sha256(folder / name) != manifest["files"][name]["sha256"]:
                return f"{name} was changed after it was made"
        if later:
            with contextlib.suppress(OSError):  # it is somebody else's: then they are read each time
                os.utime(folder / MANIFEST)
        return ""

    def is_complete(self, request: Request) -> bool:
        """Whether the result is there, whole."""
        return read_manifest(self.path(request)) is not None and not self.damage(request)

    def begin(self, request: Request, *, anew: bool) -> Path:
        """The folder to write the result into: empty if `anew`, else with what an earlier attempt left there."""
        folder = self.path(request)
        if anew:
            self.discard(request)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)
        write_json(folder / REQUEST, asdict(request) | {"key": request.key})
        return folder

    def discard(self, request: Request) -> None:
        """Remove a result, whole or half."""
        folder = self.path(request)
        if folder.exists():
            doomed = self.folder / f".discarded-{folder.name}-{time.time_ns()}"
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)  # another process may be sweeping

    def finish(self, request: Request, summary: dict[str, Any], *, started: float, clock: float) -> dict[str, Any]:
        """Write the manifest, which makes the folder a result. Returns it.

        The work began at `started`, in seconds since 1970, when `time.monotonic()` was `clock`.
        """
        folder = self.path(request)
        written = (file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
        names = sorted(name for name in written if name != MANIFEST)
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            facts = list(pool.map(_hash_to_disk, [folder / name for name in names]))
        for inner in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
            _sync_folder(inner)
        manifest = {
            "format": FORMAT,
            **asdict(request),
            "key": request.key,
            "files": dict(zip(names, facts, strict=True)),
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
            "seconds": round(time.monotonic() - clock, 3),
            "summary": summary,
            "versions": versions(),
        }
        write_json(folder / MANIFEST, manifest)
        return manifest

    def sweep(self) -> None:
        """Remove what processes that were killed have left of results that they discarded."""
        for doomed in self.folder.glob(".discarded-*"):
            shutil.rmtree(doomed, ignore_errors=True)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a complete result, or None."""
    return _read_json(folder / MANIFEST)


def content_hash(result: Path, under: str) -> str:
    """SHA-256 of the names and hashes of a result's files in one of its sub-folders: the same for the same bytes."""
    files = (read_manifest(result) or {"files": {}})["files"]
    inside = {name: facts["sha256"] for name, facts in files.items() if name.startswith(f"{under}/")}
    return hashlib.sha256(json.dumps(inside, sort_keys=True).encode()).hexdigest()


def read_request(folder: Path) -> tuple[Request, str] | None:
    """What a result, complete or not, is made from, and its key; None if the folder does not say."""
    value = _read_json(folder / REQUEST)
    try:
        if value is None or not all(map(_NAME.fullmatch, _names_in(value))):
            return None
        return Request.from_json(value), value["key"]
    except (KeyError, TypeError, AttributeError):
        return None  # another version's


def _names_in(request: dict[str, Any]) -> Iterator[str]:
    """What folders are called by, and must lead nowhere else where a stranger has written it."""
    yield from (request["stage"], request["key"])
    for name, key in request["inputs"].items():
        yield from (name, key)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that after a crash it is either the old one or the new one, whole."""
    text = json.dumps(value, indent=1, ensure_ascii=False, default=_plain)
    temporary = path.with_name(f".{path.name}.part")  # the same name each time: a kill leaves one at most
    with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as file:  # as JSON spells half a character
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _sync_folder(path.parent)


def link(path: Path, target: Path) -> None:
    """Make `path` a relative symbolic link to `target`, in one step: it is never absent in between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")  # the same name each time: a kill leaves one at most
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(target, path.parent))
    temporary.replace(path)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on."""
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


def _hash_to_disk(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": digest}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
