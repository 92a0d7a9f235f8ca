"""Files of the user's: which belong to a benchmark, and fingerprints of what is in them."""

import contextlib
import glob
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

from affinage.network import is_url

_WHOLE = 16_000_000  # bytes: a larger file is known by its size, time and a sample
_BLOCKS, _BLOCK = 64, 65_536  # number of blocks, and bytes of each


def fingerprints(paths: Iterable[str]) -> dict[str, str]:
    """Fingerprint each local file that `paths` name: a file, a folder (all files in it but hidden ones), or a glob.

    The fingerprint is the hash of the content; of files above 16 MB it is the size, the time of change and the hash of
    64 blocks. Returns {path of the file: fingerprint}, without URLs and what does not exist.
    """
    files = [file for path in paths if not is_url(path) for file in _files(path)]
    # Bytes in a name that are not UTF-8, as old archives have them, are spelled: two names must not become one.
    return {os.fsencode(file).decode("utf-8", "backslashreplace"): _fingerprint(file) for file in files}


def _fingerprint(file: Path) -> str:
    status = file.stat()
    with file.open("rb") as opened:
        if status.st_size <= _WHOLE:
            return hashlib.file_digest(opened, "sha256").hexdigest()[:32]
        digest = hashlib.sha256()
        for number in range(_BLOCKS):
            opened.seek(number * (status.st_size - _BLOCK) // (_BLOCKS - 1))
            digest.update(opened.read(_BLOCK))
    return f"{status.st_size} bytes, changed at {status.st_mtime_ns}, {digest.hexdigest()[:32]}"


def _files(path: str) -> Iterator[Path]:
    place = os.path.expanduser(path.removeprefix("file://").removeprefix("local://"))
    for match in map(Path, [place] if os.path.exists(place) else sorted(glob.glob(place, recursive=True))):
        for file in sorted(match.rglob("*")) if match.is_dir() else [match]:
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(match).parts):
                yield file


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
