"""Fingerprints of what a recipe reads from outside, so that a changed file makes the steps that read it run again."""

import contextlib
import glob
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from affinage.config.data import POCKET_WORLD
from affinage.data.places import is_url, leads_back, printable
from affinage.paths import from_home
from affinage.pipeline.step import StepContext

_WHOLE = 16_000_000  # bytes: a larger file is known by its size, time and a sample
_BLOCKS, _BLOCK = 64, 65_536  # number of blocks, and bytes of each
_NOT_CHECKED = "not checked"
_SETTLED = 2.0  # seconds after a change until what was read is remembered: a clock may be as coarse
_REMEMBERED = 200_000  # files


def fingerprints(paths: Iterable[str]) -> dict[str, str]:
    """Fingerprint each local file that `paths` name: a file, a folder (all files in it but hidden ones), or a glob.

    The fingerprint is the hash of the content; of files above 16 MB it is the size, the time of change and the hash of
    64 blocks. URLs are left out, see `remote_fingerprints`.

    Returns:
        {path as given, or path of the file found: fingerprint}; nothing for what does not exist.
    """
    found: dict[str, str] = {}
    with _Memory() as memory:
        for path in paths:
            if path != POCKET_WORLD and not is_url(path):
                files = _files(os.path.expanduser(path.removeprefix("file://").removeprefix("local://")))
                found |= {printable(str(file)): memory.fingerprint(file) for file in files}
    return found


def remote_fingerprints(urls: Sequence[str], former: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The versions of files at URLs as their servers give them: the ETag, else size and time of change.

    Where a server gives none, or does not answer, the former fingerprint stays; where there is no former one, it is
    the version of the downloaded copy.

    Args:
        urls: of files, or of folders and globs in object stores.
        former: fingerprints that were taken before.

    Returns:
        The fingerprints, and of each URL that could not be checked the reason.
    """
    from affinage.data.downloads import Unreachable, version_of, version_of_copy

    def ask(url: str) -> tuple[str, str]:
        try:
            return version_of(url, again=True), ""
        except Unreachable as error:
            return "", str(error)

    with ThreadPoolExecutor(max_workers=8) as pool:
        versions = dict(zip(urls, pool.map(ask, urls), strict=True))
    no_version = "the server gives no version"
    unchecked = {url: reason or no_version for url, (version, reason) in versions.items() if not version}
    known = {url: former.get(url) or version_of_copy(url) or _NOT_CHECKED for url in unchecked}
    return {url: known.get(url, version) for url, (version, _) in versions.items()}, unchecked


def forget_downloads(files: Sequence[str], context: StepContext, *, forced: bool) -> None:
    """Before a step that is forced, remove the downloaded copies of what it reads at URLs."""
    if forced and any(map(is_url, files)):
        from affinage.data.downloads import forget

        for url in filter(is_url, files):
            forget(url)


def task_files(paths: Iterable[str]) -> list[str]:
    """Task files and folders with the data files and templates they name: all that their benchmarks are made of."""
    found = []
    for path in paths:
        place = from_home(path)
        found.append(path)
        for file in [*place.rglob("*.yaml"), *place.rglob("*.yml")] if place.is_dir() else [place]:
            found += _named_in(file)
    return list(dict.fromkeys(found))


def _named_in(file: Path) -> list[str]:
    try:
        task = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return []  # reported where the task is read
    if not isinstance(task, dict):
        return []
    data = (task.get("dataset_kwargs") or {}).get("data_files") or []
    data = list(data.values()) if isinstance(data, dict) else [data]
    names = [name for one in [*data, task.get("include") or []] for name in ([one] if isinstance(one, str) else one)]
    return [str(file.parent / name) for name in names]


def _files(path: str) -> list[Path]:
    matches = [Path(path)] if Path(path).exists() else [Path(match) for match in glob.glob(path, recursive=True)]
    files: list[Path] = []
    for match in sorted(matches):
        inside = sorted(_all_in(match)) if match.is_dir() else [match]
        files += [file for file in inside if file.is_file() and not _is_hidden(file.relative_to(match))]
    return files


def _all_in(folder: Path, above: tuple[str, ...] = ()) -> Iterator[Path]:
    """All files below a folder, as the steps read them: also behind links to folders, if these do not lead back."""
    above = (*above, os.path.realpath(folder))
    for entry in folder.iterdir():
        if not entry.is_dir():
            yield entry
        elif not leads_back(str(entry), above):
            yield from _all_in(entry, above)


def _is_hidden(inside: Path) -> bool:
    return any(part.startswith(".") for part in inside.parts)


class _Memory:
    """Fingerprints that were taken before of files that nobody has touched since, by inode and time of its change."""

    def __init__(self) -> None:
        self._file = _memory_file()
        self._known: dict[str, list[Any]] = {}
        self._changed = False

    def __enter__(self) -> "_Memory":
        with contextlib.suppress(OSError, ValueError, TypeError):
            self._known = dict(json.loads(self._file.read_text(encoding="utf-8")))
        return self

    def __exit__(self, *_: object) -> None:
        if self._changed:
            kept = dict(list(self._known.items())[-_REMEMBERED:])
            with contextlib.suppress(OSError):  # it only saves time
                self._file.parent.mkdir(parents=True, exist_ok=True)
                part = self._file.with_name(f".{self._file.name}.{os.getpid()}")
                part.write_text(json.dumps(kept), encoding="utf-8")
                part.replace(self._file)

    def fingerprint(self, file: Path) -> str:
        """The fingerprint of a file, which is read unless it was before."""
        status, name = file.stat(), os.path.abspath(file)
        version = [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        known = self._known.get(name)
        if isinstance(known, list) and known[:-1] == version:
            return str(known[-1])
        found = _fingerprint(file, status)
        if time.time() - status.st_ctime > _SETTLED:
            self._known[name], self._changed = [*version, found], True
        return found


def _memory_file() -> Path:
    from affinage.data.downloads import cache_folder

    return cache_folder() / "fingerprints.json"


def _fingerprint(file: Path, status: os.stat_result) -> str:
    with file.open("rb") as opened:
        if status.st_size <= _WHOLE:
            return hashlib.file_digest(opened, "sha256").hexdigest()[:32]
        digest = hashlib.sha256()
        for number in range(_BLOCKS):
            opened.seek(number * (status.st_size - _BLOCK) // (_BLOCKS - 1))
            digest.update(opened.read(_BLOCK))
    return f"{status.st_size} bytes, changed at {status.st_mtime_ns}, {digest.hexdigest()[:32]}"
