"""Fingerprints of what a recipe reads from outside, so that a changed file makes the steps that read it run again."""

import contextlib
import glob
import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

from affinage.config.data import POCKET_WORLD
from affinage.data.json_files import write_json
from affinage.data.places import is_url, printable
from affinage.errors import first_line
from affinage.results import read_json

_WHOLE = 16_000_000  # bytes: a larger file is known by its size, time and a sample
_BLOCKS, _BLOCK = 64, 65_536  # number of blocks, and bytes of each
_SETTLED = 2.0  # seconds after a change until a fingerprint is remembered: a clock may be as coarse


def fingerprints(paths: Iterable[str]) -> dict[str, str]:
    """Fingerprint each local file that `paths` name: a file, a folder (all files in it but hidden ones), or a glob.

    The fingerprint is the hash of the content; of files above 16 MB it is the size, the time of change and the hash of
    64 blocks. URLs are left out, see `remote_fingerprints`. A file is read again once its time of change is another.

    Returns:
        {path as given, or path of the file found: fingerprint}; nothing for what does not exist.
    """
    from affinage.data.downloads import cache_folder

    local = [path for path in paths if path != POCKET_WORLD and not is_url(path)]
    places = [os.path.expanduser(path.removeprefix("file://").removeprefix("local://")) for path in local]
    if not (files := [file for place in places for file in _files(place)]):
        return {}
    memory, result, learned = cache_folder() / "fingerprints.json", {}, {}
    known = read_json(memory)
    for file in files:
        status, name = file.stat(), os.path.abspath(file)
        version = [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        entry = known.get(name) or [None]
        if entry[:-1] != version:
            entry = [*version, _fingerprint(file, status)]
            if time.time() - status.st_ctime > _SETTLED:
                learned[name] = entry
        result[printable(str(file))] = str(entry[-1])
    if learned:
        with contextlib.suppress(OSError):  # it only saves time
            memory.parent.mkdir(parents=True, exist_ok=True)
            write_json(memory, known | learned)
    return result


def _fingerprint(file: Path, status: os.stat_result) -> str:
    with file.open("rb") as opened:
        if status.st_size <= _WHOLE:
            return hashlib.file_digest(opened, "sha256").hexdigest()[:32]
        digest = hashlib.sha256()
        for number in range(_BLOCKS):
            opened.seek(number * (status.st_size - _BLOCK) // (_BLOCKS - 1))
            digest.update(opened.read(_BLOCK))
    return f"{status.st_size} bytes, changed at {status.st_mtime_ns}, {digest.hexdigest()[:32]}"


def _files(path: str) -> Iterator[Path]:
    matches = [Path(path)] if Path(path).exists() else [Path(match) for match in glob.glob(path, recursive=True)]
    for match in sorted(matches):
        for file in sorted(match.rglob("*")) if match.is_dir() else [match]:
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(match).parts):
                yield file


def remote_fingerprints(paths: Iterable[str], former: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The versions of files at URLs as their servers give them: the ETag, else size and time of change.

    If a server gives none, or does not answer, the former fingerprint stays; without a former one, it is the version
    of the downloaded copy.

    Args:
        paths: URLs of files, or of folders and globs in object stores; others are left out.
        former: fingerprints that were taken before.

    Returns:
        The fingerprints, and of each URL that could not be checked the reason.
    """
    if not (urls := list(filter(is_url, paths))):
        return {}, {}
    from affinage.data.downloads import version_of, version_of_copy

    def check(url: str) -> tuple[str, str]:
        try:
            return version_of(url), "the server gives no version"
        except Exception as error:  # each library has its own
            return "", first_line(error.__cause__ or error)

    with ThreadPoolExecutor(max_workers=8) as pool:
        versions = dict(zip(urls, pool.map(check, urls), strict=True))
    unchecked = {url: reason for url, (version, reason) in versions.items() if not version}
    known = {url: former.get(url) or version_of_copy(url) or "not checked" for url in unchecked}
    return {url: version for url, (version, _) in versions.items()} | known, unchecked


def task_files(paths: Iterable[str]) -> list[str]:
    """Task files and folders with the data files and templates they name: all that their benchmarks are made of."""
    files = []
    for path in paths:
        place = Path(os.path.expanduser(path))
        files.append(path)
        for file in [*place.rglob("*.yaml"), *place.rglob("*.yml")] if place.is_dir() else [place]:
            with contextlib.suppress(OSError, ValueError, AttributeError, yaml.YAMLError):  # raised where it is read
                task = yaml.safe_load(file.read_text(encoding="utf-8"))
                data = (task.get("dataset_kwargs") or {}).get("data_files") or []
                for group in [*(data.values() if isinstance(data, dict) else [data]), task.get("include") or []]:
                    files += [str(file.parent / name) for name in ([group] if isinstance(group, str) else group)]
    return list(dict.fromkeys(files))
