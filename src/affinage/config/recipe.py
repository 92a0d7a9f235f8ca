"""The recipe: everything about a run, in one frozen object."""

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from affinage.config.data import DataSettings, PackingSettings, TokenizerSettings
from affinage.config.settings import Settings
from affinage.config.training import SYSTEM_PROMPT, DpoSettings, Mesh, ParallelSettings, PretrainSettings, SftSettings

TRAININGS = ("pretrain", "sft", "dpo")
Positive = Annotated[float, Field(gt=0)]


class EvaluateSettings(Settings):
    """Benchmarks that score the models, through lm-evaluation-harness."""

    tasks: tuple[str, ...] = ()
    """`julian`, `french`, `quickstart`, `pocket-world`, names of the harness, or paths of task files."""
    data_dir: str | None = None
    """Folder with the benchmarks' items as NAME.jsonl or .jsonl.gz; by default from the Hub."""
    limit: int | None = Field(default=None, ge=1)
    """Maximum number of items per task; by default all."""
    num_fewshot: int | None = Field(default=None, ge=0)
    """Examples before each question; by default as many as the task says, none for all of `julian`."""
    apply_chat_template: Literal["auto"] | bool = "auto"
    """auto: chat models answer generation tasks, if their file is here, and those tagged `chat` in their template;
    true: models with a template answer everything in it; false: nothing."""
    contamination: bool = True
    """Search the training text for the items, list those found, and score without them, too."""


class ExportSettings(Settings):
    """The Hugging Face folder that is released."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the weights in the folder."""
    license: str | None = None
    """SPDX identifier of the weights' license; by default that of the model in `init_from`, from scratch none."""


class ReportSettings(Settings):
    """The HTML page of a run."""

    prompts: tuple[str, ...] = ()
    """Texts that the base model continues."""
    questions: tuple[str, ...] = ()
    """Questions to the chat model."""
    language: Literal["en", "fr"] = "en"
    """Language of the page."""


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
    is_short = isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)
    return {name: {} for name in value} if is_short else value


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
    profile: tuple[PositiveInt, PositiveInt] | None = None
    """Two steps, in either order: a trace from the one to the other is written for TensorBoard and Perfetto."""


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
    compute_optimal: tuple[Literal["under", "over"], ...] = ()
    """Sides of 20 tokens per parameter that it claims to be on."""
    checkpoints: tuple[CheckpointClaim, ...] = ()
    sft: SftClaims = SftClaims()


class HardwareSettings(Settings):
    """The machines that a run is planned for; training itself takes what it finds."""

    slice: str | None = None
    """Cloud's name, such as v4-32 or h100x8; `affinage plan --on` overrides it."""
    price: float | None = Field(default=None, ge=0)
    """US dollars per chip and hour, for the chips of `slice`; by default the chip table's."""


class Recipe(Settings):
    """A whole run. A section that is left out means that its steps do not run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the folder of results: letters, digits, `.`, `_` and `-`, without a slash."""
    description: str = ""
    """One sentence for `affinage recipes`, the report and the model card; not inherited from a base."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of weights, the order of the data, dropout, and the pocket world; never of what is held out."""
    data: DataSettings | None = None
    init_from: str | None = None
    """Folder of an imported model, whose weights and tokenizer are the starting point in place of new ones."""
    plugins: tuple[str, ...] = ()
    """Python files that register layers and other choices; they run when the recipe does."""
    tokenizer: TokenizerSettings = TokenizerSettings()
    packing: PackingSettings = PackingSettings()
    model: dict[str, Any]
    """The graph of nodes; each kind of node has settings of its own."""
    mesh: Mesh = {"data": "auto"}
    """Devices along each axis; one of them may be auto."""
    parallel: ParallelSettings = ParallelSettings()
    pretrain: PretrainSettings | None = None
    chat_template: str = "chatml"
    """Format of conversations: chatml; tokenizer, for the template of the imported tokenizer; or a Jinja file."""
    sft: SftSettings | None = None
    dpo: DpoSettings | None = None
    evaluate: EvaluateSettings | None = None
    export: ExportSettings | None = None
    report: ReportSettings = ReportSettings()
    runtime: RuntimeSettings = RuntimeSettings()
    sweep: dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]] = {}
    """For `affinage sweep`: {key of a setting: its values}; every combination is a run."""
    hardware: HardwareSettings = HardwareSettings()
    claims: Claims | None = None

    @model_validator(mode="before")
    @classmethod
    def _tokens_become_steps(cls, value: Any) -> Any:
        """Turn `pretrain.tokens` into as many steps as it takes."""
        pretrain = value.get("pretrain") if isinstance(value, dict) else None
        if not isinstance(pretrain, dict) or pretrain.get("tokens") is None or pretrain.get("steps") is not None:
            return value
        try:
            seq_len = value.get("packing", {}).get("seq_len", PackingSettings().seq_len)
            steps = math.ceil(pretrain["tokens"] / (pretrain["batch_size"] * seq_len))
            if steps < 1 or isinstance(pretrain["tokens"], bool):
                raise ValueError
            rest = {key: each for key, each in pretrain.items() if key != "tokens"}
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # its own check reports it
            steps, rest = 10**9, pretrain  # longer than any warm-up, of which nothing is to be said
        return {**value, "pretrain": rest | {"steps": steps}}

    @property
    def trainings(self) -> list[str]:
        """The sections of its trainings, in their order."""
        return [name for name in TRAININGS if getattr(self, name) is not None]

    @property
    def pretrain_tokens(self) -> int | None:
        """Tokens of the pretraining; None without one, and where they depend on the number of devices."""
        batch = self.pretrain.batch_size if self.pretrain is not None else None
        return None if self.pretrain is None or batch is None else self.pretrain.steps * batch * self.packing.seq_len

    @property
    def chat_system_prompt(self) -> str:
        """The system prompt of conversations that have none."""
        if self.dpo is not None and self.dpo.system_prompt is not None:
            return self.dpo.system_prompt
        return SYSTEM_PROMPT if self.sft is None else self.sft.system_prompt
