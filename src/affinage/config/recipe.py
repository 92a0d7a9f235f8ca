"""The recipe: everything a run is told, in one frozen object."""

from typing import Annotated, Any, Literal

from pydantic import ByteSize, Field, model_validator

from affinage.config.claims import Claims, HardwareSettings
from affinage.config.data import DataSettings, PackingSettings, TokenizerSettings
from affinage.config.parallel import MeshAxis, ParallelSettings
from affinage.config.settings import Bytes, Settings
from affinage.config.tracking import TrackersSettings
from affinage.config.training import AttentionImplementation, PretrainSettings, SurvivalSettings
from affinage.config.tuning import SYSTEM_PROMPT, DpoSettings, SftSettings


class EvaluateSettings(Settings):
    """Which benchmarks judge the models, through lm-evaluation-harness."""

    tasks: tuple[str, ...] = ()
    """`julian`, `french`, `quickstart`, `pocket-world`, names the harness knows, or paths of task files."""
    data_dir: str | None = None
    """Folder with the benchmarks' items as NAME.jsonl or .jsonl.gz; default: from the hub."""
    limit: int | None = Field(default=None, ge=1)
    """Items per task; default: all."""
    num_fewshot: int | None = Field(default=None, ge=0)
    """Examples put before each question; default: as many as the task says, which is none for all of `julian`."""
    apply_chat_template: Literal["auto"] | bool = "auto"
    """Auto: chat models are asked in it what asks for text, if its task file is here, and what has the tag `chat`;
    true: everything, of models that have a template; false: nothing."""
    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Rows of the context at once. auto: as many as fit by the planner's estimate, at most 64 for each part of the
    mesh."""
    attention: AttentionImplementation = "auto"
    """What computes it where a row is one text; elsewhere xla."""
    contamination: bool = True
    """Look for the items in the text that the model was trained on, list those found, and give the scores without them.
    """
    compressors: bool = False
    """Put gzip -9 and xz -9 beside the model's bits per byte on the validation text."""
    max_new_tokens: int = Field(default=64, ge=1)
    """Where a task asks for generation and does not say."""


class ProbeSettings(Settings):
    """Linear probes of an image model: of its features, of the same features untrained, and of the pixels."""

    features: str = "encoder"
    """The node whose vectors are probed."""
    labels_per_class: tuple[int, ...] = ()
    """Also with this few labelled images of each class, not only with all."""
    draws: int = Field(default=10, ge=1)
    """Of such few, over which the accuracy is averaged."""


class ExportSettings(Settings):
    """The Hugging Face folder that is released."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the weights in the folder."""
    max_shard_size: Bytes = ByteSize(5_000_000_000)
    """The most that one weight file holds."""
    trim_vocabulary: bool = False
    """Leave out ids above the tokenizer's, which round a vocabulary up in training."""
    verify: bool = False
    """Load it with transformers and compare logits and tokens (needs `affinage[verify]`)."""
    license: str = "apache-2.0"
    """SPDX identifier of the weights, for the model card."""


class ReportSettings(Settings):
    """The HTML page of a run."""

    prompts: tuple[str, ...] = ()
    """What the base model is asked to continue; of a base only with its `data.sources`."""
    questions: tuple[str, ...] = ()
    """What the chat model is asked; of a base only with its `sft.sources`."""
    language: Literal["en", "fr"] = "en"
    """What the report is written in."""


class Recipe(Settings):
    """A whole run. Sections left out mean that their stages do not run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Names the folder of results."""
    description: str = ""
    """One sentence for `affinage recipes`, the report and the model card."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Of all that is drawn: weights, order of rows, splits, samples."""
    data: DataSettings | None = None
    init_from: str | None = None
    """Folder of an imported model: its weights and tokenizer are begun with, in place of new ones."""
    plugins: tuple[str, ...] = ()
    """Python files of the user's that register node kinds; they run when the recipe does."""
    tokenizer: TokenizerSettings = TokenizerSettings()
    packing: PackingSettings = PackingSettings()
    model: dict[str, Any]
    """The graph, parsed by affinage.model; see there for the node kinds."""
    mesh: dict[MeshAxis, int | Literal["auto"]] = {"data": "auto"}
    """Devices along each axis; one may be auto."""
    parallel: ParallelSettings = ParallelSettings()
    pretrain: PretrainSettings | None = None
    chat_template: str = "chatml"
    """What conversations are written in: chatml; tokenizer, for the template of the tokenizer that the recipe begins
    with; or a Jinja file, or a tokenizer_config.json that has one (relative to the recipe)."""
    sft: SftSettings | None = None
    dpo: DpoSettings | None = None
    evaluate: EvaluateSettings | None = None
    probe: ProbeSettings | None = None
    export: ExportSettings | None = None
    report: ReportSettings = ReportSettings()
    remote: Annotated[str, Field(pattern=r"^[a-z][a-z0-9+.-]*://[^?#]+$")] | None = None
    """URL of a folder (s3://, gs://, whatever fsspec writes to) that results and trainings are copied to, and that a
    machine without them goes on from. Keys and passwords are the environment's."""
    trackers: TrackersSettings = TrackersSettings()
    """Where metrics go beside metrics.jsonl."""
    sweep: dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]] = {}
    """For `affinage sweep`: {key of a setting: its values}; a run is made of every combination."""
    hardware: HardwareSettings = HardwareSettings()
    """What `affinage plan` plans for."""
    claims: Claims | None = None
    """What somebody states of this run; `affinage plan` names what cannot be true."""

    @model_validator(mode="after")
    def _sections_fit_the_data(self) -> "Recipe":
        if self.data is not None:
            arrays = self.data.arrays is not None
            wrong = ("sft", "dpo", "evaluate", "export") if arrays else ("probe",)
            for section in wrong:
                if getattr(self, section) is not None:
                    raise ValueError(f"`{section}` needs {'text' if arrays else 'arrays'}, `data` gives the other")
        return self

    @property
    def trainings(self) -> list[str]:
        """The sections of its trainings, in their order."""
        return [name for name in ("pretrain", "sft", "dpo") if getattr(self, name) is not None]

    @property
    def survival(self) -> SurvivalSettings:
        """What holds outside of the trainings: of each setting what the most patient of them says."""
        of_each = [getattr(self, name).survival for name in self.trainings] or [SurvivalSettings()]
        return SurvivalSettings(
            preemption_grace=max(one.preemption_grace for one in of_each),
            hang_timeout=max(one.hang_timeout for one in of_each),
            exit_on_hang=min((one.exit_on_hang for one in of_each), key=(False, None, True).index),
            heartbeat_timeout=max(one.heartbeat_timeout for one in of_each),
        )

    @property
    def chat_system_prompt(self) -> str:
        """What the chat model is told where a conversation has no system message."""
        if self.dpo is not None and self.dpo.system_prompt is not None:
            return self.dpo.system_prompt
        return SYSTEM_PROMPT if self.sft is None else self.sft.system_prompt
