"""What a paper or a plan says of a run, to be checked against its settings and against itself."""

from typing import Annotated, Literal

from pydantic import Field

from affinage.config.settings import Settings


class CheckpointClaim(Settings):
    """Where in a run a number of tokens is said to be reached."""

    tokens: float = Field(gt=0)
    """Seen up to there."""
    step: int = Field(ge=1)
    """Of the training, at which it was saved."""


class SftClaims(Settings):
    """Of fine-tuning."""

    examples: float | None = Field(default=None, gt=0)
    """Conversations in all."""
    sources: dict[str, float] = {}
    """Conversations of each source."""
    batch_size: int | None = Field(default=None, ge=1)
    """Sequences of a step."""
    steps_per_epoch: int | None = Field(default=None, ge=1)
    """Of the fine-tuning's conversations."""


class Claims(Settings):
    """Figures that are stated, not derived. Those left out are not checked."""

    parameters: float | None = Field(default=None, gt=0)
    """In all."""
    tokens: float | None = Field(default=None, gt=0)
    """Of the whole pretraining."""
    epochs: float | None = Field(default=None, gt=0)
    """Over the data."""
    sources: dict[str, float] = {}
    """Tokens of each source."""
    flops: float | None = Field(default=None, gt=0)
    """Of the whole pretraining."""
    mfu: float | None = Field(default=None, gt=0, le=1)
    """Model FLOPs over the peak of the chips, a share."""
    slice: str | None = None
    """What it was trained on, by the cloud's name."""
    days: float | None = Field(default=None, gt=0)
    """Of wall clock, for the whole pretraining."""
    device_hours: float | None = Field(default=None, gt=0)
    """Chips x hours."""
    compute_optimal: tuple[Literal["under", "over"], ...] = ()
    """On which side of 20 tokens a parameter; all it says."""
    checkpoints: tuple[CheckpointClaim, ...] = ()
    sft: SftClaims = SftClaims()


class CloudSettings(Settings):
    """Of a TPU slice that `affinage launch --on cloud` asks Google's cloud for. No secrets: those are gcloud's."""

    project: str
    """The cloud project that pays."""
    zone: str
    """Such as us-central2-b."""
    image: str = ""
    """The hosts' system, a runtime version of the API; default: the usual one for the chip."""
    spot: bool = False
    """Cheaper, and may be taken back at any time."""
    reservation: str = ""
    """Name of a reservation to take it from."""
    network: str = ""
    """Of the project; default: the project's default one."""
    external_addresses: bool = False
    """Hosts can be reached from outside the cloud's network."""
    wait_hours: float = Field(default=6.0, gt=0)
    """In the queue."""


class HardwareSettings(Settings):
    """Of the machines that a run is planned for; training itself takes what it finds."""

    slice: str | None = None
    """By the cloud's name, such as v4-32 or h100x8; `affinage plan --on` overrides it."""
    price: Annotated[float, Field(ge=0)] | dict[str, Annotated[float, Field(ge=0)]] | None = None
    """US dollars per chip and hour: of the chips of `slice`, or by kind, such as {v5e: 0.9, h100: 2.2}; by default
    those of the chip table."""
    cloud: CloudSettings | None = None
    """Where the slice is rented."""
