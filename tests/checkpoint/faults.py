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


def _any(folder: Path, draw: random.Random, *, filled: bool = True) -> Path:
    return draw.choice([path for path in _files(folder) if path.stat().st_size or not filled])


def place(sound: Path, folder: Path) -> None:
    """Make `folder` a copy of the steps in `sound`, after one fault at most."""
    folder.mkdir(exist_ok=True)
    if not (folder / OLD).is_dir():
        shutil.copytree(sound / OLD, folder / OLD)
    if (folder / NEW).is_symlink():
        (folder / NEW).unlink()
    shutil.rmtree(folder / NEW, ignore_errors=True)
    shutil.copytree(sound / NEW, folder / NEW)


def flip(folder: Path, draw: random.Random) -> None:
    """One bit of one file."""
    path = _any(folder / NEW, draw)
    contents = bytearray(path.read_bytes())
    contents[draw.randrange(len(contents))] ^= 1 << draw.randrange(8)
    path.write_bytes(contents)


def flip_weights(folder: Path, draw: random.Random) -> None:
    """One bit of the arrays themselves, which Orbax loads without a word."""
    path = draw.choice([path for path in _files(folder / NEW) if path.parent.name == "d"])
    contents = bytearray(path.read_bytes())
    contents[draw.randrange(len(contents))] ^= 1 << draw.randrange(8)
    path.write_bytes(contents)


def truncate(folder: Path, draw: random.Random) -> None:
    """The end of a file."""
    path = _any(folder / NEW, draw)
    os.truncate(path, draw.randrange(path.stat().st_size))


def append(folder: Path, draw: random.Random) -> None:
    """A file that is longer than it was."""
    with _any(folder / NEW, draw, filled=False).open("ab") as file:
        file.write(draw.randbytes(draw.randint(1, 9)))


def zero(folder: Path, draw: random.Random) -> None:
    """A file full of zeros, as journals replay them after a loss of power."""
    path = _any(folder / NEW, draw)
    path.write_bytes(bytes(path.stat().st_size))


def delete(folder: Path, draw: random.Random) -> None:
    """A file."""
    _any(folder / NEW, draw, filled=False).unlink()


def delete_folder(folder: Path, draw: random.Random) -> None:
    """A folder with all below it."""
    shutil.rmtree(draw.choice(sorted(path for path in (folder / NEW).rglob("*") if path.is_dir())))


def add(folder: Path, draw: random.Random) -> None:
    """A file that is none of the checkpoint's."""
    (_any(folder / NEW, draw).parent / f"added-{draw.randrange(1000)}").write_bytes(draw.randbytes(draw.randint(0, 9)))


def swap_files(folder: Path, draw: random.Random) -> None:
    """Two files of different contents exchanged."""
    first = _any(folder / NEW, draw)
    second = draw.choice([path for path in _files(folder / NEW) if path.read_bytes() != first.read_bytes()])
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


def from_the_older_step(folder: Path, draw: random.Random) -> None:
    """A file, a tree or the whole step replaced by that of the step before."""
    trees = sorted(path.name for path in (folder / NEW).iterdir() if path.is_dir())
    chosen = draw.choice(["", *trees, *trees])
    shutil.rmtree(folder / NEW / chosen)
    shutil.copytree(folder / OLD / chosen, folder / NEW / chosen)


def partial_copy(folder: Path, draw: random.Random) -> None:
    """A copy that ended after some of the files, in the order of their names or any other."""
    files = _files(folder / NEW)
    draw.shuffle(files)
    for path in files[: draw.randint(1, len(files) - 1)]:
        path.unlink()


def link(folder: Path, draw: random.Random) -> None:
    """A symbolic link in place of a file, a folder or the step, to the same or to other contents."""
    path = draw.choice([folder / NEW, *sorted((folder / NEW).rglob("*"))])
    target = folder / OLD if draw.random() < 0.5 or path == folder / NEW else folder.parent / "copy"
    aim = target / path.relative_to(folder / NEW) if path != folder / NEW else target
    if target.name == "copy":
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder / NEW, target)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    path.symlink_to(aim)


def stale_marks(folder: Path, draw: random.Random) -> None:
    """The marks of a finished save around what is none: nothing, or the remains of a save that was cut off."""
    marks = {name: (folder / NEW / name).read_bytes() for name in ("commit_success.txt", "SHA256SUMS")}
    if draw.random() < 0.5:
        shutil.rmtree(folder / NEW)
        (folder / NEW).mkdir()
    else:
        _any(folder / NEW / "params", draw).unlink()  # the marks alone would be written again
        partial_copy(folder, draw)
    left = draw.sample(sorted(marks), draw.randint(1, 2))
    for name in left:
        (folder / NEW / name).write_bytes(draw.choice([marks[name], b"", marks[name][:-1]]))


def shortened_seal(folder: Path, draw: random.Random) -> None:
    """A line of the seal gone, or written twice, or with a letter in the other case."""
    path = folder / NEW / "SHA256SUMS"
    lines = path.read_text().splitlines(keepends=True)
    at = draw.randrange(len(lines))
    changed = draw.choice([[], [lines[at]] * 2, [lines[at][:64].upper() + lines[at][64:]], [lines[at].strip()]])
    if changed == [lines[at]]:  # a hash of digits alone has no case
        changed = []
    path.write_text("".join([*lines[:at], *changed, *lines[at + 1 :]]))


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        *(flip, flip_weights, truncate, append, zero, delete, delete_folder, add, swap_files),
        *(from_the_older_step, partial_copy, link, stale_marks, shortened_seal),
    )
}
