"""Fingerprints of the user's own files, so that a changed file makes the stages that read it run again."""

import glob
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

from affinage.config.data import POCKET_WORLD
from affinage.data.places import leads_back, printable
from affinage.paths import from_home

# What is more than this is told apart by size and time of change: a plan must not take longer than that.
_READ_WHOLE = 256_000_000  # bytes of one source: a fraction of a second
_READ_FILES = 1_000  # of one source


def fingerprints(
    paths: Iterable[str], root: str = "", *, most_bytes: int = _READ_WHOLE, most_files: int = _READ_FILES
) -> dict[str, str]:
    """Fingerprint each local file that `paths` name: a file, a folder (all files in it but hidden ones), or a glob.

    The fingerprint is the content, so that a copy on another machine is the same; of sources with more than
    `most_bytes` or `most_files` it is size and modification time. URLs are taken at their word: what is behind them
    is assumed not to change.

    Returns:
        {path as given, or path of the file found: fingerprint}; nothing for what does not exist.
    """
    found: dict[str, str] = {}
    for path in paths:
        full = path if not root or "://" in path or os.path.isabs(path) else f"{root.rstrip('/')}/{path}"
        full = full.removeprefix("file://").removeprefix("local://")  # on this machine, however it is written
        if path == POCKET_WORLD:
            continue
        if "://" in full:
            found[full] = "remote"
            continue
        files = _files(os.path.expanduser(full))
        few = len(files) <= most_files and sum(file.stat().st_size for file in files) <= most_bytes
        found |= {printable(str(file)): _fingerprint(file, by_content=few) for file in files}
    return found


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
        return []  # said where the task is read
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
    """All files below a folder, as the stages read them: also behind links to folders, if these do not lead back."""
    above = (*above, os.path.realpath(folder))
    for entry in folder.iterdir():
        if not entry.is_dir():
            yield entry
        elif not leads_back(str(entry), above):
            yield from _all_in(entry, above)


def _fingerprint(file: Path, *, by_content: bool) -> str:
    if by_content:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()[:32]
    status = file.stat()
    return f"{status.st_size} bytes, changed at {status.st_mtime_ns}"


def _is_hidden(inside: Path) -> bool:
    return any(part.startswith(".") for part in inside.parts)
