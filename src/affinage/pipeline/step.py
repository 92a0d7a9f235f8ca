"""A pipeline step: a function, the settings that decide its result, and what it reads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from affinage.config.load import LoadedRecipe
from affinage.config.recipe import Recipe

Summary = dict[str, Any]  # JSON-able facts about a result, which become its `result.json`


@dataclass(frozen=True)
class StepContext:
    """The arguments of a step's function."""

    loaded: LoadedRecipe
    folder: Path  # where the result is written; a resumable step finds what an interrupted attempt left there
    inputs: dict[str, Path]  # the folders of the results it reads, by step
    run_folder: Path  # runs/<name>, with links to the results of the complete steps
    progress: Callable[[str], None] = lambda _: None  # prints a few words about the work in hand
    on_metrics: Callable[[Mapping[str, Any]], None] = lambda _: None  # receives each line of a training's metrics

    @property
    def recipe(self) -> Recipe:
        """The settings in effect."""
        return self.loaded.recipe


class Setup(Protocol):
    """See `Step.setup`."""

    def __call__(self, context: StepContext, *, forced: bool) -> None:
        """Prepare the step's folder."""


@dataclass(frozen=True)
class Step:
    """One step of the pipeline. Its result is a function of all fields down to `sources`, which make up its key.

    Raise `version` with every change of the code that makes a step give another result for the same input.
    `tests/pipeline/test_versions.py` fails where that was forgotten.
    """

    name: str
    fn: Callable[[StepContext], Summary]  # imports what it needs in its body, so that a plan loads nothing heavy
    config: dict[str, Any]  # the settings that decide the result, under the recipe's own keys, as JSON
    inputs: tuple[str, ...] = ()  # names of the steps whose results it reads
    version: int = 1
    files: tuple[str, ...] = ()  # paths, folders, globs and URLs of the user's; a plan takes their fingerprints
    sources: dict[str, str] = field(default_factory=dict)  # what else it reads -> fingerprint
    artifact: str = ""  # a file of the result that the run's folder links to
    distributed: bool = False  # all processes of a run compute it together; other steps run in the first one alone
    has_progress: bool = False  # shows its own progress on a terminal, as a training does
    resumable: bool = False  # resumes after a kill from what is in its folder; other steps begin with an empty folder
    setup: Setup | None = None  # called in the first process before any of them begins the work
