"""How a recipe is carried out: checkpoints, preemption, hangs, trackers. None of it is part of a step's key."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from affinage.config.settings import Settings


class CheckpointSettings(Settings):
    """When the state of a training is saved, and which checkpoints stay."""

    every_steps: int = Field(default=1000, ge=1)
    """Steps between two checkpoints."""
    every_minutes: float | None = Field(default=5, gt=0)
    """Save also when the last checkpoint is this many minutes old; null: by steps alone."""
    keep_last: int = Field(default=2, ge=1)
    """How many of the newest checkpoints stay; that of the last step always does."""
    keep_every: int | None = Field(default=None, ge=1)
    """Also keep the checkpoints whose step is a multiple of this."""
    allow_changes: tuple[str, ...] = ()
    """Facts, such as `data` or `optimizer.b1`, that may differ from the checkpoint's when a training resumes."""


def _trackers_by_name(value: Any) -> Any:
    """`[tensorboard, wandb]` is short for both with their defaults, and `wandb: true` for one of them."""
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        return {name: {} for name in value}
    if isinstance(value, dict):
        return {name: {} if given is True else given for name, given in value.items()}
    return value


class RuntimeSettings(Settings):
    """How a run is carried out, for all of its trainings. Changing it never makes a finished step run again."""

    checkpoint: CheckpointSettings = CheckpointSettings()
    preemption_grace: float = Field(default=25, gt=0)
    """Seconds from SIGTERM or SIGHUP until the process must have left; clouds give 30. Ctrl-C sets no limit."""
    hang_timeout: float = Field(default=300, gt=0)
    """Seconds after which a step counts as hung, or 5 times the slowest step before if that is longer."""
    heartbeat_timeout: float = Field(default=30, ge=5)
    """Seconds without a heartbeat after which one of several processes counts as lost, and the others end."""
    trackers: Annotated[
        dict[str, dict[str, Any]], BeforeValidator(_trackers_by_name, json_schema_input_type=list[str] | dict[str, Any])
    ] = {}
    """tensorboard, wandb, trackio, mlflow, or one of a plug-in, each with its options; a list takes the defaults."""
    remote: Annotated[str, Field(pattern=r"^[a-z][a-z0-9+.-]*://[^?#]+$")] | None = None
    """URL of a folder (s3://, gs://) that results and checkpoints are copied to, and resumed from on other machines."""
    profile: Annotated[str, Field(pattern=r"^[1-9]\d*(-[1-9]\d*)?$"), BeforeValidator(lambda v: str(v))] | None = None
    """Steps of which a trace for TensorBoard and Perfetto is written: `20`, or `20-25`."""

    @property
    def profiled(self) -> tuple[int, int] | None:
        """The first and the last step of which a trace is written."""
        first, _, last = (self.profile or "").partition("-")
        return (int(first), int(last or first)) if first else None

    @model_validator(mode="after")
    def _profile_in_order(self) -> "RuntimeSettings":
        if self.profiled is not None and self.profiled[0] > self.profiled[1]:
            raise ValueError(f"`profile: {self.profile}` ends before it begins")
        return self
