"""Where the files of a source are: on this machine, behind a URL, or on the Hub."""

import os
from collections.abc import Container
from pathlib import Path

from affinage.config.data import POCKET_WORLD, PlaceSettings
from affinage.errors import UserError


def location(source: PlaceSettings, root: str, mirror: str) -> str:
    """Where the files of a source are; of a dataset that is not a local folder, its name on the Hub.

    Relative paths start from `root`. With a `mirror`, what is remote is `<mirror>/<name of the source>` instead.
    """
    if source.path == POCKET_WORLD:
        return POCKET_WORLD
    if mirror and is_remote(source):
        return f"{os.path.expanduser(mirror).rstrip('/')}/{source.title}"
    place = os.path.expanduser(source.path or source.dataset)
    if is_remote(source) or not root or os.path.isabs(place) or "://" in place:
        return place
    return f"{os.path.expanduser(root).rstrip('/')}/{place}"


def is_remote(source: PlaceSettings) -> bool:
    """Whether its text is on another machine: a URL, or a dataset of the Hub."""
    return is_url(source.path) or (bool(source.dataset) and not is_folder(source.dataset))


def is_on_hub(source: PlaceSettings, mirror: str) -> bool:
    """Whether a source is a dataset that must be fetched from the Hub."""
    return bool(source.dataset) and is_remote(source) and not mirror


def is_url(path: str) -> bool:
    """Whether a path leads off this machine."""
    return "://" in path and not path.startswith(("file://", "local://", "memory://"))


def is_folder(dataset: str) -> bool:
    """Whether a dataset is a folder: the Hub's names are `name` or `owner/name`, everything else is a path."""
    return dataset.startswith((".", "/", "~")) or dataset.count("/") > 1


def released_folder(place: str, runs: Path) -> Path:
    """The documents of a run in the folder of runs, or of a folder: of a run, those that its split passed on.

    Raises UserError if there is no such run or folder.
    """
    for folder in (Path(os.path.expanduser(place)), runs / place):
        if folder.is_dir():
            return folder / "split" if (folder / "split").is_dir() else folder
    fix = "Name a run in the folder of runs, or a folder with Parquet files that have a column `text`."
    raise UserError(f"there is no run or folder {place!r}", where="data.dedup.against", fix=fix)


def unique(title: str, taken: Container[str]) -> str:
    """The title, with the first number from 2 on that makes it another than those taken."""
    name, number = title, 2
    while name in taken:
        name, number = f"{title}-{number}", number + 1
    return name


def printable(path: str) -> str:
    """A path as text: bytes in it that are not UTF-8, as old archives have them, are spelled (caf\\xe9.txt)."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
