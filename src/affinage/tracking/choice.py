"""The trackers that a recipe names: those that come with affinage, and those of plug-ins."""

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from affinage.errors import UserError, did_you_mean
from affinage.tracking.child import Child
from affinage.tracking.libraries import LIBRARIES
from affinage.tracking.tracker import Tracker

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}
_own: dict[str, Callable[..., Tracker]] = {}

T = TypeVar("T", bound=Callable[..., Tracker])
Options = Mapping[str, Mapping[str, Any]]


def tracker(name: str) -> Callable[[T], T]:
    """Registers a class with the methods of `Tracker`; its options in a recipe are its keyword arguments."""

    def add(made_by: T) -> T:
        _own[name] = made_by
        return made_by

    return add


def check_trackers(trackers: Options) -> None:
    """Check that the trackers are known and installed, and have their options. Raises UserError."""
    for name, options in trackers.items():
        where = f"runtime.trackers.{name}"
        if name not in LIBRARIES and name not in _own:
            fix = did_you_mean(name, [*LIBRARIES, *_own]) or "Name the file that registers it in `plugins`."
            raise UserError(f"there is no tracker `{name}`", where=where, fix=fix)
        known = inspect.signature(LIBRARIES.get(name) or _own[name]).parameters
        free = any(each.kind is each.VAR_KEYWORD for each in known.values())
        if not free and (
            unknown := next((option for option in options if option not in known or option == "name"), None)
        ):
            fix = did_you_mean(unknown, known) or f"It has {', '.join(each for each in known if each != 'name')}."
            raise UserError(f"the tracker {name} has no option `{unknown}`", where=where, fix=fix)
        if name in LIBRARIES and importlib.util.find_spec(_PACKAGES[name]) is None:
            what = f"the tracker {name} needs the package `{_PACKAGES[name]}`"
            raise UserError(what, where=where, fix=f"Install it: pip install 'affinage[{name}]'")


def trackers_of(trackers: Options, *, recipe: str, training: str, runs: Path) -> dict[str, Callable[[], Tracker]]:
    """Makers of the trackers, by name.

    Args:
        trackers: the options of each, by its name.
        recipe: the name of the recipe.
        training: the step.
        runs: the folder of all runs.

    Raises:
        UserError: there is no such tracker, or it has no such option.
    """
    check_trackers(trackers)
    runs = runs.absolute()
    defaults: dict[str, dict[str, Any]] = {
        "tensorboard": {"folder": str(runs / "tensorboard")},
        "wandb": {"mode": "offline", "project": recipe, "entity": "", "folder": str(runs)},
        "trackio": {"project": recipe, "folder": str(runs / "trackio")},
        "mlflow": {"uri": f"sqlite:///{runs / 'mlflow.db'}", "experiment": recipe, "folder": str(runs / "mlflow")},
    }
    chosen: dict[str, Callable[[], Tracker]] = {}
    for name, options in trackers.items():
        if name in LIBRARIES:
            chosen[name] = partial(Child, name, {"name": f"{recipe}/{training}", **defaults[name], **options})
        else:
            chosen[name] = partial(_own[name], **options)
    return chosen
