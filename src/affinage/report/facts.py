"""Everything a report says about a run, read from its step folders. Steps that did not run are absent, not errors."""

import hashlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from affinage.report.evaluations import Evaluation, read_by_hand, read_evaluation
from affinage.report.neighbours import NearDuplicate, near_duplicates
from affinage.report.trainings import Training, read_training
from affinage.results import (
    DOCUMENT_STEPS,
    AnyResult,
    ChatDataResult,
    CompareTokenizersResult,
    DecontaminateResult,
    DocumentsResult,
    FilterResult,
    Manifest,
    Result,
    TokenizeResult,
    TokenizerResult,
    TrainingResult,
    read_json,
    read_result,
)

TRAININGS = ("pretrain", "sft", "dpo")
EVALUATIONS = {"evaluate-base": "base", "evaluate-sft": "sft", "evaluate-dpo": "dpo"}  # step -> model
ORDER = (
    "synthesize",
    *DOCUMENT_STEPS,
    "train-tokenizer",
    "compare-tokenizers",
    "tokenize",
    "pretrain",
    "sft-data",
    "preference-data",
    "sft",
    "ref-logprobs",
    "dpo",
    *EVALUATIONS,
    "export",
)
REPORT = "report"  # it describes the others, and is written before its own time is known


@dataclass(frozen=True)
class Step:
    """One step of the run.

    `seconds` is the time of the start that completed it; for a training that was stopped, of all its starts. `checksum`
    is a hash of the hashes of all files.
    """

    name: str
    manifest: Manifest
    seconds: float | None
    checksum: str


class _Report(Result):
    language: str = "en"


class _Data(Result):
    languages: list[str] = []
    sources: list[dict[str, Any]] = []


class _Evaluate(Result):
    tasks: list[str] = []


class _Model(Result):
    nodes: dict[str, dict[str, Any]] = {}


class Settings(Result):
    """The settings of a run's recipe that the report reads by name."""

    name: str = ""
    description: str = ""
    report: _Report = _Report()
    data: _Data = _Data()
    evaluate: _Evaluate = _Evaluate()
    model: _Model = _Model()


@dataclass(frozen=True)
class Facts:
    """All that is known about one run."""

    name: str
    recipe: Mapping[str, Any]  # as it was written
    settings: Settings  # the same
    command: str
    steps: tuple[Step, ...] = ()
    flows: dict[str, DocumentsResult] = field(default_factory=dict)  # by step, in the order of the steps
    near_duplicates: tuple[NearDuplicate, ...] = ()
    tokenizer: TokenizerResult | None = None
    published_tokenizers: tuple[TokenizerResult, ...] = ()  # measured on the same documents
    rows: TokenizeResult | None = None
    conversations: ChatDataResult | None = None
    trainings: tuple[Training, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    by_hand: tuple[Evaluation, ...] = ()  # of its models, by `affinage eval`
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def language(self) -> str:
        """The language the page is written in, by the recipe's `report.language`."""
        return self.settings.report.language

    @property
    def finished(self) -> datetime | None:
        """When the last step began; None for a run without dates."""
        return max((step.manifest.started for step in self.steps if step.manifest.started), default=None)

    @property
    def seconds(self) -> float | None:
        """Time spent in all steps together."""
        known = [step.seconds for step in self.steps if step.seconds is not None]
        return sum(known) if known else None

    @property
    def filtered(self) -> FilterResult | None:
        """The result of the step `filter`."""
        found = self.flows.get("filter")
        return found if isinstance(found, FilterResult) else None

    @property
    def decontaminated(self) -> DecontaminateResult | None:
        """The result of the step `decontaminate`, if it searched for benchmarks."""
        found = self.flows.get("decontaminate")
        return found if isinstance(found, DecontaminateResult) and found.benchmarks else None

    def step(self, name: str) -> Step | None:
        """The step with this name, if it ran."""
        return next((step for step in self.steps if step.name == name), None)

    def training(self, name: str) -> Training | None:
        """The training of that step, if it ran."""
        return next((training for training in self.trainings if training.name == name), None)


def collect_facts(run_folder: Path, results: Mapping[str, Path] | None = None) -> Facts:
    """Reads a run folder (`runs/<name>`, one folder per step, each with its manifest.json) but for its report.

    Args:
        run_folder: of the run.
        results: the steps that count, with their folders; None for all that the run has.

    Raises nothing for steps or fields that are missing; a step without a manifest did not finish and is left out.
    """
    folders = dict(results) if results is not None else _folders(run_folder)
    steps = _steps(folders)
    recipe = read_json(run_folder / "recipe.json")
    settings = Settings.model_validate(recipe)

    def read(name: str, kind: type[AnyResult]) -> AnyResult | None:
        return read_result(folders[name], kind) if name in folders else None

    compared = read("compare-tokenizers", CompareTokenizersResult)
    trained = {name: found for name in TRAININGS if (found := read(name, TrainingResult)) is not None}
    command = read_json(run_folder / "run.json").get("command")
    return Facts(
        name=settings.name or run_folder.name,
        recipe=recipe,
        settings=settings,
        command=command if isinstance(command, str) else shlex.join(["affinage", "run", run_folder.name]),
        steps=tuple(steps),
        flows={name: result for name, kind in DOCUMENT_STEPS.items() if (result := read(name, kind)) is not None},
        near_duplicates=near_duplicates(folders["dedup"], folders.get("filter", run_folder / "filter"))
        if "dedup" in {step.name for step in steps}
        else (),
        tokenizer=read("train-tokenizer", TokenizerResult),
        published_tokenizers=tuple(compared.tokenizers[1:]) if compared else (),
        rows=read("tokenize", TokenizeResult),
        conversations=read("sft-data", ChatDataResult),
        trainings=tuple(read_training(name, folders[name], result, recipe) for name, result in trained.items()),
        evaluations=tuple(
            read_evaluation(model, folders[step])
            for step, model in EVALUATIONS.items()
            if any(step == each.name for each in steps)
        ),
        by_hand=tuple(read_by_hand(run_folder.parent, _models(folders, trained))) if results is None else (),
        versions={name: version for step in steps for name, version in step.manifest.versions.items()},
    )


def _models(folders: Mapping[str, Path], trained: Mapping[str, TrainingResult]) -> dict[str, tuple[str, int | None]]:
    """The models of a run and their steps, by the keys of their trainings, also of trainings that have not ended."""
    names = {"pretrain": "base", "sft": "sft", "dpo": "dpo"}
    keys = {name: read_json(folders[name] / "request.json").get("key") for name in names if name in folders}
    return {
        key: (names[name], trained[name].steps if name in trained else None)
        for name, key in keys.items()
        if isinstance(key, str)
    }


def _folders(run_folder: Path) -> dict[str, Path]:
    return {folder.name: folder for folder in run_folder.iterdir()} if run_folder.is_dir() else {}


def _steps(folders: Mapping[str, Path]) -> list[Step]:
    read = ((name, folder, read_json(folder / "manifest.json")) for name, folder in folders.items())
    found = [_step(name, folder, manifest) for name, folder, manifest in read if manifest and name != REPORT]
    rank = {name: i for i, name in enumerate(ORDER)}
    return sorted(found, key=lambda step: (rank.get(step.name, len(rank)), step.name))


def _step(folder_name: str, folder: Path, value: Mapping[str, Any]) -> Step:
    manifest = Manifest.model_validate(value)
    name = manifest.step or folder_name
    seconds = manifest.seconds
    if name in TRAININGS and (training := read_result(folder, TrainingResult)) is not None:
        seconds = max((each for each in (seconds, training.worked) if each is not None), default=None)
    lines = "".join(f"{file.sha256}  {path}\n" for path, file in sorted(manifest.files.items()))
    return Step(name, manifest, seconds, hashlib.sha256(lines.encode()).hexdigest() if lines else "")
