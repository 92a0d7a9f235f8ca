"""Settings of what makes an assistant of a base model: fine-tuning on conversations, and on preferences."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from affinage.config.settings import Settings
from affinage.config.sources import POCKET_WORLD, PlaceSettings, SourceSettings, path_from_string
from affinage.config.training import OptimizerSettings, ScheduleSettings, TrainSettings

SYSTEM_PROMPT = "You are a helpful assistant."


class ConversationSettings(PlaceSettings):
    """One source of conversations, or of pairs of answers. A plain string in a recipe is short for `path`."""

    format: Literal["auto", "messages", "sharegpt", "prompt", "alpaca"] = "auto"
    """Keys of a line. messages: {role, content}; sharegpt: {from, value}; prompt: prompt and completion (or response);
    alpaca: instruction, input and output (or context and response); auto: recognized by its keys."""
    max_examples: int | None = Field(default=None, ge=1)
    """Maximum number of examples, drawn at random by the seed."""

    def as_source(self) -> SourceSettings:
        """The same place as a source of text has it, for what finds and opens files."""
        return SourceSettings(**{name: getattr(self, name) for name in PlaceSettings.model_fields})


Conversations = Annotated[
    ConversationSettings, BeforeValidator(path_from_string, json_schema_input_type=str | ConversationSettings)
]


class LoraSettings(Settings):
    """Low-rank adapters in place of the weights (Hu et al., 2021): W x + alpha / r * B A x, only A and B trained."""

    r: int = Field(default=16, ge=1)
    """Rank of the adapter of each matrix."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapter's output is scaled by alpha / r."""
    target_modules: tuple[str, ...] | Literal["all"] = "all"
    """Matrices with an adapter: query, key, value, out (of attention), gate, up, down (of feed-forward layers). all:
    every one that each token passes. Experts have adapters where gate, up or down are named."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of the adapter's input."""


class TuningSettings(TrainSettings):
    """What fine-tuning and preference optimization have in common."""

    lora: LoraSettings | None = None
    """Train adapters and keep the model's own weights; by default all weights are trained."""
    sources: tuple[Conversations, ...] = Field(min_length=1)
    root: str = ""
    """Folder or URL that relative paths of sources start from; by default the working directory."""
    mirror: str = ""
    """Folder or URL with a copy of every remote source, each in a folder of its name, to read in its place."""
    sample: float = Field(default=1.0, gt=0, le=1)
    """Share of each source, chosen by content."""
    on_error: Literal["raise", "skip"] = "raise"
    """Lines that are no conversation: an error, or skipped and counted."""
    from_step: int | None = Field(default=None, ge=1)
    """Checkpoint of the model before to start from, one that was kept; by default the last."""
    num_epochs: float | None = Field(default=1.0, gt=0)
    """Training, and its schedule, end here if `steps` are more; null: only the steps count."""
    seq_len: int | None = Field(default=None, ge=8)
    """Tokens of a sequence; by default as in pretraining."""
    validation_fraction: float = Field(default=0.02, ge=0, lt=1)
    """Share of the conversations that is kept for validation."""

    @model_validator(mode="after")
    def _names_differ(self) -> "TuningSettings":
        titles = [source.title for source in self.sources]
        twice = {title for title in titles if titles.count(title) > 1}
        if self.mixture is not None and twice:
            raise ValueError(f"two sources are called {', '.join(sorted(twice))}: give each a `name` of its own")
        return self

    @property
    def from_world(self) -> bool:
        """Whether any of it comes from the pocket world."""
        return any(source.path == POCKET_WORLD for source in self.sources)


class SftOptimizerSettings(OptimizerSettings):
    """The optimizer of training, with a tenth of its weight decay."""

    weight_decay: float = Field(default=0.01, ge=0)
    """Times the learning rate; not on norms and biases."""


JULIAN_BATCH, JULIAN_WARMUP = 32, 1000
JULIAN_SCHEDULE = ScheduleSettings(peak_lr=2e-5, min_lr=2e-6, warmup_steps=JULIAN_WARMUP)


class SftSettings(TuningSettings):
    """Supervised fine-tuning on conversations, with the loss on the assistant's tokens only.

    The defaults are Julian's: batch 32, a learning rate of 2e-5 after 1,000 steps, weight decay 0.01.
    """

    optimizer: SftOptimizerSettings = SftOptimizerSettings()
    schedule: ScheduleSettings = JULIAN_SCHEDULE
    """The warm-up is a tenth of the run where that is less than 1,000 steps."""
    system_prompt: str = SYSTEM_PROMPT
    """For conversations without a system message; may be ""."""
    truncation: Literal["right", "drop_turns", "drop"] = "right"
    """For conversations longer than `seq_len`. right: cut the end; drop_turns: leave out whole exchanges from the end,
    and cut where even the first is too long; drop: leave the conversation out. All are counted."""

    @model_validator(mode="before")
    @classmethod
    def _as_for_julian(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        given = dict(value)
        if given.get("batch_size") is None and given.get("per_device_batch_size") is None:
            given["batch_size"] = JULIAN_BATCH
        steps = given.get("steps")
        if given.get("schedule") is None and isinstance(steps, int | float) and float(steps).is_integer():  # 1e3, too
            warmup = min(JULIAN_WARMUP, int(steps) // 10)
            given["schedule"] = JULIAN_SCHEDULE.model_copy(update={"warmup_steps": warmup})
        return given


class DpoSettings(TuningSettings):
    """Direct preference optimization on pairs of a better and a worse answer (Rafailov et al., 2023).

    Sources hold prompt, chosen and rejected (texts or lists of messages; an instruction may stand for the prompt), or
    chosen and rejected as whole conversations that begin alike.
    """

    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """DPO's own, or IPO (Azar et al., 2023)."""
    beta: float = Field(default=0.1, gt=0)
    """How strongly the model is held to its reference."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of pairs that may be labeled the wrong way round."""
    precompute_ref_log_probs: bool = True
    """Compute the reference's log-probabilities once, in a step of their own; false: keep its weights in memory (with
    `lora` they are there anyhow) and compute them in every step."""
    system_prompt: str | None = None
    """For pairs without a system message; by default as in fine-tuning."""
    truncation: Literal["right", "drop"] = "right"
    """For pairs longer than `seq_len`: cut each side to half of it, or leave the pair out."""
