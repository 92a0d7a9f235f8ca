"""What a paper or a plan states of a run, and the hardware that a run is planned for."""

from typing import Annotated, Literal

from pydantic import Field

from affinage.config.settings import Settings

Positive = Annotated[float, Field(gt=0)]
Price = Annotated[float, Field(ge=0)]


class CheckpointClaim(Settings):
    """A step at which a number of tokens is said to be reached."""

    tokens: Positive
    """Tokens seen."""
    step: int = Field(ge=1)
    """Step of the checkpoint."""


class SftClaims(Settings):
    """Claims about fine-tuning."""

    examples: Positive | None = None
    """Number of conversations."""
    sources: dict[str, float] = {}
    """Conversations of each source."""
    batch_size: int | None = Field(default=None, ge=1)
    """Sequences of a step."""
    steps_per_epoch: int | None = Field(default=None, ge=1)
    """Steps in which every conversation is seen once."""


class Claims(Settings):
    """Figures that somebody states; `affinage plan` reports those that contradict the recipe or each other."""

    parameters: Positive | None = None
    """Number of parameters."""
    tokens: Positive | None = None
    """Tokens of the whole pretraining."""
    epochs: Positive | None = None
    """Passes over the data."""
    sources: dict[str, float] = {}
    """Tokens of each source."""
    flops: Positive | None = None
    """FLOPs of the whole pretraining."""
    mfu: float | None = Field(default=None, gt=0, le=1)
    """Model FLOPs utilization, a share."""
    slice: str | None = None
    """Cloud's name of the slice that it was trained on."""
    days: Positive | None = None
    """Days of the whole pretraining."""
    device_hours: Positive | None = None
    """Chips times hours."""
    compute_optimal: tuple[Literal["under", "over"], ...] = ()
    """Sides of 20 tokens per parameter that it claims to be on."""
    checkpoints: tuple[CheckpointClaim, ...] = ()
    sft: SftClaims = SftClaims()


class HardwareSettings(Settings):
    """The machines that a run is planned for; training itself takes what it finds."""

    slice: str | None = None
    """Cloud's name, such as v4-32 or h100x8; `affinage plan --on` overrides it."""
    price: Price | dict[str, Price] | None = None
    """US dollars per chip and hour, for `slice` or by kind: {v5e: 0.9, h100: 2.2}; by default the chip table's."""
