"""Where the files of a source are: on this machine, behind a URL, or on the Hugging Face Hub; what the Hub answers."""

import os
from collections.abc import Container
from pathlib import Path
from typing import TypeVar

from affinage.config.data import POCKET_WORLD, PlaceSettings, ReadingSettings
from affinage.errors import TransientError, UserError, causes, first_line, is_transient

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


def is_url(path: str) -> bool:
    """Whether a path leads off this machine."""
    return "://" in path and not path.startswith(("file://", "local://", "memory://"))


def released_folder(place: str, runs: Path) -> Path:
    """The documents of a folder, or of a run those that its split passed on. Raises UserError if there is neither."""
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


# ---- the Hub ----


def limit_requests(seconds: float = 120.0) -> None:
    """Let huggingface_hub's requests fail after some seconds without an answer, for which they would wait forever."""
    from huggingface_hub import get_session

    get_session().timeout = seconds


def refusal(error: Exception, kind: str, name: str, *, revision: str = "", where: str = "") -> UserError:
    """The message for an error of huggingface_hub or `datasets`; a TransientError if it may pass.

    `kind` is dataset or model, `name` and `revision` are of the repository, and `where` is the place in the recipe.
    """
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
    for cause in causes(error):
        final = isinstance(cause, errors.HFValidationError | errors.OfflineModeIsEnabled)
        if isinstance(cause, errors.GatedRepoError):
            fix = f"Accept its terms at {page}, then log in: hf auth login."
            return UserError(f"the {kind} {name!r} is gated", where=where, fix=fix)
        if final or (isinstance(cause, errors.HfHubHTTPError) and not is_transient(cause)):
            what = f"the Hub does not give the {kind} {name!r}" + (f" at revision {revision!r}" if revision else "")
            fix = f"Is the name right? See {page}. Private ones need: hf auth login (or HF_TOKEN). A folder on this "
            return UserError(f"{what}: {first_line(cause)}", where=where, fix=f"{fix}machine is written ./FOLDER.")
    what = f"the Hugging Face Hub cannot be reached for the {kind} {name!r}: {first_line(error)}"
    fix = f"Is there a network? Run the same command again, or name a copy of the {kind} on this machine in its place"
    return TransientError(what, where=where, fix=fix + (", or data.mirror." if kind == "dataset" else "."))
