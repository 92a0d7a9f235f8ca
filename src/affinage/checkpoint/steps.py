"""A folder of steps: which of them are there completely, which stay, and how one is removed."""

import contextlib
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from affinage.checkpoint.seal import SEAL

STEP = re.compile(r"0|[1-9]\d*")
_COMMIT = "commit_success.txt"  # Orbax writes it when everything of its own is on disk
_MARKS = (_COMMIT, SEAL)


def complete_steps(folder: Path) -> list[int]:
    """The steps of a folder that are completely there, oldest first."""
    return [step for step, path in entries(folder) if not why_not_read(path)]


def why_not_read(path: Path) -> str:
    """Why what is called like a step is none, in words; "" if it is completely there."""
    if path.is_symlink():  # which Orbax would follow
        return "it is a symbolic link, which is not followed, as it may lead anywhere"
    if not path.is_dir():
        return "it is no folder"
    return "" if _is_complete(path) else "it is not complete: a save was cut off here"


def kept_steps(steps: Sequence[int], keep_last: int, keep_every: int | None) -> set[int]:
    """Those of the ascending `steps` that stay."""
    return {*steps[-keep_last:], *(step for step in steps if keep_every and step % keep_every == 0)}


def entries(folder: Path) -> list[tuple[int, Path]]:
    """Whatever is called like a step, oldest first."""
    found = [path for path in folder.iterdir() if STEP.fullmatch(path.name)] if folder.is_dir() else []
    return sorted((int(path.name), path) for path in found)


def _is_complete(path: Path) -> bool:
    return all((path / mark).is_file() for mark in _MARKS)


def remove(path: Path) -> None:
    """Remove a step, so that it does not look complete at any moment."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    for mark in reversed(_MARKS):  # first: a step half removed must not look complete
        (path / mark).unlink(missing_ok=True)
    shutil.rmtree(path)


def drop_remains(folder: Path, *, before: int | None = None) -> None:
    """Remove what saves and copies that were cut off have left, of steps before `before` if that is given.

    To be called while no such step is being written.
    """
    complete = complete_steps(folder)
    cut_off = [path for step, path in entries(folder) if step not in complete and (before is None or step < before)]
    for path in [*cut_off, *folder.glob(".*.part")]:
        if path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError):  # a run does not end for it
                remove(path)
