"""Everything a report states about a run, read from its step folders. Steps that did not run are absent, not errors."""

import difflib
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from affinage.data.documents import document_files
from affinage.report.evaluations import Evaluation, read_evaluation
from affinage.report.trainings import Training, read_training
from affinage.results import (
    RESULTS,
    DocumentsResult,
    Manifest,
    Result,
    Size,
    TrainingResult,
    read_json,
    read_result,
)

MODELS = {"pretrain": "base", "sft": "sft", "dpo": "dpo"}  # of each training; `evaluate-<model>` evaluates it
_SHOWN = 6  # pairs of near duplicates
_SEARCHED_BYTES = 2e9  # of Parquet; a larger corpus would keep a reader waiting for a handful of examples
_BEFORE, _LENGTH = 140, 460  # characters shown before the first difference, and in all
Piece = tuple[str, bool]  # text, whether the other side lacks it


class Settings(Result):
    """The settings of a run's recipe that the report reads by name."""

    name: str = ""
    description: str = ""
    report: dict[str, Any] = {}
    data: dict[str, Any] = {}
    evaluate: dict[str, Any] = {}


class NearDuplicate(NamedTuple):
    """A document that was kept and one that was removed, around their first difference; `similarity` is Jaccard's."""

    similarity: float
    kept_id: str
    kept: list[Piece]
    removed_id: str
    removed: list[Piece]


@dataclass(frozen=True)
class Facts:
    """All that is known about one run."""

    name: str
    recipe: Mapping[str, Any]  # as it was written
    settings: Settings  # the same
    command: str
    steps: tuple[Manifest, ...] = ()  # `seconds` of a training that was stopped are those of all its starts
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
    folders = dict(results) if results is not None else {name: run_folder / name for name in RESULTS}
    read = {
        name: result
        for name, kind in RESULTS.items()
        if name in folders and (result := read_result(folders[name], kind)) is not None
    }
    trained = {name: result for name, result in read.items() if isinstance(result, TrainingResult)}
    steps = []
    for name in read:
        manifest = Manifest.model_validate(read_json(folders[name] / "manifest.json"))
        seconds = [manifest.seconds, trained[name].worked if name in trained else None]
        longest = max((each for each in seconds if each is not None), default=None)
        steps.append(manifest.model_copy(update={"step": name, "seconds": longest}))
    command = read_json(run_folder / "run.json").get("command")
    begun = {name: folders[name] for name in MODELS if name in folders and name not in read}
    unfinished = [
        (read_training(name, folder, TrainingResult(), recipe), read_json(folder / "feed.json").get("steps"))
        for name, folder in begun.items()
        if (folder / "metrics.jsonl").is_file()
    ]
    evaluated = {model: folders[step] for model in MODELS.values() if (step := f"evaluate-{model}") in read}
    pairs = near_duplicates(folders["dedup"], folders.get("filter", run_folder / "filter")) if "dedup" in read else ()
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
        evaluations=tuple(read_evaluation(model, folder) for model, folder in evaluated.items()),
        versions={name: version for step in steps for name, version in step.versions.items()},
    )


# ---- near duplicates ----


def near_duplicates(dedup: Path, documents: Path) -> tuple[NearDuplicate, ...]:
    """The pairs that are least alike, by which to judge a threshold.

    `dedup` is the folder of that step, with `removed.parquet`, and `documents` that of the step that it read.
    """
    files = document_files(documents)
    if not (dedup / "removed.parquet").is_file() or sum(file.stat().st_size for file in files) > _SEARCHED_BYTES:
        return ()
    try:
        removed = pq.read_table(dedup / "removed.parquet", filters=[("exact", "==", False)])
        table = removed.sort_by([(name, "ascending") for name in ("jaccard", "source", "id")]).slice(0, _SHOWN)
        pairs = table.to_pylist()
        wanted = ds.field("id").isin(sorted({pair[key] for pair in pairs for key in ("id", "duplicate_of")}))
        rows = ds.dataset(files).to_table(columns=["source", "id", "text"], filter=wanted).to_pylist() if pairs else []
        texts = {(row["source"], row["id"]): row["text"] for row in rows}
        found = []
        for pair in pairs:
            kept = texts[pair["duplicate_of_source"], pair["duplicate_of"]]
            kept_pieces, removed_pieces = differences(*_excerpts(kept, texts[pair["source"], pair["id"]]))
            found.append(NearDuplicate(pair["jaccard"], pair["duplicate_of"], kept_pieces, pair["id"], removed_pieces))
        return tuple(found)
    except (pa.ArrowException, OSError, KeyError):
        return ()  # another version's columns, or a file that is gone: the report has no such section then


def _excerpts(*texts: str) -> list[str]:
    """The parts of texts around their first difference."""
    start = max(0, len(os.path.commonprefix(texts)) - _BEFORE)  # noqa: RUF071
    start = texts[0].rfind(" ", 0, start) + 1 or start
    end = start + _LENGTH
    return [("… " if start else "") + text[start:end] + (" …" if len(text) > end else "") for text in texts]


def differences(left: str, right: str) -> tuple[list[Piece], list[Piece]]:
    """Both texts cut into pieces, each marked as shared or as only on its side."""
    words_left, words_right = (re.findall(r"\s+|\w+|[^\w\s]", text) for text in (left, right))
    pieces: tuple[list[Piece], list[Piece]] = ([], [])
    matcher = difflib.SequenceMatcher(None, words_left, words_right, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        for side, words in zip(pieces, (words_left[i1:i2], words_right[j1:j2])):
            if words:
                side.append(("".join(words), tag != "equal"))
    return pieces
