"""Fingerprints of what a recipe reads from outside, so that a changed file makes the steps that read it run again."""

import contextlib
import glob
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from affinage.config.data import POCKET_WORLD
from affinage.data.places import is_url, printable
from affinage.paths import from_home

_WHOLE = 16_000_000  # bytes: a larger file is known by its size, time and a sample
_BLOCKS, _BLOCK = 64, 65_536  # number of blocks, and bytes of each
_SETTLED = 2.0  # seconds after a change until a fingerprint is remembered: a clock may be as coarse
_REMEMBERED = 200_000  # files


def fingerprints(paths: Iterable[str]) -> dict[str, str]:
    """Fingerprint each local file that `paths` name: a file, a folder (all files in it but hidden ones), or a glob.

    The fingerprint is the hash of the content; of files above 16 MB it is the size, the time of change and the hash of
    64 blocks. URLs are left out, see `remote_fingerprints`.

    Returns:
        {path as given, or path of the file found: fingerprint}; nothing for what does not exist.
    """
    local = [path for path in paths if path != POCKET_WORLD and not is_url(path)]
    files = [
        file
        for path in local
        for file in _files(os.path.expanduser(path.removeprefix("file://").removeprefix("local://")))
    ]
    if not files:
        return {}
    with _memory() as known:
        return {printable(str(file)): _remembered(file, known) for file in files}


def remote_fingerprints(paths: Iterable[str], former: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The versions of files at URLs as their servers give them: the ETag, else size and time of change.

    Where a server gives none, or does not answer, the former fingerprint stays; where there is no former one, it is
    the version of the downloaded copy.

    Args:
        paths: URLs of files, or of folders and globs in object stores; others are left out.
        former: fingerprints that were taken before.

    Returns:
        The fingerprints, and of each URL that could not be checked the reason.
    """
    urls = list(filter(is_url, paths))
    if not urls:
        return {}, {}
    from affinage.data.downloads import Unreachable, version_of, version_of_copy

    def check(url: str) -> tuple[str, str]:
        try:
            return version_of(url, again=True), "the server gives no version"
        except Unreachable as error:
            return "", str(error)

    with ThreadPoolExecutor(max_workers=8) as pool:
        versions = dict(zip(urls, pool.map(check, urls), strict=True))
    unchecked = {url: reason for url, (version, reason) in versions.items() if not version}
    known = {url: former.get(url) or version_of_copy(url) or "not checked" for url in unchecked}
    return {url: known.get(url, version) for url, (version, _) in versions.items()}, unchecked


def forget_downloads(paths: Iterable[str]) -> None:
    """Remove the downloaded copies of the URLs among some paths, so that they are downloaded again."""
    for url in filter(is_url, paths):
        from affinage.data.downloads import forget

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
        data, include = (task.get("dataset_kwargs") or {}).get("data_files") or [], task.get("include") or []
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return []  # reported where the task is read
    groups = [*(data.values() if isinstance(data, dict) else [data]), include]
    return [str(file.parent / name) for group in groups for name in ([group] if isinstance(group, str) else group)]


def _files(path: str) -> Iterator[Path]:
    matches = [Path(path)] if Path(path).exists() else [Path(match) for match in glob.glob(path, recursive=True)]
    for match in sorted(matches):
        for file in sorted(match.rglob("*")) if match.is_dir() else [match]:
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(match).parts):
                yield file


@contextlib.contextmanager
def _memory() -> Iterator[dict[str, Any]]:
    """Fingerprints that were taken before, by path; those that are added inside are stored."""
    from affinage.data.downloads import cache_folder

    file, known = cache_folder() / "fingerprints.json", {}
    with contextlib.suppress(OSError, ValueError, TypeError):
        known = dict(json.loads(file.read_text(encoding="utf-8")))
    before = len(known), list(known.values())
    yield known
    if before != (len(known), list(known.values())):
        with contextlib.suppress(OSError):  # it only saves time
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_name(f".{file.name}.{os.getpid()}")
            part.write_text(json.dumps(dict(list(known.items())[-_REMEMBERED:])), encoding="utf-8")
            part.replace(file)


def _remembered(file: Path, known: dict[str, Any]) -> str:
    """The fingerprint of a file, which is read unless it was before and nobody has touched it since."""
    status, name = file.stat(), os.path.abspath(file)
    version = [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    before = known.get(name)
    if isinstance(before, list) and before[:-1] == version:
        return str(before[-1])
    found = _fingerprint(file, status)
    if time.time() - status.st_ctime > _SETTLED:
        known[name] = [*version, found]
    return found


def _fingerprint(file: Path, status: os.stat_result) -> str:
    with file.open("rb") as opened:
        if status.st_size <= _WHOLE:
            return hashlib.file_digest(opened, "sha256").hexdigest()[:32]
        digest = hashlib.sha256()
        for number in range(_BLOCKS):
            opened.seek(number * (status.st_size - _BLOCK) // (_BLOCKS - 1))
            digest.update(opened.read(_BLOCK))
    return f"{status.st_size} bytes, changed at {status.st_mtime_ns}, {digest.hexdigest()[:32]}"
