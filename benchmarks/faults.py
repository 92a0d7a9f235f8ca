"""What disks, copies and people do to the newest of two checkpoints. Each fault leaves the older one as it is."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

OLD, NEW = "1", "2"
Fault = Callable[[Path, random.Random], None]  # the folder of steps, and the choice of what to damage


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _any(folder: Path, draw: random.Random) -> Path:
    return draw.choice([path for path in _files(folder) if path.stat().st_size])


def place(sound: Path, folder: Path) -> None:
    """Make `folder` a copy of the steps in `sound`, after one fault at most."""
    folder.mkdir(exist_ok=True)
    if not (folder / OLD).is_dir():
        shutil.copytree(sound / OLD, folder / OLD)
    if (folder / NEW).is_symlink():
        (folder / NEW).unlink()
    shutil.rmtree(folder / NEW, ignore_errors=True)
    shutil.copytree(sound / NEW, folder / NEW)


def _changed(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def _flipped(contents: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(contents))
    return contents[:at] + bytes([contents[at] ^ 1 << draw.randrange(8)]) + contents[at + 1 :]


def flip(folder: Path, draw: random.Random) -> None:
    """One bit of one file."""
    _changed(_any(folder / NEW, draw), lambda contents: _flipped(contents, draw))


def flip_weights(folder: Path, draw: random.Random) -> None:
    """One bit of the arrays themselves, which Orbax loads without a word."""
    path = draw.choice([path for path in _files(folder / NEW) if path.parent.name == "d"])
    _changed(path, lambda contents: _flipped(contents, draw))


def truncate(folder: Path, draw: random.Random) -> None:
    """The end of a file."""
    _changed(_any(folder / NEW, draw), lambda contents: contents[: draw.randrange(len(contents))])


def zero(folder: Path, draw: random.Random) -> None:
    """A file full of zeros, as journals replay them after a loss of power."""
    _changed(_any(folder / NEW, draw), lambda contents: bytes(len(contents)))


def add(folder: Path, draw: random.Random) -> None:
    """A file that is none of the checkpoint's."""
    (_any(folder / NEW, draw).parent / f"added-{draw.randrange(1000)}").write_bytes(draw.randbytes(9))


def from_the_older_step(folder: Path, draw: random.Random) -> None:
    """A tree or the whole step replaced by that of the step before."""
    trees = sorted(path.name for path in (folder / NEW).iterdir() if path.is_dir())
    chosen = draw.choice(["", *trees])
    shutil.rmtree(folder / NEW / chosen)
    shutil.copytree(folder / OLD / chosen, folder / NEW / chosen)


def partial_copy(folder: Path, draw: random.Random) -> None:
    """A copy that ended after some of the files, in the order of their names or any other."""
    files = _files(folder / NEW)
    draw.shuffle(files)
    for path in files[: draw.randint(1, len(files) - 1)]:
        path.unlink()


def link(folder: Path, draw: random.Random) -> None:
    """A symbolic link in place of a file, a folder or the step, to what the older step has there."""
    path = draw.choice([folder / NEW, *sorted((folder / NEW).rglob("*"))])
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(folder / OLD / path.relative_to(folder / NEW))


def stale_marks(folder: Path, draw: random.Random) -> None:
    """The marks of a finished save around nothing, or around the remains of a save that was cut off."""
    marks = {name: (folder / NEW / name).read_bytes() for name in ("commit_success.txt", "SHA256SUMS")}
    if draw.random() < 0.5:
        shutil.rmtree(folder / NEW)
        (folder / NEW).mkdir()
    else:
        os.unlink(_any(folder / NEW / "params", draw))  # the marks alone would be written again
    for name in draw.sample(sorted(marks), draw.randint(1, 2)):
        (folder / NEW / name).write_bytes(draw.choice([marks[name], b"", marks[name][:-1]]))


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (flip, flip_weights, truncate, zero, add, from_the_older_step, partial_copy, link, stale_marks)
}
