"""A pipeline step: a function, the settings that decide its result, and what it reads, known by fingerprints."""

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import rich

from affinage.config.data import POCKET_WORLD
from affinage.config.load import LoadedRecipe
from affinage.config.recipe import Recipe
from affinage.errors import UserError, UserWarned, first_line
from affinage.network import is_url

_KEY = re.compile(r"\w+(\.\w+|\[\d+\])*")
Summary = dict[str, Any]  # JSON-able facts about a result, which become its `result.json`


@dataclass(frozen=True)
class StepContext:
    """The arguments of a step's function."""

    loaded: LoadedRecipe
    folder: Path  # where the result is written; a resumable step finds what an interrupted attempt left there
    inputs: dict[str, Path]  # the folders of the results it reads, by step
    run_folder: Path  # runs/<name>, with links to results of the complete steps
    progress: Callable[[str], None] = lambda _: None  # prints a few words about the work in hand
    on_metrics: Callable[[Mapping[str, Any]], None] = lambda _: None  # receives each line of a training's metrics

    @property
    def recipe(self) -> Recipe:
        """The settings in effect."""
        return self.loaded.recipe

    @property
    def step(self) -> str:
        """The name of the step."""
        return self.folder.name.rpartition("-")[0]

    @property
    def remote(self) -> str | None:
        """The URL that a training is copied to; None if nowhere."""
        remote = self.recipe.runtime.remote
        return None if remote is None else f"{remote.rstrip('/')}/{self.folder.name}"

    @property
    def saves_to(self) -> Path | str:
        """Where Orbax writes the checkpoints of a training: its folder, or a `gs://` URL, which all processes see."""
        return self.remote if self.remote is not None and self.remote.startswith("gs://") else self.folder


@dataclass(frozen=True)
class Step:
    """One step of the pipeline. Its result is a function of all fields down to `sources`, which make up its key.

    Raise `version` with every change of a step's results; `tests/pipeline/test_versions.py` fails if that is forgotten.
    """

    name: str
    fn: Callable[[StepContext], Summary]
    config: dict[str, Any]  # the settings that decide the result, under the recipe's own keys, as JSON
    inputs: tuple[str, ...] = ()  # names of the steps whose results it reads
    version: int = 1
    files: tuple[str, ...] = ()  # paths, folders, globs and URLs of the user's; a plan takes their fingerprints
    sources: dict[str, str] = field(default_factory=dict)  # what else it reads -> fingerprint
    check: Callable[[StepContext], object] | None = None  # raises UserError for what would fail, before any step runs
    artifact: str = ""  # a file of the result that the run's folder links to
    distributed: bool = False  # all processes of a run compute it together; other steps run in the first one alone
    has_progress: bool = False  # shows its own progress on a terminal, as a training does
    resumable: bool = False  # resumes after a kill from what is in its folder; other steps begin with an empty folder


def lazily(module: str, function: str, **settings: Any) -> Callable[..., Any]:
    """A function of a module here, with some of its arguments, that imports it when it is called: plans do without."""
    return lambda *args: getattr(import_module(f"affinage.pipeline.{module}"), function)(*args, **settings)


def mesh_of(recipe: Recipe) -> dict[str, int | str]:
    """The recipe's mesh."""
    return {str(axis): size for axis, size in recipe.mesh.items()}


@contextlib.contextmanager
def located(loaded: LoadedRecipe, section: str) -> Iterator[None]:
    """Inside, errors that name a key of the recipe or of a section of it, such as `data.sources[0]`, name its line."""
    try:
        yield
    except UserError as error:
        keys = [int(word) if word.isdigit() else word for word in re.findall(r"\w+", error.where)]
        if keys and _KEY.fullmatch(error.where):
            if hasattr(getattr(loaded.recipe, section, None), str(keys[0])):
                keys = [section, *keys]
            if keys[0] in Recipe.model_fields:
                error.where = loaded.locate(keys) or error.where
        raise


@contextlib.contextmanager
def at(loaded: LoadedRecipe, *key: str | int) -> Iterator[None]:
    """Inside, errors name the line of the recipe that holds a setting."""
    try:
        yield
    except UserError as error:
        error.where = loaded.locate(key)
        raise


def check_exists(loaded: LoadedRecipe, path: str, *key: str | int) -> None:
    """Raise UserError if a file or folder of the user's, which a setting names, is not there."""
    if path != POCKET_WORLD and "://" not in path and not os.path.exists(os.path.expanduser(path)):
        fix = "Paths start from the working directory."
        raise UserError(f"there is no `{path}`", where=loaded.locate(key), fix=fix)


def print_line(line: str) -> None:
    """Print a line of plain text for people, whatever is in it."""
    rich.get_console().print(line, markup=False, highlight=False, soft_wrap=True)


def remote_fingerprints(paths: Iterable[str], former: Mapping[str, str]) -> dict[str, str]:
    """The versions of those of the paths that are URLs, as their servers give them: the ETag, else the time of change.

    If a server gives none, or does not answer, the fingerprint that was taken before stays, with a warning.
    """
    if not (urls := list(filter(is_url, paths))):
        return {}
    from affinage.data.files import version_of

    def check(url: str) -> str:
        try:
            if version := version_of(url):
                return version
            reason = "the server gives no version"
        except Exception as error:  # each library has its own
            reason = first_line(error.__cause__ or error)
        warnings.warn(f"cannot check whether {url} has changed: {reason}", UserWarned, stacklevel=2)
        return former.get(url, "not checked")

    with ThreadPoolExecutor(max_workers=8) as pool:
        return dict(zip(urls, pool.map(check, urls), strict=True))
