"""What a paper or a plan says of a run, to be checked against its settings and against itself."""

from typing import Annotated, Literal

from pydantic import Field

from affinage.config.settings import Settings


class CheckpointClaim(Settings):
    """Where in a run a number of tokens is said to be reached."""

    tokens: float = Field(gt=0)  # seen up to there
    step: int = Field(ge=1)  # of the training, at which it was saved


class SftClaims(Settings):
    """Of fine-tuning."""

    examples: float | None = Field(default=None, gt=0)  # conversations in all
    sources: dict[str, float] = {}  # conversations of each source
    batch_size: int | None = Field(default=None, ge=1)  # sequences of a step
    steps_per_epoch: int | None = Field(default=None, ge=1)  # of the fine-tuning's conversations


class Claims(Settings):
    """Figures that are stated, not derived. Those left out are not checked."""

    parameters: float | None = Field(default=None, gt=0)  # in all
    tokens: float | None = Field(default=None, gt=0)  # of the whole pretraining
    epochs: float | None = Field(default=None, gt=0)  # over the data
    sources: dict[str, float] = {}  # tokens of each source
    flops: float | None = Field(default=None, gt=0)  # of the whole pretraining
    mfu: float | None = Field(default=None, gt=0, le=1)  # model FLOPs over the peak of the chips, a share
    slice: str | None = None  # what it was trained on, by the cloud's name
    days: float | None = Field(default=None, gt=0)  # of wall clock, for the whole pretraining
    device_hours: float | None = Field(default=None, gt=0)  # chips x hours
    compute_optimal: tuple[Literal["under", "over"], ...] = ()  # on which side of 20 tokens a parameter; all it says
    checkpoints: tuple[CheckpointClaim, ...] = ()
    sft: SftClaims = SftClaims()


class CloudSettings(Settings):
    """Of a TPU slice that `affinage launch --on cloud` asks Google's cloud for. No secrets: those are gcloud's."""

    project: str  # the cloud project that pays
    zone: str  # such as us-central2-b
    image: str = ""  # the hosts' system, a runtime version of the API; default: the usual one for the chip
    spot: bool = False  # cheaper, and may be taken back at any time
    reservation: str = ""  # name of a reservation to take it from
    network: str = ""  # of the project; default: the project's default one
    external_addresses: bool = False  # hosts can be reached from outside the cloud's network
    wait_hours: float = Field(default=6.0, gt=0)  # in the queue


class HardwareSettings(Settings):
    """Of the machines that a run is planned for; training itself takes what it finds."""

    slice: str | None = None  # by the cloud's name, such as v4-32 or h100x8; `affinage plan --on` overrides it
    # US dollars per chip and hour: of the chips of `slice`, or by kind, such as {v5e: 0.9, h100: 2.2}; by default those
    # of the chip table
    price: Annotated[float, Field(ge=0)] | dict[str, Annotated[float, Field(ge=0)]] | None = None
    cloud: CloudSettings | None = None  # where the slice is rented
