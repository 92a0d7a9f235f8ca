"""Everything a report states about a run, read from its step folders. Steps that did not run are absent, not errors."""

import hashlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from affinage.report.duplicates import NearDuplicate, near_duplicates
from affinage.report.evaluations import Evaluation, read_evaluation
from affinage.report.trainings import Training, read_training
from affinage.results import (
    DOCUMENT_STEPS,
    RESULTS,
    DocumentsResult,
    Manifest,
    Result,
    Size,
    TrainingResult,
    read_json,
    read_result,
)

TRAININGS = {"pretrain": "base", "sft": "sft", "dpo": "dpo"}  # step -> model
EVALUATIONS = {"evaluate-base": "base", "evaluate-sft": "sft", "evaluate-dpo": "dpo"}  # step -> model
ORDER = {  # all steps but the report -> the kind of their work: 0 data, 1 training, 2 evaluation, 3 release
    **dict.fromkeys(("synthesize", *DOCUMENT_STEPS, "train-tokenizer", "tokenize"), 0),
    **dict.fromkeys(("pretrain", "sft-data", "preference-data", "sft", "ref-logprobs", "dpo"), 1),
    **dict.fromkeys(EVALUATIONS, 2),
    "export": 3,
}


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

    @property
    def group(self) -> int:
        """The kind of its work, as in `ORDER`."""
        return ORDER.get(self.name, 0)


class Settings(Result):
    """The settings of a run's recipe that the report reads by name."""

    name: str = ""
    description: str = ""
    report: dict[str, Any] = {}
    data: dict[str, Any] = {}
    evaluate: dict[str, Any] = {}


@dataclass(frozen=True)
class Facts:
    """All that is known about one run."""

    name: str
    recipe: Mapping[str, Any]  # as it was written
    settings: Settings  # the same
    command: str
    steps: tuple[Step, ...] = ()
    results: dict[str, Result] = field(default_factory=dict)  # by step, in the order of the steps
    near_duplicates: tuple[NearDuplicate, ...] = ()
    trainings: tuple[Training, ...] = ()
    unfinished: tuple[tuple[Training, int | None], ...] = ()  # with the number of steps in all
    evaluations: tuple[Evaluation, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def documents(self) -> dict[str, DocumentsResult]:
        """The results of the steps from documents to documents."""
        return {name: one for name, one in self.results.items() if isinstance(one, DocumentsResult)}

    @property
    def seconds(self) -> float | None:
        """Time spent in all steps together."""
        return sum(step.seconds or 0.0 for step in self.steps) or None

    def training(self, name: str) -> Training | None:
        """The training of that step, if it ran."""
        return next((training for training in self.trainings if training.name == name), None)


def by_size(sizes: Mapping[str, Size]) -> list[tuple[str, Size]]:
    """Languages or sources with their sizes, the largest first."""
    return sorted(sizes.items(), key=lambda each: (-(each[1].bytes or 0), each[0]))


def collect_facts(run_folder: Path, results: Mapping[str, Path] | None = None) -> Facts:
    """Read a run folder (`runs/<name>`, one folder per step, each with its manifest.json) but for its report.

    `results` are the folders of the steps that count; None for all that the run has. Raises nothing for steps or fields
    that are missing; a step without a manifest did not finish, and is left out unless it is a training.
    """
    recipe = read_json(run_folder / "recipe.json")
    settings = Settings.model_validate(recipe)
    folders = dict(results) if results is not None else {}
    if results is None and run_folder.is_dir():
        folders = {folder.name: folder for folder in run_folder.iterdir()}
    kinds = {name: kind for name, kind in RESULTS.items() if name in folders and name in ORDER}
    read = {name: found for name, kind in kinds.items() if (found := read_result(folders[name], kind)) is not None}
    trained = {name: result for name, result in read.items() if isinstance(result, TrainingResult)}
    steps = _steps(folders, trained)
    done = {step.name for step in steps}
    command = read_json(run_folder / "run.json").get("command")
    begun = {name: folders[name] for name in TRAININGS if name in folders and name not in read}
    unfinished = [
        (read_training(name, folder, TrainingResult(), recipe), read_json(folder / "feed.json").get("steps"))
        for name, folder in begun.items()
        if (folder / "metrics.jsonl").is_file()
    ]
    pairs = near_duplicates(folders["dedup"], folders.get("filter", run_folder / "filter")) if "dedup" in done else ()
    return Facts(
        name=settings.name or run_folder.name,
        recipe=recipe,
        settings=settings,
        command=command if isinstance(command, str) else shlex.join(["affinage", "run", run_folder.name]),
        steps=tuple(steps),
        results=read,
        near_duplicates=pairs,
        trainings=tuple(read_training(name, folders[name], result, recipe) for name, result in trained.items()),
        unfinished=tuple(unfinished),
        evaluations=tuple(read_evaluation(EVALUATIONS[n], folders[n]) for n in EVALUATIONS if n in done),
        versions={name: version for step in steps for name, version in step.manifest.versions.items()},
    )


def _steps(folders: Mapping[str, Path], trained: Mapping[str, TrainingResult]) -> list[Step]:
    found = []
    for folder_name, folder in folders.items():
        value = read_json(folder / "manifest.json")
        if not value or folder_name == "report":  # written before its own time is known
            continue
        manifest = Manifest.model_validate(value)
        name, seconds = manifest.step or folder_name, [manifest.seconds]
        seconds += [trained[name].worked] if name in trained else []
        lines = "".join(f"{file.sha256}  {path}\n" for path, file in sorted(manifest.files.items()))
        checksum = hashlib.sha256(lines.encode()).hexdigest() if lines else ""
        found.append(Step(name, manifest, max((each for each in seconds if each is not None), default=None), checksum))
    rank = {name: i for i, name in enumerate(ORDER)}
    return sorted(found, key=lambda step: (rank.get(step.name, len(rank)), step.name))
