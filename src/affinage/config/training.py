"""Settings of training runs: what all have in common, and pretraining."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from affinage.config.settings import Settings

AttentionImplementation = Literal["auto", "xla", "cudnn", "splash"]


class OptimizerSettings(Settings):
    """How gradients become updates. Weight decay is decoupled and on matrices only (Loshchilov and Hutter, 2019)."""

    name: str = "adamw"
    """Adamw, lion, adafactor, muon, or one of a plug-in."""
    b1: float = Field(default=0.9, ge=0, lt=1)
    """Per step, what is kept of the mean of gradients."""
    b2: float = Field(default=0.95, ge=0, lt=1)
    """The same of their squares; 0.95, as 0.999 sees a change late."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of that mean."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Times the learning rate; not on norms and biases."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Global norm of the gradient."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype the moments are stored in."""
    settings: dict[str, Any] = {}
    """What only the named optimizer has."""


class ScheduleSettings(Settings):
    """The learning rate over the run: linear warm-up, then by name down to a floor."""

    name: str = "cosine"
    """Cosine, linear, wsd, constant, or one of a plug-in."""
    peak_lr: float = Field(gt=0)
    """Learning rate after warm-up."""
    min_lr: float = Field(ge=0)
    """Learning rate at the last step; a tenth of the peak is usual."""
    from_step: int = Field(default=0, ge=0)
    """Of the run, at which it begins; needs `resume_from`."""
    warmup_steps: int = Field(default=0, ge=0)
    """In which the rate rises from 0 to `peak_lr`."""
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Of the run's steps, in place of warmup_steps."""
    settings: dict[str, Any] = {}
    """What only the named schedule has."""

    @model_validator(mode="after")
    def _one_warmup(self) -> "ScheduleSettings":
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("give either `warmup_steps` or `warmup_ratio` (of the run's steps)")
        return self

    def warmup(self, steps: int) -> int:
        """Steps of the warm-up in a run of `steps`."""
        return round(self.warmup_ratio * (steps - self.from_step)) if self.warmup_ratio else self.warmup_steps


class PrecisionSettings(Settings):
    """Where bfloat16 is used."""

    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    """Auto: bfloat16 where the chip multiplies it natively."""
    params: Literal["float32", "bfloat16"] = "float32"
    """Dtype the weights are stored and updated in."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """How an updated weight becomes bfloat16: at random to one of its two neighbours, in proportion, so that small
    updates are not lost; or to the nearer one."""


class CheckpointSettings(Settings):
    """When the state of a run is saved, and which saves stay."""

    every_steps: int = Field(default=1000, ge=1)
    """What is lost at most when a machine dies."""
    every_minutes: float | None = Field(default=5, gt=0)
    """Also when the last save is so long ago."""
    keep_last: int = Field(default=2, ge=1)
    """The newest ones stay; the last step of a run always does."""
    keep_every: int | None = Field(default=None, ge=1)
    """Also keep saves at multiples of this step."""
    accept_changes: tuple[str, ...] = ()
    """Facts, such as `data` or `optimizer.b1`, that may differ from those a run was saved with when it goes on."""


# How a training is carried out, not what it computes: changing these must not begin a long run from the start.
# (The mesh is none of a training's settings for the same reason.)
_CARRIED_OUT = frozenset(
    {
        *("gradient_accumulation_steps", "attention", "log_every", "eval_every", "eval_sequences"),
        *("checkpoint", "survival", "resume_from", "profile"),
    }
)
# The same of a tuning's `monitor`, which may end it: the items themselves are in the keys of stages, as files.
_OF_A_MONITOR = frozenset({"batch_size", "data_dir"})
# What the rows are made of: known by the rows themselves.
OF_THE_ROWS = frozenset(
    {"sources", "root", "mirror", "sample", "on_error", "system_prompt", "validation_fraction", "seq_len", "truncation"}
)


class HealthSettings(Settings):
    """What becomes of updates whose loss or gradient is not finite, and of those whose loss is a spike.

    skip leaves the update out, weights and optimizer bit for bit; rollback goes back to the newest checkpoint before
    the batches that led to it and on from there without them, ten times at most; log only writes it down.
    """

    on_nonfinite: Literal["skip", "rollback"] = "skip"
    """NaN or Inf."""
    on_spike: Literal["log", "skip", "rollback"] = "log"
    """Log: some data are harder than others."""
    spike_deviations: float = Field(default=6.0, gt=0)
    """Robust standard deviations above the median of the window, or of the noise above where a fall has come to."""
    spike_window: int = Field(default=128, ge=8)
    """Losses before; a fall is told by the last 33 of them."""
    rollback_batches: int = Field(default=1, ge=1)
    """Left out after a rollback, the last of them the one that was seen."""
    max_consecutive_skips: int = Field(default=3, ge=1)
    """Updates left out in a row, or among the last `window` steps, at which a run stops with a diagnosis."""
    max_skips: int = Field(default=5, ge=1)
    """Among the last `window` steps."""
    window: int = Field(default=100, ge=1)
    """Steps."""


class SurvivalSettings(Settings):
    """What a run does when it is stopped or stuck."""

    preemption_grace: float = Field(default=30, gt=0)
    """From SIGTERM or SIGHUP until it is left; clouds give 30. After Ctrl-C a save has ten minutes, a large one more.
    """
    hang_timeout: float = Field(default=28, gt=0)
    """A step is stuck after this many seconds, or 5 times the 99th percentile of the steps before if that is longer;
    what is no step, in a training or not, after as many in which nothing moves. 28, so that a host that stands still is
    named within 30."""
    exit_on_hang: bool | None = None
    """End with status 75, for whatever starts it again; false: only say so. null: at once where there are many hosts,
    or `affinage launch` started this one, and else after an hour."""
    heartbeat_timeout: float = Field(default=5, ge=2, le=40)
    """Of many hosts: a machine that has not answered for so long, dead or cut off, is gone. It is named within a
    second; the longest of a recipe's trainings holds for its whole run. Less than the 45 s after which JAX ends all
    hosts."""


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) else value


class TrainSettings(Settings):
    """What pretraining and fine-tuning have in common. One step is one update of the weights."""

    steps: int = Field(ge=1)
    """Updates of the weights; tokens = steps x batch x context."""
    batch_size: int | None = Field(default=None, ge=1)
    """Sequences per step, over all devices."""
    per_device_batch_size: int | None = Field(default=None, ge=1)
    """The same, said per device; give one of the two."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """Parts that the batch goes through in."""
    optimizer_in_backward: bool = False
    """True: the backward pass updates each layer as soon as its gradient is there, so that gradients take no memory;
    `optimizer.max_grad_norm` then holds for each layer, not for all together, and from a gradient that is not finite in
    one layer, with those above it updated already, the run goes back as with `on_nonfinite: rollback`. Layers are
    computed again as with `parallel.remat: block`, and only that, `none` or `auto` may be said beside it."""
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings
    precision: PrecisionSettings = PrecisionSettings()
    attention: AttentionImplementation = "auto"
    """What computes attention: splash (a kernel for TPUs), cudnn (for NVIDIA GPUs) or xla (anything). auto: splash on
    TPUs where it honours all that the model asks for, xla otherwise; a named one refuses what it cannot."""
    eval_every: int = Field(default=500, ge=1)
    """Steps."""
    eval_sequences: int = Field(default=256, ge=1)
    """At most, per source and language."""
    log_every: int = Field(default=10, ge=1)
    """Steps."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    health: HealthSettings = HealthSettings()
    survival: SurvivalSettings = SurvivalSettings()
    profile: Annotated[str, Field(pattern=r"^[1-9][0-9]*(-[1-9][0-9]*)?$"), BeforeValidator(_as_text)] | None = None
    """Steps of which a trace is written, for TensorBoard and Perfetto: `20`, or `20-25`."""
    resume_from: str | None = None
    """A checkpoint of another run that this one goes on from, weights, optimizer and place in the data:
    runs/NAME/STAGE, or runs/NAME/STAGE@STEP."""

    def deciding(self) -> dict[str, Any]:
        """What decides over the numbers of a training, as JSON; how it is carried out is left out, and its rows."""
        left_out = dict.fromkeys(_CARRIED_OUT | OF_THE_ROWS, True)
        monitor = True if isinstance(self, PretrainSettings) else set(_OF_A_MONITOR)
        return self.model_dump(mode="json", exclude={**left_out, "monitor": monitor})

    @property
    def traced(self) -> tuple[int, int] | None:
        """First and last of the steps of which a trace is written."""
        if self.profile is None:
            return None
        first, _, last = self.profile.partition("-")
        return int(first), int(last or first)

    @model_validator(mode="after")
    def _one_batch_size(self) -> "TrainSettings":
        if (self.batch_size is None) == (self.per_device_batch_size is None):
            raise ValueError("give either `batch_size` (sequences over all devices) or `per_device_batch_size`")
        if self.batch_size is not None and self.batch_size % self.gradient_accumulation_steps:
            what = f"batch_size {self.batch_size} does not divide into {self.gradient_accumulation_steps}"
            raise ValueError(f"{what} gradient_accumulation_steps")
        if self.schedule.from_step and (self.resume_from is None or self.schedule.from_step >= self.steps):
            raise ValueError("`schedule.from_step` needs `resume_from`, and comes before its last step")
        if self.schedule.warmup_steps > self.steps - self.schedule.from_step:
            raise ValueError(f"warm-up of {self.schedule.warmup_steps} steps is longer than the {self.steps} steps")
        return self

    @model_validator(mode="after")
    def _steps_to_trace(self) -> "TrainSettings":
        if self.traced is not None and self.traced[0] > self.traced[1]:
            first, last = self.traced
            raise ValueError(f"`profile: {self.profile}` ends before it begins; say {last}-{first}")
        return self


class MixtureSettings(Settings):
    """Shares of rows that hold from a step on."""

    from_step: int = Field(default=0, ge=0)
    """From which these weights hold."""
    weights: dict[str, Annotated[float, Field(ge=0)]]
    """Of a source, a language or `source.language`, others get none; or of `all` alone: all rows as they come."""

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


class PretrainMonitorSettings(Settings):
    """Benchmarks that are scored while a model is pretrained. They change nothing of the training."""

    tasks: tuple[str, ...] = Field(min_length=1)
    """As in `evaluate`."""
    every_steps: int = Field(ge=1)
    """Also before the first step, and after the last."""
    limit: int = Field(default=100, ge=2)
    """Of each task, drawn by the recipe's seed, always the same."""
    data_dir: str | None = None
    """Folder with the benchmarks' items as NAME.jsonl or .jsonl.gz; default: from the hub."""
    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Rows of the context per forward pass, at most. auto: as many as fit beside what is trained, 64 on processors."""


class PretrainSettings(TrainSettings):
    """Training from random weights on packed rows of documents."""

    mixture: Mixture | None = None
    """{name: weight}, or a list of {from_step, weights}; default: all rows as they come."""
    monitor: PretrainMonitorSettings | None = None
