"""Settings of trackers: where the metrics of trainings go beside metrics.jsonl. They change no result."""

from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from affinage.config.settings import Settings


class TensorBoardSettings(Settings):
    """Event files, for `tensorboard --logdir runs/tensorboard`."""

    folder: str = ""
    """Default: tensorboard/ in the folder of all runs; NAME/STAGE is added."""


class WandbSettings(Settings):
    """Weights & Biases. The key is read from the environment (WANDB_API_KEY) or from `wandb login`, never from here."""

    mode: Literal["offline", "online"] = "offline"
    """Offline: files, for `wandb sync` later."""
    project: str = ""
    """Default: the recipe's name."""
    entity: str = ""
    """A user or a team; default: of the account."""
    folder: str = ""
    """Default: the folder of all runs; wandb/ is added."""


class TrackioSettings(Settings):
    """Trackio: a database on this machine, for `trackio show`."""

    project: str = ""
    """Default: the recipe's name."""
    folder: str = ""
    """Default: trackio/ in the folder of all runs; to look at it, set TRACKIO_DIR to it."""


class MlflowSettings(Settings):
    """MLflow. A server's user and password are read from the environment (MLFLOW_TRACKING_USERNAME, _PASSWORD)."""

    uri: str = ""
    """Of the server or database; default: sqlite, mlflow.db in the folder of all runs."""
    experiment: str = ""
    """Default: the recipe's name."""


class TrackersSettings(Settings):
    """Which trackers are used, as many at once as are named. `trackers: [tensorboard, wandb]` is short for defaults."""

    tensorboard: TensorBoardSettings | None = None
    wandb: WandbSettings | None = None
    trackio: TrackioSettings | None = None
    mlflow: MlflowSettings | None = None
    own: dict[str, dict[str, Any]] = {}
    """Of plug-ins: {name: settings}."""
    queue: int = Field(default=1000, ge=1)
    """A tracker that is slower than the training loses lines beyond this many; the training never waits for it. lines.
    """
    close_seconds: float = Field(default=30, gt=0)
    """At the end of a training, for what is still under way; at most 5 where it was told to stop."""

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return {name: {} for name in value}
        if isinstance(value, dict):
            return {name: {} if given is True else given for name, given in value.items()}
        return value

    @property
    def libraries(self) -> dict[str, BaseModel]:
        """The settings of those that come with affinage and are asked for, by name."""
        asked = {name: getattr(self, name) for name in ("tensorboard", "wandb", "trackio", "mlflow")}
        return {name: settings for name, settings in asked.items() if settings is not None}
