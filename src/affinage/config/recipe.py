"""The recipe: everything about a run, in one frozen object."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from affinage.config.claims import Claims, HardwareSettings
from affinage.config.data import DataSettings, PackingSettings, TokenizerSettings
from affinage.config.parallel import MeshAxis, ParallelSettings
from affinage.config.runtime import RuntimeSettings
from affinage.config.settings import Settings
from affinage.config.training import AttentionImplementation, PretrainSettings
from affinage.config.tuning import SYSTEM_PROMPT, DpoSettings, SftSettings

TRAININGS = ("pretrain", "sft", "dpo")


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
    true: everything, for models that have a template; false: nothing."""
    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Sequences of a forward pass; auto: as many as fit by the planner's estimate, at most 64 per part of the mesh."""
    attention: AttentionImplementation = "auto"
    """What computes attention where a sequence is one text; elsewhere xla does."""
    contamination: bool = True
    """Search the training text for the items, list those found, and score without them, too."""
    compressors: bool = False
    """Show gzip -9 and xz -9 beside the model's bits per byte on the validation text."""
    max_new_tokens: int = Field(default=64, ge=1)
    """Maximum length of an answer where the task gives none."""


class ExportSettings(Settings):
    """The Hugging Face folder that is released."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the weights in the folder."""
    verify: bool = False
    """Load the folder with transformers and compare logits and tokens (needs `affinage[verify]`)."""
    license: str = "apache-2.0"
    """SPDX identifier of the weights' license, for the model card."""


class ReportSettings(Settings):
    """The HTML page of a run."""

    prompts: tuple[str, ...] = ()
    """Texts that the base model continues."""
    questions: tuple[str, ...] = ()
    """Questions to the chat model."""
    language: Literal["en", "fr"] = "en"
    """Language of the page."""


class Recipe(Settings):
    """A whole run. A section that is left out means that its steps do not run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the folder of results."""
    description: str = ""
    """One sentence for `affinage recipes`, the report and the model card; not inherited from a base."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of everything random: weights, order of data, splits, samples."""
    data: DataSettings | None = None
    init_from: str | None = None
    """Folder of an imported model, whose weights and tokenizer are the starting point in place of new ones."""
    plugins: tuple[str, ...] = ()
    """Python files that register layers and other choices; they run when the recipe does."""
    tokenizer: TokenizerSettings = TokenizerSettings()
    packing: PackingSettings = PackingSettings()
    model: dict[str, Any]
    """The graph of nodes; each kind of node has settings of its own."""
    mesh: dict[MeshAxis, int | Literal["auto"]] = {"data": "auto"}
    """Devices along each axis; one of them may be auto."""
    parallel: ParallelSettings = ParallelSettings()
    pretrain: PretrainSettings | None = None
    chat_template: str = "chatml"
    """Format of conversations: chatml; tokenizer, for the template of the imported tokenizer; or the path of a Jinja
    file, or of a tokenizer_config.json that has one."""
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
        """`pretrain.tokens` is short for as many steps as it takes."""
        match value:
            case {"pretrain": {"tokens": int() | float() as tokens, "batch_size": int(batch), **pretrain}, **others}:
                packing = others.get("packing", {})
                length = packing.get("seq_len", PackingSettings().seq_len) if isinstance(packing, dict) else 0
                if (
                    pretrain.get("steps") is None
                    and isinstance(length, int)
                    and 0 < tokens < math.inf
                    and batch * length > 0
                ):
                    steps = math.ceil(tokens / (batch * length))
                    return {**others, "pretrain": {**pretrain, "batch_size": batch, "steps": steps}}
        return value

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
