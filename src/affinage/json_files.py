"""Files and folders: ours are whole or absent, whatever moment the process is killed at; others' JSON is whatever."""

import contextlib
import errno
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from affinage.errors import UserError


def write_atomically(path: Path, *parts: bytes | memoryview) -> None:
    """Write the parts to `path`, one after the other; after a crash at any moment it is the old file or the new one."""
    partial = path.with_name(f".{path.name}.part")
    try:
        with partial.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        error.filename = str(path)  # which a full disk does not tell
        raise


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder to write into, which then takes the place of `folder`; whatever is raised, it is removed.

    OSError: somebody has made `folder` in the meantime.
    """
    partial, replaces = folder.with_name(f".{folder.name}.partial"), folder.exists()
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        if replaces:
            shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_place(folder: Path | str) -> None:
    """Raise UserError for a folder whose path Orbax takes for a pattern: it would save there what cannot be read."""
    if "://" not in str(folder) and (found := re.search(r"[][*?\\]", place := os.path.abspath(folder))):
        fix = "Rename the folder that has it, or choose another place: --runs, or --to."
        raise UserError(f"no checkpoint can be saved where a path has `{found[0]}`", where=place, fix=fix)


def sync(paths: Iterable[Path]) -> None:
    """Wait until files, and which names are in folders, are on the disk. Raises OSError if it does not take them.

    Some file systems, such as those of a network, cannot do it for a folder: that is no error.
    """
    with ThreadPoolExecutor(8) as threads:  # a file system writes its journal once for all that wait
        for _ in threads.map(_sync, paths):
            pass


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write `value`, which may hold NumPy's numbers and arrays, to `path` as indented JSON, or nothing."""
    text = json.dumps(value, ensure_ascii=False, indent=2, default=lambda other: other.tolist())
    write_atomically(path, text.encode(errors="backslashreplace") + b"\n")  # JSON spells half a surrogate pair so


def read_object(path: Path) -> dict[str, Any]:
    """The object in a file. Raises UserError if it cannot be read, is not JSON, is nested too deep, or is no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"this is not readable JSON: {error}", where=str(path)) from error
    if not isinstance(value, dict):
        raise UserError(f"this is not a JSON object but a {type(value).__name__}", where=str(path))
    return value


def finite(value: Any) -> float | None:
    """A number as a finite float, or None for anything else."""
    try:
        return float(value) if math.isfinite(float(value)) else None
    except (TypeError, ValueError):
        return None


def encodable(text: str) -> str:
    """The text with lone surrogates (JSON's \\ud800) replaced by U+FFFD: UTF-8 has no form for them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
