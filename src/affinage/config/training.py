"""Settings of training: what all trainings share, and what only pretraining has."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from affinage.config.settings import Settings

AttentionImplementation = Literal["auto", "xla", "cudnn", "splash"]


class OptimizerSettings(Settings):
    """How gradients become updates. Weight decay is decoupled and on matrices only (Loshchilov and Hutter, 2019)."""

    name: str = "adamw"
    """adamw, lion, adafactor, muon, or one of a plug-in."""
    b1: float = Field(default=0.9, ge=0, lt=1)
    """Decay per step of the mean of gradients."""
    b2: float = Field(default=0.95, ge=0, lt=1)
    """Decay per step of the mean of squared gradients; with 0.999 a change would be seen late."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the mean of squared gradients."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Times the learning rate; not on norms and biases."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Global norm that the gradient is clipped to; null: no clipping."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype that the moments are stored in."""
    settings: dict[str, Any] = {}
    """What only the named optimizer has."""


class ScheduleSettings(Settings):
    """The learning rate over the run: linear warm-up to `peak_lr`, then down to `min_lr` by the named schedule."""

    name: str = "cosine"
    """cosine, linear, wsd, constant, or one of a plug-in."""
    peak_lr: float = Field(gt=0)
    """Learning rate after the warm-up."""
    min_lr: float = Field(ge=0)
    """Learning rate at the last step; a tenth of `peak_lr` is usual."""
    from_step: int = Field(default=0, ge=0)
    """Step of the run at which the schedule begins; for a training with `resume_from`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the rate rises from 0 to `peak_lr`."""
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """The same as a share of all steps; give one of the two."""
    settings: dict[str, Any] = {}
    """What only the named schedule has."""

    @model_validator(mode="after")
    def _consistent(self) -> "ScheduleSettings":
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("give either `warmup_steps` or `warmup_ratio`")
        if self.min_lr > self.peak_lr:
            raise ValueError(f"min_lr {self.min_lr:g} is above peak_lr {self.peak_lr:g}, so the rate would rise")
        return self

    def warmup(self, steps: int) -> int:
        """Steps of the warm-up in a run of `steps`."""
        return round(self.warmup_ratio * (steps - self.from_step)) if self.warmup_ratio else self.warmup_steps


class PrecisionSettings(Settings):
    """Where bfloat16 is used."""

    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the matrix products; auto: bfloat16 where the chip multiplies it natively."""
    params: Literal["float32", "bfloat16"] = "float32"
    """Dtype that the weights are stored and updated in."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """How an updated weight becomes bfloat16: at random to one of its two neighbors, in proportion, so that small
    updates are not lost; or to the nearer one."""


class EmaSettings(Settings):
    """An exponential moving average of the parameters, kept beside them in float32 and saved as `ema_params`.

    A model name such as `NAME/pretrain@ema` stands for it.
    """

    decay: float = Field(ge=0, lt=1)
    """Kept per step; the rest comes from the parameters. 0.999 and more for long trainings."""


class HealthSettings(Settings):
    """What happens to updates whose loss or gradient is not finite, and to those whose loss is a spike.

    skip drops the update and leaves weights and optimizer bit for bit; rollback restores the newest checkpoint from
    before the batches that led to it and continues without them, ten times at most; log only records it.
    """

    on_nonfinite: Literal["skip", "rollback"] = "skip"
    """For NaN or Inf."""
    on_spike: Literal["log", "skip", "rollback"] = "log"
    """For spikes; log by default, because some data are harder than others."""
    spike_deviations: float = Field(default=6.0, gt=0)
    """A spike is this many robust standard deviations above the median of the window."""
    spike_window: int = Field(default=128, ge=8)
    """Number of earlier losses that a loss is compared with."""
    rollback_batches: int = Field(default=1, ge=1)
    """A rollback restores a checkpoint from at least this many batches before the one that was detected; all batches
    since that checkpoint are left out."""
    max_consecutive_skips: int = Field(default=3, ge=1)
    """Skipped updates in a row at which a run stops with a diagnosis."""
    max_skips: int = Field(default=5, ge=1)
    """The same for skipped updates among the last `window` steps."""
    window: int = Field(default=100, ge=1)
    """Steps in which `max_skips` are counted."""


class MixtureSettings(Settings):
    """Shares of sequences from a step on."""

    from_step: int = Field(default=0, ge=0)
    """First step with these weights."""
    weights: dict[str, Annotated[float, Field(ge=0)]]
    """Weights of sources, languages or `source.language`, others get none; or of `all` alone: everything as it comes.
    """

    @model_validator(mode="after")
    def _some_weight(self) -> "MixtureSettings":
        if not any(self.weights.values()):
            raise ValueError("at least one weight must be above zero")
        return self


def _mixture_from_weights(value: Any) -> Any:
    stages = [value] if isinstance(value, dict) else value
    if not isinstance(stages, list | tuple):
        return value
    keys = {"from_step", "weights"}
    return [{"weights": each} if isinstance(each, dict) and not keys & set(each) else each for each in stages]


def _stages_in_order(stages: tuple[MixtureSettings, ...]) -> tuple[MixtureSettings, ...]:
    begins = [stage.from_step for stage in stages]
    if begins[:1] != [0] or begins != sorted(set(begins)):
        raise ValueError(f"the stages of `mixture` begin at steps {begins}: the first must be 0, and each a later one")
    return stages


Mixture = Annotated[
    tuple[MixtureSettings, ...],
    BeforeValidator(_mixture_from_weights, json_schema_input_type=dict[str, float] | tuple[dict[str, Any], ...]),
    AfterValidator(_stages_in_order),
]


class MonitorSettings(Settings):
    """Benchmarks that are scored before the first step, on the way, and after the last step of a training.

    A task has regressed when items that were right before are wrong now by more than chance explains: McNemar's exact
    test, one-sided, at the level `alpha` divided by the number of comparisons (tasks times pairs of scores).
    """

    tasks: tuple[str, ...] = Field(default=("winogrande", "arc_challenge"), min_length=1)
    """Benchmarks, named as in `evaluate.tasks`."""
    every_steps: int = Field(default=1000, ge=1)
    """Steps between two scores."""
    limit: int = Field(default=200, ge=2)
    """Items of each task, drawn by the recipe's seed, always the same ones."""
    on_regression: Literal["log", "stop", "keep_best"] = "log"
    """log: record it; stop: end the training; keep_best: train on. With stop and keep_best the result is the model of
    the last score before the regression. Pretraining only logs."""
    alpha: float = Field(default=0.01, gt=0, lt=0.5)
    """Maximum false-positive rate of a stop, over the whole training."""
    data_dir: str | None = None
    """Folder with the benchmarks' items as NAME.jsonl or .jsonl.gz; by default from the Hub."""
    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Maximum number of sequences of a forward pass; auto: as many as fit beside what is trained, 64 on processors."""


# What changes how a training is computed, not its result: a finished training stays valid.
_NOT_DECIDING = frozenset(
    {"gradient_accumulation_steps", "attention", "log_every", "eval_every", "eval_sequences", "resume_from"}
)
# What the sequences are made of: their own step's result says it.
OF_THE_ROWS = frozenset(
    {"sources", "root", "mirror", "sample", "on_error", "system_prompt", "validation_fraction", "seq_len", "truncation"}
)


class TrainSettings(Settings):
    """What all trainings have in common; one step is one update of the weights.

    The section `training` of a recipe gives these for all its trainings, and `pretrain`, `sft` and `dpo` override it.
    """

    steps: int = Field(ge=1)
    """Updates of the weights."""
    batch_size: int | None = Field(default=None, ge=1)
    """Sequences of a step, over all devices."""
    per_device_batch_size: int | None = Field(default=None, ge=1)
    """The same for each device; give one of the two."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """Parts of the batch that are computed one after another."""
    optimizer: OptimizerSettings = OptimizerSettings()
    optimizer_in_backward: bool = False
    """Update each layer in the backward pass as soon as its gradient is there, so that gradients take no memory.
    `max_grad_norm` then holds for each layer. A gradient that is not finite leads to a rollback. Needs
    `parallel.remat` none, block or auto."""
    schedule: ScheduleSettings
    ema: EmaSettings | None = None
    precision: PrecisionSettings = PrecisionSettings()
    attention: AttentionImplementation = "auto"
    """What computes attention: splash (TPUs), cudnn (NVIDIA GPUs) or xla (anything). auto: the
    platform's kernel where it can do what the model needs, otherwise xla, with a warning."""
    mixture: Mixture | None = None
    """{name: weight}, or a list of {from_step, weights}; by default all data as they come."""
    eval_every: int = Field(default=500, ge=1)
    """Steps between two validations."""
    eval_sequences: int = Field(default=256, ge=1)
    """Maximum number of validation sequences per source and language."""
    monitor: MonitorSettings | None = None
    log_every: int = Field(default=10, ge=1)
    """Steps between two lines of the log."""
    health: HealthSettings = HealthSettings()
    resume_from: str | None = None
    """Checkpoint of another run to continue, with optimizer and place in the data: runs/NAME/STEP or runs/NAME/STEP@N.
    """

    def deciding(self) -> dict[str, Any]:
        """The settings that decide about the result of a training, as JSON, without those of its data."""
        how: dict[str, Any] = {"monitor": {"data_dir", "batch_size"}}
        return self.model_dump(mode="json", exclude=how | dict.fromkeys(_NOT_DECIDING | OF_THE_ROWS, True))

    @model_validator(mode="after")
    def _consistent(self) -> "TrainSettings":
        if (self.batch_size is None) == (self.per_device_batch_size is None):
            raise ValueError("give either `batch_size` (sequences over all devices) or `per_device_batch_size`")
        if self.batch_size is not None and self.batch_size % self.gradient_accumulation_steps:
            what = f"batch_size {self.batch_size} does not divide into {self.gradient_accumulation_steps}"
            raise ValueError(f"{what} gradient_accumulation_steps")
        if self.schedule.from_step and (self.resume_from is None or self.schedule.from_step >= self.steps):
            raise ValueError("`schedule.from_step` needs `resume_from`, and comes before the last step")
        if self.schedule.warmup_steps > self.steps - self.schedule.from_step:
            raise ValueError(f"warm-up of {self.schedule.warmup_steps} steps is longer than the {self.steps} steps")
        return self


class PretrainSettings(TrainSettings):
    """Training from random weights on packed documents."""

    tokens: float | None = Field(default=None, gt=0)
    """Tokens to train on, in place of `steps`: rounded up to whole steps of `batch_size` sequences."""

    def deciding(self) -> dict[str, Any]:
        """See `TrainSettings.deciding`; the monitor of pretraining only logs."""
        return {key: value for key, value in super().deciding().items() if key not in ("monitor", "tokens")}

    @model_validator(mode="after")
    def _monitor_only_logs(self) -> "PretrainSettings":
        if self.monitor is not None and self.monitor.on_regression != "log":
            raise ValueError("`monitor.on_regression` of pretraining can only be `log`: no benchmark ends it")
        return self

    @model_validator(mode="before")
    @classmethod
    def _steps_or_tokens(cls, value: Any) -> Any:
        """The recipe turns tokens into steps where it can; what arrives here is a mistake."""
        if isinstance(value, dict) and isinstance(tokens := value.get("tokens"), int | float) and tokens > 0:
            if value.get("steps") is not None:
                raise ValueError("give either `steps` or `tokens`")
            raise ValueError(
                "`tokens` needs `batch_size`, since the steps of a `per_device_batch_size` depend on devices"
            )
        return value
