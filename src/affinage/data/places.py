"""Where the files of a source are: on this machine, behind a URL, or on the Hugging Face Hub."""

import os
from collections.abc import Container
from itertools import chain, count
from pathlib import Path
from typing import TypeVar

import pyarrow.parquet as pq

from affinage.config.data import POCKET_WORLD, PlaceSettings, ReadingSettings
from affinage.data.documents import document_files
from affinage.errors import UserError
from affinage.network import is_url

Place = TypeVar("Place", bound=PlaceSettings)


def located(source: Place, settings: ReadingSettings) -> Place:
    """The source with the path, or the name of the dataset, under which its files are opened.

    Relative paths start from `root`. With a `mirror`, what is remote is `<mirror>/<name of the source>` instead.
    """
    if source.path == POCKET_WORLD:
        return source
    if is_remote(source):
        copy = {"path": f"{os.path.expanduser(settings.mirror).rstrip('/')}/{source.title}", "dataset": ""}
        return source.model_copy(update=copy if settings.mirror else {})
    place = os.path.expanduser(source.place)
    if settings.root and not (os.path.isabs(place) or "://" in place):
        place = f"{os.path.expanduser(settings.root).rstrip('/')}/{place}"
    return source.model_copy(update={"path" if source.path else "dataset": place})


def is_remote(source: PlaceSettings) -> bool:
    """Whether its text is on another machine: a URL, or a dataset of the Hub."""
    return is_url(source.place) or is_on_hub(source)


def is_on_hub(source: PlaceSettings) -> bool:
    """Whether a source is a dataset of the Hub: its names are `name` or `owner/name`, everything else is a path."""
    name = source.dataset
    return bool(name) and not (name.startswith((".", "/", "~")) or name.count("/") > 1)


def released_folder(place: str, runs: Path) -> Path:
    """The documents of a folder, or of a run those that its split passed on. Raises UserError if there is neither."""
    for folder in (Path(os.path.expanduser(place)), runs / place):
        folder = folder / "split" if (folder / "split").is_dir() else folder
        if (files := document_files(folder)) and all("text" in pq.read_schema(file).names for file in files):
            return folder
    fix = "Name a run in the folder of runs, or a folder with Parquet files that have a column `text`."
    raise UserError(f"there is no run or folder with documents {place!r}", where="data.dedup.against", fix=fix)


def unique(title: str, taken: Container[str]) -> str:
    """The title, with the first number from 2 on that makes it another than those taken."""
    return next(name for name in chain([title], (f"{title}-{number}" for number in count(2))) if name not in taken)
