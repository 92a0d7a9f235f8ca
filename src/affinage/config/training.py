"""Settings of training: the step's layout over devices, what all trainings share, pretraining, fine-tuning, DPO."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from affinage.config.data import PlaceSettings, ReadingSettings, SourceSettings, path_from_string
from affinage.config.settings import Settings

MeshAxis = Literal["data", "fsdp", "tensor", "expert", "context", "pipeline"]
Mesh = dict[MeshAxis, Annotated[int, Field(ge=1)] | Literal["auto"]]

# What the arrays of a model have along their dimensions; `affinage.parallel.sharding` says where each one is used.
LogicalAxis = Literal["batch", "sequence", "residual", "keys", "width", "expert_rows", "embed", "heads", "kv_heads",
                      "head_dim", "ffn", "vocab", "experts", "layers"]  # fmt: skip

# What a transformer block computes on its way, in that order.
ActivationName = Literal["block_input", "query", "key", "value", "attended", "ffn_up", "ffn_gate", "ffn_hidden"]
AttentionImplementation = Literal["auto", "xla", "cudnn", "splash"]
SYSTEM_PROMPT = "You are a helpful assistant."


class RematSettings(Settings):
    """Activations of a block that wait for the backward pass, by name; all others are computed again there."""

    keep: tuple[ActivationName, ...] = ()
    """Activations that stay in the accelerator's memory."""


RematPreset = Literal["none", "dots", "block"]
Remat = RematPreset | RematSettings


class ParallelSettings(Settings):
    """How the work is split over the mesh. Nothing here changes what a step computes beyond rounding."""

    sharding: dict[LogicalAxis, tuple[MeshAxis, ...]] = {}
    """Lines that replace those of the sharding table: mesh axes of a logical axis."""
    context_attention: Literal["all_gather", "ring"] = "all_gather"
    """How the parts of a sequence see each other's keys."""
    pipeline_micro_batches: int | None = Field(default=None, ge=1)
    """Parts of the batch in the pipeline, a multiple of its stages; by default the most up to 4 per stage."""
    pipeline_rounds: int = Field(default=1, ge=1)
    """Times that each part passes the stages: more make the bubble smaller, and the traffic larger."""
    remat: Remat = "none"
    """What the backward pass computes again instead of keeping it. none: nothing; dots: in a block all but results of
    its matrix products; block: all but a block's input. `affinage plan --search` chooses."""
    xla_flags: dict[str, bool | int | str] = {}
    """Options of XLA by their names, besides those of `affinage.parallel.strategy`."""


class OptimizerSettings(Settings):
    """How gradients become updates. Weight decay is decoupled and on matrices only (Loshchilov and Hutter, 2019)."""

    name: str = "adamw"
    """adamw, or one of a plug-in."""
    b1: float = Field(default=0.9, ge=0, lt=1)
    """Decay per step of the mean of gradients."""
    b2: float = Field(default=0.95, ge=0, lt=1)
    """Decay per step of the mean of squared gradients."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the mean of squared gradients."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Times the learning rate; not on norms and biases."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Global norm that the gradient is clipped to; null: no clipping."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype that the moments are stored in; bfloat16 with a `b2` of up to 0.99."""
    settings: dict[str, Any] = {}
    """What only the named optimizer has."""


class ScheduleSettings(Settings):
    """The learning rate over the run: linear warm-up to `peak_lr`, then down to `min_lr` by the named schedule."""

    name: str = "cosine"
    """cosine, linear, wsd, constant, or one of a plug-in."""
    peak_lr: float = Field(gt=0)
    """Learning rate after the warm-up."""
    min_lr: float = Field(default_factory=lambda given: float(f"{given['peak_lr'] / 10:.9g}"), ge=0)
    """Learning rate at the last step, unless `constant`; by default a tenth of `peak_lr`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the rate rises to `peak_lr`, from `peak_lr` / `warmup_steps` in the first."""
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """The same as a share of all steps; give one of the two."""
    settings: dict[str, Any] = {}
    """What only the named schedule has. wsd falls, as 1 - sqrt, over the last `decay_ratio` (0.2) after the warm-up."""

    @model_validator(mode="after")
    def _consistent(self) -> "ScheduleSettings":
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("give either `warmup_steps` or `warmup_ratio`")
        if self.min_lr > self.peak_lr:
            raise ValueError(f"min_lr {self.min_lr:g} is above peak_lr {self.peak_lr:g}, so the rate would rise")
        return self

    def warmup(self, steps: int) -> int:
        """Return the steps of the warm-up in a run of `steps`."""
        return round(self.warmup_ratio * steps) if self.warmup_ratio else self.warmup_steps


class PrecisionSettings(Settings):
    """Where bfloat16 is used."""

    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the matrix products; auto: bfloat16 where the chip multiplies it natively."""
    params: Literal["float32", "bfloat16"] = "float32"
    """Dtype that the weights are stored in; bfloat16 is rounded stochastically, which does not lose small updates."""


class EmaSettings(Settings):
    """An exponential moving average of the parameters in float32; `NAME/pretrain@ema` is the name of its model."""

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
    """For spikes."""
    spike_window: int = Field(default=128, ge=8)
    """A spike is six robust standard deviations above the median of as many earlier losses."""
    max_skips: int = Field(default=5, ge=1)
    """Skipped updates among the last `window` steps at which a run stops with a diagnosis."""
    window: int = Field(default=100, ge=1)
    """Steps in which `max_skips` are counted."""


class MixtureSettings(Settings):
    """Shares of sequences from a step on."""

    from_step: int = Field(default=0, ge=0)
    """First step with these weights."""
    weights: dict[str, Annotated[float, Field(ge=0)]]
    """Weights of sources, languages or `source.language`; others get none. `all` alone: everything as it comes."""


def _mixture_from_weights(value: Any) -> Any:
    return [{"weights": value}] if isinstance(value, dict) and not {"from_step", "weights"} & set(value) else value


def _stages_in_order(stages: tuple[MixtureSettings, ...]) -> tuple[MixtureSettings, ...]:
    begins = [stage.from_step for stage in stages]
    if begins[:1] != [0] or begins != sorted(set(begins)):
        raise ValueError(f"the stages of `mixture` begin at steps {begins}: the first must be 0, and each a later one")
    if not all(any(stage.weights.values()) for stage in stages):
        raise ValueError("at least one weight of each stage must be above zero")
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
    """stop ends the training, keep_best trains on; the result of both is the model before the regression."""
    alpha: float = Field(default=0.01, gt=0, lt=0.5)
    """Maximum false-positive rate of a stop, over the whole training."""
    data_dir: str | None = None
    """Folder with the benchmarks' items as NAME.jsonl or .jsonl.gz; by default from the Hub."""


# Settings of how a training is computed: a change of them leaves a finished training valid.
_NOT_DECIDING = ("gradient_accumulation_steps", "attention", "log_every", "eval_every", "eval_sequences", "resume_from")
# What the sequences are made of: the result of their own step holds it.
OF_THE_ROWS = {*"sources root mirror sample on_error system_prompt validation_fraction seq_len truncation".split()}


class TrainSettings(Settings):
    """What all trainings have in common; `training` gives it for all, and `pretrain`, `sft` and `dpo` override it."""

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
    """Update each layer in the backward pass, which frees gradients; clip each alone; `parallel.remat` is `block`."""
    schedule: ScheduleSettings
    ema: EmaSettings | None = None
    precision: PrecisionSettings = PrecisionSettings()
    attention: AttentionImplementation = "auto"
    """splash (TPUs), cudnn (NVIDIA GPUs) or xla. auto: the platform's kernel where it can do what the model needs."""
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
    """Checkpoint of another run to continue, with optimizer and place in the data: runs/NAME/STEP@N."""

    def deciding(self) -> dict[str, Any]:
        """Return the settings that decide the result of a training, as JSON, without those of its data."""
        how: dict[str, Any] = {"monitor": {"data_dir"}}
        return self.model_dump(mode="json", exclude=how | dict.fromkeys(OF_THE_ROWS.union(_NOT_DECIDING), True))

    @model_validator(mode="after")
    def _consistent(self) -> "TrainSettings":
        if (self.batch_size is None) == (self.per_device_batch_size is None):
            raise ValueError("give either `batch_size` (sequences over all devices) or `per_device_batch_size`")
        parts, optimizer = self.gradient_accumulation_steps, self.optimizer
        if self.batch_size is not None and self.batch_size % parts:
            raise ValueError(f"batch_size {self.batch_size} does not divide into {parts} gradient_accumulation_steps")
        if optimizer.state_dtype == "bfloat16" and optimizer.b2 > 0.99:  # steps of less than half a unit are lost
            raise ValueError(f"moments in bfloat16 stand still with a b2 of {optimizer.b2:g}; up to 0.99 they do not")
        if self.schedule.warmup_steps > self.steps:
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
    def _possible(self) -> "PretrainSettings":
        if self.monitor is not None and self.monitor.on_regression != "log":
            raise ValueError("`monitor.on_regression` of pretraining can only be `log`: no benchmark ends it")
        if self.tokens is not None:  # the recipe has turned them into steps where it could
            raise ValueError("give either `steps` or `tokens`, and `tokens` only with a `batch_size` of all devices")
        return self


class ConversationSettings(PlaceSettings):
    """One source of conversations, or of pairs of answers. A plain string in a recipe is short for `path`."""

    max_examples: int | None = Field(default=None, ge=1)
    """Maximum number of examples, drawn at random by the seed."""

    def as_source(self) -> SourceSettings:
        """Return the same place as a source without a text column, for what finds and opens files."""
        return SourceSettings(text_key="", **{name: getattr(self, name) for name in PlaceSettings.model_fields})


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
    """query, key, value, out (attention), gate, up, down (feed-forward); all: all that each token passes."""


class TuningSettings(TrainSettings, ReadingSettings):
    """What fine-tuning and preference optimization have in common."""

    lora: LoraSettings | None = None
    """Train adapters and keep the model's own weights; by default all weights are trained."""
    sources: tuple[Conversations, ...] = Field(min_length=1)
    from_step: int | None = Field(default=None, ge=1)
    """Checkpoint of the model before to start from, one that was kept; by default the last."""
    num_epochs: float | None = Field(default=1.0, gt=0)
    """Training, and its schedule, end here if `steps` are more; null: only the steps count."""
    seq_len: int | None = Field(default=None, ge=8)
    """Tokens of a sequence; by default as in pretraining."""
    validation_fraction: float = Field(default=0.02, ge=0, lt=1)
    """Share of the conversations that is kept for validation."""


class SftOptimizerSettings(OptimizerSettings):
    """The optimizer of training, with a tenth of its weight decay."""

    weight_decay: float = Field(default=0.01, ge=0)
    """Times the learning rate; not on norms and biases."""


class SftScheduleSettings(ScheduleSettings):
    """The schedule of training; without a warm-up of its own it has one of 1,000 steps, or of a tenth of fewer."""

    peak_lr: float = Field(default=2e-5, gt=0)
    """Learning rate after the warm-up."""


class SftSettings(TuningSettings):
    """Supervised fine-tuning on conversations, with the loss on the assistant's tokens. The defaults are Julian's."""

    optimizer: SftOptimizerSettings = SftOptimizerSettings()
    schedule: SftScheduleSettings = SftScheduleSettings(warmup_steps=1000)
    system_prompt: str = SYSTEM_PROMPT
    """For conversations without a system message; may be ""."""
    truncation: Literal["right", "drop_turns", "drop"] = "right"
    """For conversations longer than `seq_len`: cut the end, leave out whole exchanges from the end, or leave it out."""

    @model_validator(mode="before")
    @classmethod
    def _as_for_julian(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        filled, steps, given = dict(value), value.get("steps"), value.get("schedule")
        if filled.get("batch_size") is None and filled.get("per_device_batch_size") is None:
            filled["batch_size"] = 32
        if given is None or (isinstance(given, dict) and "warmup_ratio" not in given):
            warmup = int(steps) // 10 if isinstance(steps, int | float) and 0 < steps < 10_000 else 1000
            filled["schedule"] = {"warmup_steps": warmup} | (given or {})
        return filled


class DpoSettings(TuningSettings):
    """Direct preference optimization (Rafailov et al., 2023). Sources hold prompt, chosen and rejected."""

    beta: float = Field(default=0.1, gt=0)
    """How strongly the model is held to its reference."""
    system_prompt: str | None = None
    """For pairs without a system message; by default as in fine-tuning."""
    truncation: Literal["right", "drop"] = "right"
    """For pairs longer than `seq_len`: cut each side to half of it, or leave the pair out."""
