"""The trackers that a recipe names: those that come with affinage, and those of plug-ins."""

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from affinage.config.tracking import (
    MlflowSettings,
    TensorBoardSettings,
    TrackersSettings,
    TrackioSettings,
    WandbSettings,
)
from affinage.errors import UserError, did_you_mean
from affinage.tracking.child import Child
from affinage.tracking.tracker import Tracker

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}
_own: dict[str, Callable[..., Tracker]] = {}

T = TypeVar("T", bound=Callable[..., Tracker])


def tracker(name: str) -> Callable[[T], T]:
    """Registers a class with the methods of `Tracker`; `trackers.own.NAME` of a recipe are its keyword arguments."""

    def add(made_by: T) -> T:
        _own[name] = made_by
        return made_by

    return add


def check_trackers(settings: TrackersSettings) -> None:
    """See that the packages of the trackers are installed. Raises UserError."""
    for name in settings.libraries:
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            raise UserError(
                f"the tracker {name} needs the package `{_PACKAGES[name]}`",
                where=f"trackers.{name}",
                fix=f"Install it: pip install 'affinage[{name}]'",
            )


def trackers_of(
    settings: TrackersSettings, *, recipe: str, training: str, runs: Path
) -> dict[str, Callable[[], Tracker]]:
    """Makers of the trackers that are asked for, by name.

    Args:
        settings: of the recipe.
        recipe: its name.
        training: the stage.
        runs: the folder of all runs.

    Raises:
        UserError: no plug-in has registered a tracker of this name.
    """
    chosen: dict[str, Callable[[], Tracker]] = {}
    for name, given in settings.libraries.items():
        chosen[name] = partial(Child, name, _with_defaults(given, recipe, training, runs.absolute()))
    for name, own in settings.own.items():
        if name not in _own:
            known = did_you_mean(name, _own) or "Name its file in `plugins`."
            raise UserError(f"no plug-in has a tracker `{name}`", where="trackers.own", fix=known)
        chosen[name] = partial(_own[name], **own)
    return chosen


def _with_defaults(settings: BaseModel, recipe: str, training: str, runs: Path) -> Mapping[str, Any]:
    name = f"{recipe}/{training}"
    match settings:
        case TensorBoardSettings():
            return {"folder": str(Path(settings.folder or runs / "tensorboard") / recipe / training)}
        case WandbSettings():
            project, folder = settings.project or recipe, settings.folder or str(runs)
            return {"name": name, **settings.model_dump(), "project": project, "folder": folder}
        case TrackioSettings():
            folder = str(Path(settings.folder or runs / "trackio").absolute())
            return {"name": name, "project": settings.project or recipe, "folder": folder}
        case MlflowSettings():
            uri = settings.uri or f"sqlite:///{runs / 'mlflow.db'}"
            return {
                "name": name,
                "uri": uri,
                "experiment": settings.experiment or recipe,
                "folder": str(runs / "mlflow"),
            }
    raise TypeError(type(settings).__name__)
