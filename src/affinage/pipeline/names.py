"""What a name on the command line stands for, in one order for all verbs: a path, a run, a packaged recipe.

A run is named `NAME[/STEP][@N]`: `quickstart`, `quickstart/sft`, `quickstart/pretrain@1000`. Without a step of the
pipeline, a run stands for its last training. Nothing here imports JAX, and nothing trains.
"""

import contextlib
import json
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from affinage.config.layers import find_recipe, packaged_recipes
from affinage.config.load import LoadedRecipe, load_recipe, load_saved
from affinage.errors import UserError, did_you_mean
from affinage.pipeline.store import read_manifest, read_request
from affinage.results import read_json

MODEL = "model.json"  # beside the checkpoints of a training or an import: what is needed to load them
KEPT = "kept"  # a checkpoint in place of those of the training
HUB_CONFIG = "config.json"  # of a Hugging Face folder
RECIPE, COMMAND = "recipe.json", "run.json"  # of a run: its settings, and the command that made it
ITEMS = "items"  # of the results of an evaluation
TRAININGS = ("dpo", "sft", "pretrain")  # the last one that a run has is the run's model
EVALUATIONS = {"pretrain": "evaluate-base", "sft": "evaluate-sft", "dpo": "evaluate-dpo"}
_RECIPE_SUFFIXES = (".yaml", ".yml", ".json")
_LISTED = 5  # names in a message


@dataclass(frozen=True)
class Target:
    """What a name stands for."""

    name: str  # as it was given
    kind: Literal["recipe", "run", "model", "hub", "result"]  # "model": a training or an import
    path: Path  # the recipe's file, or the folder
    step: int | None = None  # of the checkpoint that was named
    warning: str = ""  # where the name fits something else, too
    belongs_to: Path | None = None  # the run, where its path does not lie in it

    @property
    def run(self) -> Path | None:
        """The folder of the run that it is or belongs to; None if it belongs to none."""
        folders = () if self.kind == "recipe" else (self.path, self.path.parent)
        return self.belongs_to or next((folder for folder in folders if (folder / RECIPE).is_file()), None)


@dataclass(frozen=True)
class ModelState:
    """How far the training of a model is."""

    name: str  # of the training, as every verb takes it
    step: int
    steps: int | None  # that the training has in all, as far as that is known
    missing: tuple[str, ...]  # later trainings of its recipe that are not complete

    def __str__(self) -> str:
        whole = "" if self.steps is None else f" of {self.steps:,}"
        rest = f"; not trained yet: {', '.join(self.missing)}" if self.missing else ""
        return f"{self.name}, step {self.step:,}{whole}{rest}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"model": self.name, "step": self.step, "steps": self.steps, "missing": list(self.missing)}


def resolve(name: str, runs: Path) -> Target:
    """What `name` stands for: a path if it is one, else a run in the folder `runs`, else a packaged recipe.

    A file counts if it is called like a recipe, a folder if it is a run, a model, or the result of a step. Another
    meaning of the name is put into words in `warning`.

    Raises:
        UserError: it stands for nothing; the message lists what there is.
    """
    word, step = name, None
    if not os.path.exists(name):
        head, at, number = name.rpartition("@")
        if at and number.isdecimal():
            word, step = head, int(number)
        elif at and "://" not in name:
            raise UserError(f"`@{number}` is no checkpoint", where=name, fix="Write the number of a step, as in @1000.")
    here, in_runs = _kind(Path(word)), None if word.startswith((".", "/")) else _kind(runs / word)
    found = [Target(name, kind, place, step) for kind, place in ((here, Path(word)), (in_runs, runs / word)) if kind]
    if len(found) == 2 and os.path.samefile(found[0].path, found[1].path):
        found.pop()
    if not found and step is None and word in packaged_recipes():
        found = [Target(name, "recipe", packaged_recipes()[word])]
    if not found and step is None and os.path.isfile(word):
        found = [Target(name, "recipe", Path(word))]
    if not found:
        raise _unknown(word, runs)
    if step is not None and found[0].kind not in ("run", "model"):
        raise UserError("this has no checkpoints", where=name, fix=f"Write `{word}`.")
    if len(found) == 2:
        other = f"`{word}` is {found[0].path} here; the run of this name is `{found[1].path}`"
        return replace(found[0], warning=other)
    return found[0]


def _kind(place: Path) -> Any:
    """The kind of a target that a path is; None for a path that is none."""
    if os.path.isfile(place):
        if place.suffix not in _RECIPE_SUFFIXES:
            return None
        return "recipe"
    if not os.path.isdir(place):
        return None
    if (place / MODEL).is_file():
        return "model"
    if (place / HUB_CONFIG).is_file():
        return "hub"
    if (place / RECIPE).is_file() or any((place / training / MODEL).is_file() for training in TRAININGS):
        return "run"
    return "result" if (place / ITEMS).is_dir() or read_request(place) is not None else None


def _unknown(word: str, runs: Path) -> UserError:
    if Path(word).suffix in _RECIPE_SUFFIXES:
        find_recipe(word)  # raises, with the nearest file beside it
    for folder in (Path(word), runs / word):
        if os.path.isdir(folder):
            inside = _models_in(folder)
            fix = f"Name one of those in it: {_listed(inside)}." if inside else "Name a run, a model, or a recipe."
            return UserError("this folder is neither a run nor a model", where=str(folder), fix=fix)
    run, _, part = word.rpartition("/")
    if run and (trained := [*trainings_of(runs / run), *trainings_of(Path(run))]):
        there = ", ".join(f"{run}/{training}" for training in trained)
        return UserError(f"`{run}` has no `{part}`", fix=f"It has {there}.")
    made, packaged = run_names(runs), packaged_recipes()
    listed = [f"Runs in {runs}: {', '.join(made)}." if made else f"There are no runs in {runs}."]
    listed.append(f"Packaged recipes: {', '.join(packaged)}.")
    fix = did_you_mean(word, [*made, *packaged]) or " ".join(listed)
    return UserError(f"there is no path, run or recipe named `{word}`", fix=fix)


def _models_in(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):  # a folder of others, which this user may not read
        return sorted(str(entry) for entry in folder.iterdir() if _kind(entry) in ("run", "model", "hub"))
    return []


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


def run_names(runs: Path) -> list[str]:
    """The runs in a folder of runs."""
    return sorted(file.parent.name for file in runs.glob(f"*/{RECIPE}")) if runs.is_dir() else []


def command(verb: str, *words: str, runs: Path = Path("runs")) -> str:
    """A command of affinage, quoted for a shell, with the folder of runs where that is not the default one."""
    default = os.environ.get("AFFINAGE_RUNS") or "runs"
    option = [] if os.path.abspath(runs) == os.path.abspath(default) else ["--runs", str(runs)]
    return shlex.join(["affinage", *verb.split(), *words, *option])


# Recipes and runs


def recipe_of(
    target: Target, runs: Path, overrides: Sequence[str] = (), *, warn: Callable[[str], None] | None = None
) -> LoadedRecipe:
    """The recipe that a target stands for: of a run and of what belongs to it, the settings it was last made with.

    `overrides` are laid over it. Settings of a run that are gone are refused; with `warn` they are left out, and a line
    that lists them is given to it. The command of a run's recipe is that of the run.
    """
    if target.kind == "recipe":
        packaged = target.path == packaged_recipes().get(target.name)
        return load_recipe(target.name if packaged else target.path, overrides)
    if target.run is None and (target.path / "recipe.yaml").is_file():  # of an import
        return load_recipe(target.path / "recipe.yaml", overrides)
    if target.run is None:
        raise UserError(f"`{target.name}` has no recipe", fix="Name a recipe or a run.")
    file = target.run / RECIPE
    dropped: list[str] = []
    if warn is None:
        loaded = load_recipe(file, overrides)
    else:
        loaded, dropped = load_saved(file, overrides)
        if overrides and dropped and {*dropped} != {*load_saved(file)[1]}:
            load_recipe(file, overrides)  # raises: it is the overrides that are wrong
    if dropped and warn is not None:
        warn(f"{file} has settings of another version of affinage, which are left out: {', '.join(dropped)}")
    if loaded.recipe.name != target.run.name and not any(override.startswith("name=") for override in overrides):
        loaded = replace(loaded, recipe=loaded.recipe.model_copy(update={"name": target.run.name}))  # it was moved
    note = read_json(target.run / COMMAND)
    words = shlex.split(str(note.get("command") or command("run", target.run.name, runs=runs)))
    for override in overrides:
        words += [] if override in words else ["--set", override]
    written = Path(str(note.get("recipe") or ""))  # settings that name files relative to their recipe still find them
    return replace(loaded, command=shlex.join(words), path=written if written.is_file() else loaded.path)


def run_folder(target: Target, recipe: LoadedRecipe, runs: Path) -> Path:
    """The folder of the run that a target is, or that its recipe has or will have."""
    return target.run or runs / recipe.recipe.name


def run_of(target: Target, runs: Path) -> Path:
    """The folder of the run that a target is or belongs to; of a recipe, that of its name.

    Raises:
        UserError: the recipe was never run, with the command that runs it; or it is a model without a run.
    """
    if target.run is not None or target.kind == "run":
        return target.run or target.path
    if target.kind != "recipe":
        raise UserError(f"`{target.name}` belongs to no run", fix=f"Runs in {runs}: {_listed(run_names(runs))}.")
    run = runs / load_recipe(target.path).recipe.name
    if (run / RECIPE).is_file():
        return run
    raise UserError(f"`{target.name}` has not been run yet", fix=f"Run it: {command('run', target.name, runs=runs)}")


def recorded(run: Path) -> dict[str, Any]:
    """The settings that a run was last made with, as they were written; {} if it has none."""
    file = run / RECIPE
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        fix = "Run its recipe again: what is complete is kept, and this file is written again."
        raise UserError("this file of the run is damaged", where=str(file), fix=fix) from error
    return settings if isinstance(settings, dict) else {}


# Models


def is_training(target: Target) -> bool:
    """Whether a target is a training of a run."""
    return target.kind == "model" and target.run is not None and target.path.name in TRAININGS


def trainings_of(run: Path) -> list[str]:
    """The trainings of a run that have begun and are current, the last one first; [] if it is no run."""
    return [name for name in TRAININGS if (run / name / MODEL).is_file() and is_current(run, name)]


def is_current(run: Path, training: str) -> bool:
    """Whether a run has this training, and it began from the base that the run has now, and that from its own.

    Of a training that another version of affinage completed nobody can tell, so it is taken for current.
    """
    request = read_request(run / training)
    if request is None:
        return read_manifest(run / training) is not None
    bases = {name: key for name, key in request[0].inputs.items() if name in TRAININGS}
    now = {name: found for name in bases if (found := read_request(run / name)) is not None}
    return all(found[1] == bases[name] and is_current(run, name) for name, found in now.items())


def planned_trainings(run: Path) -> list[str]:
    """The trainings of a run's recipe, in their order."""
    recipe = recorded(run)
    sections = [name for name in reversed(TRAININGS) if recipe.get(name) is not None]
    return [name for name in sections if name != "pretrain" or recipe.get("data") is not None]


def incomplete(run: Path) -> list[str]:
    """The trainings of a run's recipe that are not complete, in their order."""
    wanted = planned_trainings(run)
    return [name for name in wanted if read_manifest(run / name) is None or not is_current(run, name)]


def check_complete(target: Target, runs: Path, *, instead: str = "") -> None:
    """Refuse a run, named as a whole, whose trainings are not all complete.

    Raises:
        UserError: with the command that completes it and what can be done `instead`, by default with the names of the
            models that are there.
    """
    run = run_of(target, runs) if target.kind in ("run", "recipe") else None
    if run is None or target.step is not None or not (missing := incomplete(run)):
        return
    if not instead:
        name = target.name if target.kind == "run" else run.name
        trained = [Target(f"{name}/{part}", "model", run / part) for part in reversed(trainings_of(run))]
        there = [str(state) for one in trained if (state := state_of(one, runs)) is not None and state.step]
        instead = f"Or name what is there: {'; '.join(there)}." if there else ""
    fix = "\n  ".join(filter(None, [f"Run it: {command('run', target.name, runs=runs)}", instead]))
    raise UserError(f"`{target.name}` is not complete; to train: {', '.join(missing)}", fix=fix)


def locate_model(name: str, runs: Path) -> tuple[Path, int | None]:
    """The folder of the model that `name` stands for, in the store if it is a training, and the step it asks for.

    Of a run, that is its last training that has begun and is current.
    """
    return locate(resolve(name, runs), runs)


def locate(target: Target, runs: Path) -> tuple[Path, int | None]:
    """The folder of the model that a target stands for, and the step it asks for; see `locate_model`."""
    if target.kind in ("model", "hub"):
        return target.path.resolve(), target.step
    if target.kind == "result":
        fix = "Name a run, a training of one, an import, or a Hugging Face folder."
        raise UserError("this is the result of a step, and no model", where=str(target.path), fix=fix)
    run = run_of(target, runs) if target.kind == "recipe" else target.path
    if not (trained := trainings_of(run)):
        fix = f"Run it: {command('run', target.name, runs=runs)}"
        raise UserError("no model has been trained here yet", where=str(run), fix=fix)
    return (run / trained[0]).resolve(), target.step


def state_of(target: Target, runs: Path) -> ModelState | None:
    """How far the training of a model is; None for a model that no recipe trained here."""
    folder, step = locate(target, runs)
    request = read_request(folder)
    if request is None or target.kind == "hub":
        return None
    training, run = request[0].step, target.run
    name = target.name if target.step is None else target.name.rpartition("@")[0]
    if target.kind in ("run", "recipe"):
        name = f"{name if target.kind == 'run' else run_of(target, runs).name}/{training}"
        run = run_of(target, runs)
    saved = [int(mark.parent.name) for mark in checkpoints_of(folder, step).glob("*/commit_success.txt")]
    planned = (
        read_json(folder / "summary.json"),
        read_json(folder / "feed.json"),
        request[0].settings.get(training) or {},
    )
    steps = next((facts["steps"] for facts in planned if isinstance(facts.get("steps"), int)), None)
    later = TRAININGS[: TRAININGS.index(training)] if training in TRAININGS else ()
    missing = [name for name in incomplete(run) if name in later] if run is not None else []
    return ModelState(name, max(saved, default=0) if step is None else step, steps, tuple(missing))


def checkpoints_of(training: Path, step: int | None = None) -> Path:
    """The folder of the checkpoints of a training: those of `step`, or what stands for the training as a whole.

    That is the one kept from before a benchmark became worse, where there is one.
    """
    kept = training / KEPT
    return kept if step is None and kept.is_dir() else training / "checkpoints"
