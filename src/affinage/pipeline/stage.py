"""What a stage is: a piece of work, what it reads, and what its result depends on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from affinage.config.load import LoadedRecipe
from affinage.config.recipe import Recipe

Summary = dict[str, Any]  # JSON-able facts about a result, which end up in its manifest and in the report


@dataclass(frozen=True)
class StageContext:
    """What a stage's work is given."""

    loaded: LoadedRecipe
    folder: Path  # to write into; for stages that continue, with what an interrupted attempt left
    inputs: dict[str, Path]  # the results it reads, by stage
    run_folder: Path  # runs/<name>, with links to the stages that are complete
    progress: Callable[[str], None] = lambda _: None  # says in a few words what is being done now
    measured: Callable[[Mapping[str, Any]], None] = lambda _: None  # is given every line of a training's metrics

    @property
    def recipe(self) -> Recipe:
        """The settings in effect."""
        return self.loaded.recipe


class Before(Protocol):
    """See `Stage.before`."""

    def __call__(self, context: StageContext, *, anew: bool) -> None:
        """Prepare the folder of the work."""


@dataclass(frozen=True)
class Stage:
    """One step of the road. Its result is a function of `settings`, `inputs`, `sources` and the code of `work`."""

    name: str
    work: Callable[[StageContext], Summary]  # imports what it needs in its body: nothing heavy before it must run
    settings: dict[str, Any]  # the part of the recipe it reads, under the recipe's own keys, as JSON
    inputs: tuple[str, ...] = ()  # names of the stages whose results it reads
    sources: dict[str, str] = field(default_factory=dict)  # the user's files it reads -> fingerprint
    shows: str = ""  # a file of the result that the run's folder links to, for people
    continues: bool = False  # after a kill it goes on from what is in its folder; others start with an empty one
    live: bool = False  # shows its own progress on a terminal, as a training does
    # What the first host does before all of them begin the work; told whether it is forced to be made anew.
    before: "Before | None" = None
    together: bool = False  # all hosts of a run work at it; others are the first one's, and computed with its devices
