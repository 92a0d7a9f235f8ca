"""Everything a report says about a run, read from its stage folders. Stages that did not run are absent, not errors."""

import hashlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from affinage.report.cleaning import Contamination, Thresholds, read_contamination, read_thresholds
from affinage.report.evaluations import Evaluation, read_by_hand, read_evaluation
from affinage.report.neighbours import NearDuplicate, near_duplicates
from affinage.report.probes import Probe, read_probe
from affinage.report.reading import json_file, listing, mapping, mappings, number, string, whole
from affinage.report.trainings import Training, read_accounts, read_training, worked

FLOW = ("ingest", "filter", "dedup", "decontaminate", "split")
ORDER = (
    "synthesize",
    *FLOW,
    "train-tokenizer",
    "compare-tokenizers",
    "tokenize",
    "arrays",
    "pretrain",
    "probe",
    "sft-data",
    "preference-data",
    "sft",
    "ref-logprobs",
    "dpo",
    "evaluate-base",
    "evaluate-sft",
    "evaluate-dpo",
    "export",
)
REPORT = "report"  # is about the others, and written before it is known what it took itself


@dataclass(frozen=True)
class Stage:
    """One stage of the run as its manifest records it. `files` maps paths to bytes; `seal` hashes all their hashes.

    `seconds` are those of the start that completed it; of a training that was stopped, of all its starts.
    """

    name: str
    key: str
    started: datetime | None
    seconds: float | None
    settings: Mapping[str, Any]
    summary: Mapping[str, Any]
    files: Mapping[str, int]
    seal: str
    versions: Mapping[str, Any]


@dataclass(frozen=True)
class Example:
    """A document that was removed, or part of it."""

    id: str
    source: str
    text: str
    detail: str


@dataclass(frozen=True)
class Removal:
    """What one reason removed from a stage."""

    reason: str
    count: int
    examples: tuple[Example, ...]


@dataclass(frozen=True)
class Share:
    """Documents and UTF-8 bytes of one language or source."""

    name: str
    documents: int | None
    bytes: int | None


@dataclass(frozen=True)
class Flow:
    """What went into a data stage and what came out; `held_out` of that was set aside for validation."""

    stage: str
    documents_in: int | None
    documents_out: int | None
    bytes_in: int | None
    bytes_out: int | None
    held_out_documents: int
    held_out_bytes: int
    not_held_out: tuple[str, ...]  # `<source>.<language>` too small to hold anything out of
    removals: tuple[Removal, ...]
    languages: tuple[Share, ...]
    sources: tuple[Share, ...]


@dataclass(frozen=True)
class Fertility:
    """How the text of one language, or of one source, looks to a tokenizer."""

    name: str
    bytes_per_token: float | None
    tokens_per_word: float | None
    tokens: int | None
    words: int | None


@dataclass(frozen=True)
class TokenizerFacts:
    """The tokenizer: its size, its fertility, and how many documents came back from it unchanged."""

    vocabulary: int | None
    languages: tuple[Fertility, ...]
    round_trip_documents: int | None
    round_trip_exact: int | None
    held_out: bool  # whether measured on documents that the tokenizer was not trained on
    sources: tuple[Fertility, ...] = ()
    name: str = ""  # of a published one's file; empty for the run's own


@dataclass(frozen=True)
class RowSet:
    """Rows of tokens on disk: the training set, or one validation set."""

    name: str
    rows: int | None
    tokens: int | None
    documents: int | None
    bytes: int | None


@dataclass(frozen=True)
class RowsFacts:
    """How the text was packed. `context` is tokens per row."""

    context: int | None
    dtype: str
    train: RowSet
    validation: tuple[RowSet, ...]


@dataclass(frozen=True)
class Conversations:
    """What fine-tuning read: how many conversations, how many were cut or left out, and how much of them is trained."""

    found: int | None
    truncated: int | None
    dropped: int | None
    unrolled: int | None  # that the chat template writes several times
    reasoning_dropped: int | None  # of whose reasoning it does not write some
    context: int | None
    tokens: int | None
    trained_tokens: int | None


@dataclass(frozen=True)
class Facts:
    """All that is known of one run."""

    name: str
    recipe: Mapping[str, Any]
    command: str
    stages: tuple[Stage, ...]
    flows: tuple[Flow, ...]
    thresholds: Thresholds | None
    contamination: Contamination | None
    near_duplicates: tuple[NearDuplicate, ...]
    tokenizer: TokenizerFacts | None
    compared_tokenizers: tuple[TokenizerFacts, ...]  # published ones, measured on the same documents
    rows: RowsFacts | None
    conversations: Conversations | None
    trainings: tuple[Training, ...]
    evaluations: tuple[Evaluation, ...]
    by_hand: tuple[Evaluation, ...] = ()  # of its models, apart from its recipe
    images: int | None = None  # that are trained on
    probe: Probe | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def language(self) -> str:
        """The language the page is written in, by the recipe's `report.language`."""
        return string(mapping(self.recipe.get("report")).get("language")) or "en"

    @property
    def finished(self) -> datetime | None:
        """When the last stage began; None for a run without dates."""
        return max((stage.started for stage in self.stages if stage.started), default=None)

    @property
    def seconds(self) -> float | None:
        """Time spent in all stages together."""
        known = [stage.seconds for stage in self.stages if stage.seconds is not None]
        return sum(known) if known else None

    def training(self, name: str) -> Training | None:
        """The training of that stage, if it ran."""
        return next((training for training in self.trainings if training.name == name), None)


def collect_facts(run_folder: Path, results: Mapping[str, Path] | None = None) -> Facts:
    """Reads a run folder (`runs/<name>`, one folder per stage, each with its manifest.json) but for its report.

    Args:
        run_folder: of the run.
        results: the stages that count, with their folders; None for all that the run has.

    Raises nothing for stages or fields that are missing; a stage without a manifest did not finish and is left out.
    """
    folders = dict(results) if results is not None else _folders(run_folder)
    stages = _stages(folders)
    by_name = {stage.name: stage for stage in stages}
    recipe = json_file(run_folder / "recipe.json")
    return Facts(
        name=string(recipe.get("name"), run_folder.name),
        recipe=recipe,
        command=string(json_file(run_folder / "run.json").get("command"))
        or shlex.join(["affinage", "run", run_folder.name]),
        stages=tuple(stages),
        flows=tuple(_flow(by_name[name]) for name in FLOW if name in by_name),
        thresholds=read_thresholds(by_name["filter"].summary, by_name["filter"].settings)
        if "filter" in by_name
        else None,
        contamination=read_contamination(by_name["decontaminate"].summary, by_name["decontaminate"].settings)
        if "decontaminate" in by_name
        else None,
        near_duplicates=near_duplicates(folders["dedup"], folders.get("filter", run_folder / "filter"))
        if "dedup" in by_name
        else (),
        tokenizer=_tokenizer(by_name["train-tokenizer"].summary) if "train-tokenizer" in by_name else None,
        compared_tokenizers=tuple(
            _tokenizer(entry) for entry in mappings(_summary(by_name, "compare-tokenizers").get("tokenizers"))[1:]
        ),
        rows=_rows(by_name["tokenize"].summary) if "tokenize" in by_name else None,
        conversations=_conversations(by_name["sft-data"].summary) if "sft-data" in by_name else None,
        trainings=tuple(
            read_training(name, folders[name], by_name[name].summary, recipe)
            for name in ("pretrain", "sft", "dpo")
            if name in by_name
        ),
        evaluations=tuple(
            read_evaluation(name.removeprefix("evaluate-"), folders[name], by_name[name].summary)
            for name in ("evaluate-base", "evaluate-sft", "evaluate-dpo")
            if name in by_name
        ),
        by_hand=tuple(read_by_hand(run_folder.parent, _models(folders, by_name))) if results is None else (),
        images=whole(mapping(by_name["arrays"].summary.get("train")).get("images")) if "arrays" in by_name else None,
        probe=read_probe(by_name["probe"].summary) if "probe" in by_name else None,
        versions={k: str(v) for stage in stages for k, v in stage.versions.items()},
    )


def _models(folders: Mapping[str, Path], stages: Mapping[str, Stage]) -> dict[str, tuple[str, int | None]]:
    """The models of a run and their steps, by the keys of their trainings, of those too that have not ended."""
    names = {"pretrain": "base", "sft": "sft", "dpo": "dpo"}
    keys = {name: string(json_file(folders[name] / "request.json").get("key")) for name in names if name in folders}
    return {key: (names[name], whole(_summary(stages, name).get("steps"))) for name, key in keys.items() if key}


def _folders(run_folder: Path) -> dict[str, Path]:
    return {folder.name: folder for folder in run_folder.iterdir()} if run_folder.is_dir() else {}


def _stages(folders: Mapping[str, Path]) -> list[Stage]:
    read = ((name, json_file(folder / "manifest.json")) for name, folder in folders.items())
    found = [_stage(name, manifest) for name, manifest in read if manifest and name != REPORT]
    rank = {name: i for i, name in enumerate(ORDER)}
    return sorted(found, key=lambda stage: (rank.get(stage.name, len(rank)), stage.name))


def _stage(folder_name: str, manifest: Mapping[str, Any]) -> Stage:
    files = {path: mapping(entry) for path, entry in mapping(manifest.get("files")).items()}
    lines = "".join(f"{entry.get('sha256', '')}  {path}\n" for path, entry in sorted(files.items()))
    return Stage(
        name=string(manifest.get("step"), folder_name),
        key=string(manifest.get("key")),
        started=_moment(manifest.get("started")),
        seconds=_seconds(manifest),
        settings=mapping(manifest.get("settings")),
        summary=mapping(manifest.get("summary")),
        files={path: whole(entry.get("bytes")) or 0 for path, entry in files.items()},
        seal=hashlib.sha256(lines.encode()).hexdigest() if files else "",
        versions=mapping(manifest.get("versions")),
    )


def _seconds(manifest: Mapping[str, Any]) -> float | None:
    last, all_starts = number(manifest.get("seconds")), worked(read_accounts(mapping(manifest.get("summary"))))
    return max((each for each in (last, all_starts) if each is not None), default=None)


def _moment(value: Any) -> datetime | None:
    """A time written as ISO 8601 or as seconds since 1970."""
    try:
        return datetime.fromisoformat(value) if isinstance(value, str) else datetime.fromtimestamp(float(value), UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def _example(entry: Mapping[str, Any]) -> Example:
    detail = entry.get("detail")
    written = ", ".join(f"{k}: {v}" for k, v in mapping(detail).items()) if isinstance(detail, Mapping) else detail
    return Example(
        id=str(entry.get("id") or ""),
        source=string(entry.get("source")),
        text=string(entry.get("text")),
        detail="" if written is None else str(written),
    )


def _flow(stage: Stage) -> Flow:
    summary = stage.summary
    samples = mapping(summary.get("samples"))
    removals = [
        Removal(reason, whole(count) or 0, tuple(_example(entry) for entry in mappings(samples.get(reason))))
        for reason, count in mapping(summary.get("removed")).items()
    ]
    return Flow(
        stage=stage.name,
        documents_in=whole(summary.get("documents_in")),
        documents_out=whole(summary.get("documents_out")),
        bytes_in=whole(summary.get("bytes_in")),
        bytes_out=whole(summary.get("bytes_out")),
        held_out_documents=whole(summary.get("validation_documents")) or 0,
        held_out_bytes=whole(summary.get("validation_bytes")) or 0,
        not_held_out=tuple(map(string, listing(summary.get("without_validation")))),
        removals=tuple(sorted((r for r in removals if r.count), key=lambda r: (-r.count, r.reason))),
        languages=_shares(summary.get("by_language")),
        sources=_shares(summary.get("by_source")),
    )


def _shares(value: Any) -> tuple[Share, ...]:
    shares = [
        Share(name, whole(mapping(entry).get("documents")), whole(mapping(entry).get("bytes")))
        for name, entry in mapping(value).items()
    ]
    return tuple(sorted(shares, key=lambda share: (-(share.bytes or 0), share.name)))


def _summary(stages: Mapping[str, Stage], name: str) -> Mapping[str, Any]:
    return stages[name].summary if name in stages else {}


def _fertilities(value: Any) -> tuple[Fertility, ...]:
    entries = {name: mapping(entry) for name, entry in mapping(value).items()}
    return tuple(
        Fertility(
            name,
            number(entry.get("bytes_per_token")),
            number(entry.get("tokens_per_word")),
            whole(entry.get("tokens")),
            whole(entry.get("words")),
        )
        for name, entry in entries.items()
    )


def _tokenizer(summary: Mapping[str, Any]) -> TokenizerFacts:
    round_trip = mapping(summary.get("round_trip"))
    return TokenizerFacts(
        vocabulary=whole(summary.get("vocabulary")),
        languages=_fertilities(summary.get("languages")),
        sources=_fertilities(summary.get("sources")),
        name=string(summary.get("name")),
        round_trip_documents=whole(round_trip.get("documents")),
        round_trip_exact=whole(round_trip.get("exact")),
        held_out=summary.get("measured_on") == "validation",
    )


def _row_set(name: str, value: Any) -> RowSet:
    entry = mapping(value)
    return RowSet(name, *(whole(entry.get(key)) for key in ("rows", "tokens", "documents", "bytes")))


def _rows(summary: Mapping[str, Any]) -> RowsFacts:
    return RowsFacts(
        context=whole(summary.get("context")),
        dtype=string(summary.get("dtype")),
        train=_row_set("train", summary.get("train")),
        validation=tuple(_row_set(name, entry) for name, entry in mapping(summary.get("validation")).items()),
    )


def _conversations(summary: Mapping[str, Any]) -> Conversations:
    train = mapping(summary.get("train"))
    return Conversations(
        found=whole(summary.get("conversations")),
        truncated=whole(summary.get("truncated")),
        dropped=whole(summary.get("dropped")),
        unrolled=whole(summary.get("unrolled")),
        reasoning_dropped=whole(summary.get("reasoning_dropped")),
        context=whole(summary.get("context")),
        tokens=whole(train.get("tokens")),
        trained_tokens=whole(train.get("trained_tokens")),
    )
