"""Settings of what makes an assistant of a base model: fine-tuning on conversations, and on preferences."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from affinage.config.settings import Settings
from affinage.config.sources import POCKET_WORLD, SourceSettings, default_name, safe_name
from affinage.config.training import Mixture, OptimizerSettings, ScheduleSettings, TrainSettings

SYSTEM_PROMPT = "You are a helpful assistant."


class ConversationSettings(Settings):
    """One place that conversations, or pairs of answers, come from. A plain string in a recipe is short for `path`."""

    path: str = ""
    """JSONL (.gz, .zst, .bz2, .xz) or Parquet: a file, a folder, a glob, a URL; or `pocket-world`."""
    dataset: str = ""
    """Instead of `path`: a dataset of the Hugging Face Hub, or a folder of `datasets`; streamed."""
    config: str = ""
    """Of a dataset that has several."""
    data_dir: str = ""
    """A folder within a dataset."""
    split: str = "train"
    """Of a dataset."""
    revision: str = ""
    """Of a dataset: a branch, tag or commit."""
    name: str = ""
    """How reports and `mixture` call it; default: the last part of the path."""
    format: Literal["auto", "messages", "sharegpt", "prompt", "alpaca"] = "auto"
    """How a line says what was said; auto: by its keys. messages: {role, content}; sharegpt: {from, value}; prompt:
    prompt and completion (or response); alpaca: instruction, input and output (or context and response)."""
    max_examples: int | None = Field(default=None, ge=1)
    """At most this many, drawn at random by the seed."""

    @model_validator(mode="after")
    def _one_place(self) -> "ConversationSettings":
        if bool(self.path) == bool(self.dataset):
            raise ValueError("give either `path` or `dataset`")
        return self

    @property
    def title(self) -> str:
        """Its name, or one made from where it is; safe as a part of a file name."""
        return safe_name(self.name) if self.name else default_name(self.path or f"{self.dataset}/{self.config}")

    def as_source(self) -> SourceSettings:
        """The same place as a source of text has it, for what finds and opens files."""
        place = {key: getattr(self, key) for key in ("path", "dataset", "config", "data_dir", "split", "revision")}
        return SourceSettings(**place, name=self.name)


def _conversations_from_string(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


Conversations = Annotated[
    ConversationSettings, BeforeValidator(_conversations_from_string, json_schema_input_type=str | ConversationSettings)
]


class MonitorSettings(Settings):
    """Benchmarks that are scored while a model is tuned, because its loss falls on when they do not.

    An item that was right at an earlier look and is wrong now speaks for a degradation, one that became right against
    it. A task is worse when so many or more speak for it by chance with a probability below `alpha` (McNemar's exact
    test, one-sided), divided by the number of comparisons there can be: tasks times pairs of looks (Bonferroni).
    """

    tasks: tuple[str, ...] = Field(default=("winogrande", "arc_challenge"), min_length=1)
    """As in `evaluate`."""
    data_dir: str | None = None
    """Folder with the benchmarks' items as NAME.jsonl or .jsonl.gz; default: from the hub."""
    every_steps: int = Field(default=1000, ge=1)
    """Also before the first step, and after the last."""
    limit: int = Field(default=200, ge=2)
    """Of each task, drawn by the recipe's seed: always the same ones."""
    alpha: float = Field(default=0.01, gt=0, lt=0.5)
    """How often one would be stopped of whom nothing is worse, at most."""
    on_regression: Literal["stop", "keep_best", "log"] = "stop"
    """Stop: training ends; keep_best: it goes on. Either way the model is then the one of the last look before a
    degradation. log: it is only written down."""
    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Rows of the context per forward pass, at most. auto: as many as fit beside what is trained, 64 on processors."""


class LoraSettings(Settings):
    """Low-rank adapters in place of the weights (Hu et al., 2021): W x + alpha / r * B A x, only A and B trained."""

    r: int = Field(default=16, ge=1)
    """Of what is added to each matrix."""
    alpha: float = Field(default=32.0, gt=0)
    """What is added is scaled by alpha / r."""
    target_modules: tuple[str, ...] | Literal["all"] = "all"
    """The matrices that get one, by their names in the model: query, key, value, out (of attention), gate, up, down (of
    feed-forward layers). all: every one that each token passes; experts of a mixture have adapters, one for each
    expert, where gate, up or down are named."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Of what goes into A."""


class TuningSettings(TrainSettings):
    """What all training on conversations has in common."""

    lora: LoraSettings | None = None
    """Train adapters only, and keep the model's own weights; default: all weights."""

    sources: tuple[Conversations, ...] = Field(min_length=1)
    root: str = ""
    """A folder or URL that relative paths of sources start from; default: the working directory."""
    mirror: str = ""
    """A folder or URL with a copy of every remote source, each in a folder of its name; used instead."""
    sample: float = Field(default=1.0, gt=0, le=1)
    """Share of the conversations of each source, chosen by their content."""
    on_error: Literal["raise", "skip"] = "raise"
    """Lines that are none: an error, or counted."""
    from_step: int | None = Field(default=None, ge=1)
    """Of the model to begin with, a checkpoint it kept; default: last."""
    num_epochs: float | None = Field(default=1.0, gt=0)
    """Where it, and its schedule, end if steps are more: one epoch, as Julian's; null: only the steps count."""
    monitor: MonitorSettings | None = None
    mixture: Mixture | None = None
    """{source: weight}, shares of rows; default: every row once an epoch."""
    seq_len: int | None = Field(default=None, ge=8)
    """Tokens in a row; default: as in pretraining."""
    validation_fraction: float = Field(default=0.02, ge=0, lt=1)
    """Share of conversations for validation."""

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
    """That of training, with a tenth of its weight decay."""

    weight_decay: float = Field(default=0.01, ge=0)
    """Times the learning rate; not on norms and biases."""


JULIAN_BATCH, JULIAN_WARMUP = 32, 1000
JULIAN_SCHEDULE = ScheduleSettings(peak_lr=2e-5, min_lr=2e-6, warmup_steps=JULIAN_WARMUP)


class SftSettings(TuningSettings):
    """Supervised fine-tuning on conversations, with the loss on the assistant's tokens only.

    What is not said is as for Julian: batch 32, a learning rate of 2e-5 after 1,000 steps, weight decay 0.01.
    """

    optimizer: SftOptimizerSettings = SftOptimizerSettings()
    schedule: ScheduleSettings = JULIAN_SCHEDULE
    """Its warm-up is a tenth of the run where that is less."""
    system_prompt: str = SYSTEM_PROMPT
    """For conversations that have no system message; may be ""."""
    truncation: Literal["right", "drop_turns", "drop"] = "right"
    """What is longer than `seq_len`. right: it is cut at its end; drop_turns: whole exchanges from its end are left
    out, and it is cut where even the first is too long; drop: it is left out. All are counted."""

    @model_validator(mode="before")
    @classmethod
    def _as_for_julian(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        told = dict(value)
        if told.get("batch_size") is None and told.get("per_device_batch_size") is None:
            told["batch_size"] = JULIAN_BATCH
        steps = told.get("steps")
        if told.get("schedule") is None and isinstance(steps, int | float) and float(steps).is_integer():  # 1e3, too
            warmup = min(JULIAN_WARMUP, int(steps) // 10)
            told["schedule"] = JULIAN_SCHEDULE.model_copy(update={"warmup_steps": warmup})
        return told


class DpoSettings(TuningSettings):
    """Direct preference optimisation on pairs of a better and a worse answer (Rafailov et al., 2023)."""

    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """In the sources: prompt, chosen and rejected (texts or lists of messages; an instruction may stand for the
    prompt), or chosen and rejected as whole conversations that begin alike. DPO's own, or IPO (Azar et al., 2023)."""
    beta: float = Field(default=0.1, gt=0)
    """How strongly the model is held to the one it began as."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of pairs that may be labelled the wrong way round."""
    precompute_ref_log_probs: bool = True
    """What the model said before it learned. true: written down once, by a stage of its own; false: its weights stay in
    memory (with `lora` they are there anyhow) and compute it in every step."""
    system_prompt: str | None = None
    """For pairs that have no system message; default: as in fine-tuning."""
    truncation: Literal["right", "drop"] = "right"
    """Pairs over `seq_len`: each side is cut to half of it, or left out."""
