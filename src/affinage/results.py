"""What the steps of a run report about their results: one model per step, stored as `result.json` beside its files.

The report, the model card, sweeps and the verbs read results through these models. Results of other versions still
open: a field that is missing or has another form has its default.
"""

import contextlib
import importlib.metadata
import json
import platform
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, field_validator

import affinage

RESULT = "result.json"
MANIFEST = "manifest.json"  # of a complete result; its last file to be written
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "pyarrow", "sentencepiece", "lm-eval")


class Result(BaseModel):
    """Facts about a result. Facts that no class lists are kept as they are."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def _value_or_default(cls, value: Any, handler: Any, info: Any) -> Any:
        try:
            return handler(value)
        except ValidationError:
            return cls.model_fields[info.field_name or ""].get_default()


AnyResult = TypeVar("AnyResult", bound=Result)


# ---- data ----


class Size(Result):
    """How much there is of something, as far as the step counts it."""

    documents: int | None = None
    bytes: int | None = None
    conversations: int | None = None
    rows: int | None = None
    tokens: int | None = None
    trained_tokens: int | None = None
    words: int | None = None
    bytes_per_token: float | None = None  # of a language's or a source's text
    tokens_per_word: float | None = None
    exact: int | None = None  # documents that a tokenizer's round trip leaves unchanged
    total: int | None = None  # parameters
    items: int | None = None  # of a benchmark, those too short to be found, found, and in too many documents
    too_short: int | None = None
    found: int | None = None
    common: int | None = None


class Sample(Result):
    """A text for people to read: removed by a step, in common with a benchmark, or an item and a model's answer."""

    id: str = ""
    source: str = ""
    text: str = ""
    detail: str = ""
    document: str = ""
    benchmark: str = ""
    item: str = ""
    prompt: str = ""
    question: str = ""
    choices: list[str] = []
    target: Any = None  # the place of the right choice, or the expected text
    continuation: str = ""
    chosen: int | None = None
    answer: str = ""


class DocumentsResult(Result):
    """What a step read and wrote, and what it removed for each reason, with a few samples."""

    documents_in: int | None = None
    documents_out: int | None = None
    bytes_in: int | None = None
    bytes_out: int | None = None
    removed: dict[str, int] = {}
    samples: dict[str, list[Sample]] = {}
    by_language: dict[str, Size] = {}
    by_source: dict[str, Size] = {}
    benchmarks: dict[str, Size] = {}  # that documents were searched for
    matches: list[Sample] = []
    validation: dict[str, Size] = {}  # held out, by `<source>.<language>`
    validation_documents: int = 0
    validation_bytes: int = 0
    without_validation: list[str] = []  # groups with too few documents

    @property
    def reasons(self) -> list[tuple[str, int]]:
        """Why documents were removed and how many, the most frequent reason first."""
        reasons = [each for each in self.removed.items() if each[1]]
        return sorted(reasons, key=lambda each: (-each[1], each[0]))

    @property
    def examples(self) -> list[dict[str, str]]:
        """Some removed documents of each reason: where they stand, and what is wrong with them."""
        rows = ((reason, each) for reason, samples in self.samples.items() for each in samples)
        return [{"reason": reason, "id": each.id, "detail": each.detail} for reason, each in rows]


class TokenizerResult(Result):
    """A tokenizer: the size of its vocabulary and its fertility."""

    vocabulary: int | None = None
    measured_on: str = ""  # "validation" or "train"
    languages: dict[str, Size] = {}
    sources: dict[str, Size] = {}
    round_trip: Size = Size()


class SequencesResult(Result):
    """Packed sequences of documents, conversations or preference pairs: of training, and of each validation set."""

    context: int | None = None  # tokens of a sequence
    train: Size = Size()
    validation: dict[str, Size] = {}
    groups: dict[str, Size] = {}  # of training, by `<source>.<language>`
    conversations: int | None = None  # found in the sources
    truncated: int | None = None
    dropped: int | None = None
    reasoning_dropped: int = 0  # conversations with reasoning that the chat template does not write


# ---- training ----


class Devices(Result):
    """The devices that a training ran on."""

    kind: str = ""
    count: int | None = None
    mesh: dict[str, int] = {}

    def __str__(self) -> str:
        return f"{self.count}\u00a0×\u00a0{self.kind}" if self.count and self.kind else self.kind


class Validated(Result):
    """Loss (nats per token, or per pair) and bits per UTF-8 byte on one validation set."""

    loss: float | None = None
    bits_per_byte: float | None = None
    pairs_right: float | None = Field(None, alias="rewards/accuracies")  # share of the pairs


class ValidationRise(Result):
    """The lowest and the last loss on a validation set, and the steps that they were measured after."""

    lowest: float = 0.0
    lowest_step: int = 0
    last: float = 0.0
    last_step: int = 0


class TrainingResult(Result):
    """A complete training."""

    parameters: Size = Size()
    flops_per_step: float | None = None
    steps: int | None = None
    tokens: int | None = None
    seconds: dict[str, float] = {}  # by account, and in total
    tokens_per_second: float | None = None
    mfu: float | None = None
    first_loss: float | None = None
    final_loss: float | None = None
    skipped_updates: int = 0
    validation: dict[str, Validated] = {}
    validation_rise: dict[str, ValidationRise] = {}  # of the sets whose loss has risen since its lowest
    predicted: dict[str, float] = {}
    memory: dict[str, float] = {}
    devices: Devices = Devices()
    resumed_at: list[int] = []
    ended: Literal["", "monitor", "epochs"] = ""  # what ended it before its last step

    @property
    def worked(self) -> float | None:
        """Seconds from its first start to its end, without the time between two starts."""
        total = self.seconds.get("total")
        return None if total is None else total - self.seconds.get("paused", 0.0)


# ---- evaluation and release ----


class Metric(Result):
    """The value of a metric and its standard error."""

    value: float | None = None
    stderr: float | None = None


class TaskResult(Result):
    """The metrics of one task."""

    metrics: dict[str, Metric] = {}
    items: int | None = None
    num_fewshot: int | None = None
    chat_template: bool = False
    chance: float | None = None


SHARES = ("acc", "acc_norm", "acc_bytes", "exact_match", "f1")  # metrics between 0 and 1, higher is better
HEADLINES = {"hellaswag": "acc_norm", "arc_challenge": "acc_norm"}  # the metrics that papers give, where not acc


def is_share(metric: str) -> bool:
    """Whether a metric lies between 0 and 1 with 1 the best; it may name a filter of answers ("exact_match,strict")."""
    return metric.partition(",")[0] in SHARES


def headline(task: str, metrics: Collection[str]) -> str:
    """The one of the metrics of a task that stands for it; "" if there are none."""
    wanted = (HEADLINES.get(task, "acc"), *SHARES)
    return next((name for name in wanted if name in metrics), next(iter(metrics), ""))


class TaskContamination(Result):
    """The items of a task that are in the training text, and its metrics without them."""

    items: int = 0
    found: list[int] = []
    common: list[int] = []  # items that match only by words that are in many texts
    without: dict[str, Metric] = {}


class ContaminationResult(Result):
    """How the training text was searched for items of benchmarks."""

    texts: int | None = None
    ngram: int | None = None
    tasks: dict[str, TaskContamination] = {}


class Score(NamedTuple):
    """One metric of one task, with its standard error; `chance` is what guessing gets, where that is known."""

    task: str
    metric: str
    value: float
    stderr: float | None
    items: int | None
    shots: int | None
    chat_template: bool
    chance: float | None


class EvaluationResult(Result):
    """Scores of one model, also as `results.json` of `affinage eval` has them."""

    tasks: dict[str, TaskResult] = {}
    samples: dict[str, list[Sample]] = {}
    contamination: ContaminationResult = ContaminationResult()

    @cached_property
    def by_task(self) -> dict[str, dict[str, Score]]:
        """All scores: task -> metric -> score."""
        by_task: dict[str, dict[str, Score]] = {}
        for task, result in self.tasks.items():
            about = (result.items, result.num_fewshot, result.chat_template)
            for name, metric in result.metrics.items():
                if metric.value is not None:
                    chance = result.chance if is_share(name) else None
                    scores = by_task.setdefault(task, {})
                    scores[name] = Score(task, name, metric.value, metric.stderr, *about, chance)
        return by_task

    @property
    def headlines(self) -> list[Score]:
        """The score of each task that charts and sentences show."""
        headlines = [scores[headline(task, scores)] for task, scores in self.by_task.items()]
        return [score for score in headlines if is_share(score.metric)]

    @property
    def prompts(self) -> list[tuple[bool, str, str]]:
        """Whether it was in a conversation, a prompt or question, and what the model wrote."""
        answers = ((name, one) for name in ("prompts", "questions") for one in self.samples.get(name, ()))
        return [(name == "questions", one.prompt or one.question, one.text) for name, one in answers]

    def to_dict(self) -> dict[str, dict[str, dict[str, Any]]]:
        """The scores as JSON: task -> metric -> the fields of `Score`."""
        return {task: {name: each._asdict() for name, each in scores.items()} for task, scores in self.by_task.items()}


class Verified(Result):
    """What was compared with transformers, and how well it agreed."""

    tokens: int = 0
    largest_logit_difference: float = 0.0

    def __str__(self) -> str:
        apart = f"at most {self.largest_logit_difference:.1e} of the largest apart"
        return f"transformers computes the same: logits of {self.tokens:,} tokens {apart}, and the same ids"


DOCUMENT_STEPS = ("ingest", "filter", "dedup", "decontaminate", "split")  # from documents to documents, in their order
RESULTS: dict[str, type[Result]] = {  # of all steps but the report, in their order
    "synthesize": Result,
    **dict.fromkeys(DOCUMENT_STEPS, DocumentsResult),
    "train-tokenizer": TokenizerResult,
    "tokenize": SequencesResult,
    "pretrain": TrainingResult,
    "sft-data": SequencesResult,
    "preference-data": SequencesResult,
    "sft": TrainingResult,
    "ref-logprobs": Result,
    "dpo": TrainingResult,
    **dict.fromkeys(("evaluate-base", "evaluate-sft", "evaluate-dpo"), EvaluationResult),
    "export": Result,
}
_FIRST = ("pretrain", "evaluate-base", "export")  # steps of training, of evaluation, and of the release


# ---- files ----


class StoredFile(Result):
    """A file of a result."""

    bytes: int = 0
    sha256: str = ""


class Manifest(Result):
    """What a complete result was made from, when, and of what files it consists."""

    step: str = ""
    key: str = ""
    files: dict[str, StoredFile] = {}
    started: AwareDatetime | None = None
    seconds: float | None = None
    versions: dict[str, str] = {}

    @property
    def group(self) -> int:
        """The kind of the step's work: 0 data, 1 training, 2 evaluation, 3 release."""
        names = list(RESULTS)
        return sum(names.index(self.step) >= names.index(first) for first in _FIRST)


def versions() -> dict[str, str]:
    """Versions of affinage, Python and the packages that results may depend on."""
    installed = {"affinage": affinage.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def read_result(folder: Path, kind: type[AnyResult]) -> AnyResult | None:
    """Returns what a step reported about its result; None if the result is not complete."""
    if not (folder / MANIFEST).is_file():
        return None
    return kind.model_validate(read_json(folder / RESULT))


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; {} if there is no such file, or it cannot be read."""
    try:
        return _object(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return {}


def runs_of_sweep(file: Path) -> list[str]:
    """The names of the runs in the file that `affinage sweep` writes; [] if it is no such file."""
    with contextlib.suppress(OSError, ValueError, RecursionError, TypeError, KeyError):
        return [str(made["run"]) for made in json.loads(file.read_text(encoding="utf-8"))]
    return []


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in a file of JSON lines, without lines that cannot be read, such as a last one cut by a kill."""
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as lines:
            yield from filter(None, map(_object, lines))


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
