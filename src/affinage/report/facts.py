"""Everything a report states about a run, read from its step folders. Steps that did not run are absent, not errors."""

import contextlib
import difflib
import math
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pydantic import ValidationError

from affinage.data.documents import document_files
from affinage.errors import UserError
from affinage.evaluation.results import Difference, compare, read_answers
from affinage.results import (
    MANIFEST,
    RESULTS,
    DocumentsResult,
    EvaluationResult,
    Manifest,
    Metric,
    Result,
    Size,
    TrainingResult,
    Validated,
    read_json,
    read_json_lines,
    read_result,
)

if TYPE_CHECKING:
    from affinage.model import Graph

MODELS = {"pretrain": "base", "sft": "sft", "dpo": "dpo"}  # of each training; `evaluate-<model>` evaluates it
_SHOWN = 6  # pairs of near duplicates
_SEARCHED_BYTES = 2e9  # of Parquet; a larger corpus would keep a reader waiting for a handful of examples
_BEFORE, _LENGTH = 140, 460  # characters shown before the first difference, and in all
Point = tuple[float, float]
Piece = tuple[str, bool]  # text, whether the other side lacks it


# ---- trainings ----


class Regression(Result):
    """A benchmark that is worse than at an earlier step, with the probability that chance does this."""

    task: str = ""
    than: int = 0
    p: float | None = None


class EvalPoint(Result):
    """The benchmarks after a step, by the metric that is compared, and those that are worse than before."""

    step: int = 0
    scores: dict[str, Metric] = {}
    worse: list[Regression] = []

    def value(self, task: str) -> float | None:
        """The score of a task."""
        return self.scores.get(task, Metric()).value


class _Line(Result):
    """What a line of metrics.jsonl has beside its numbers."""

    step: int | None = None
    validation: dict[str, Validated] = {}


class _Stored(Result):
    """What model.json and monitor.json hold."""

    graph: dict[str, Any] = {}
    context: int | None = None
    points: list[EvalPoint] = []


@dataclass(frozen=True)
class Training:
    """One training. Curves are points (step, value): by metric and by validation set."""

    name: str
    result: TrainingResult
    points: list[EvalPoint]  # benchmarks during the training
    predicted: dict[str, float]
    analysis: list[dict[str, Any]] | None  # of the model
    context: int | None  # tokens of a sequence
    curves: dict[str, list[Point]] = field(default_factory=dict)
    validation: dict[str, list[Point]] = field(default_factory=dict)
    nonfinite_steps: list[int] = field(default_factory=list)  # whose loss was not a finite number

    @property
    def regressions(self) -> list[tuple[EvalPoint, EvalPoint, Regression]]:
        """Benchmarks that became worse: for each its last point, the earlier one, and the most certain test."""
        by_step = {point.step: point for point in self.points}
        last: dict[str, tuple[EvalPoint, EvalPoint, Regression]] = {}
        for point in self.points:
            for one in sorted(point.worse, key=lambda one: -(one.p or 0.0)):
                last[one.task] = (point, by_step.get(one.than, EvalPoint(step=one.than)), one)
        return list(last.values())


def read_training(name: str, folder: Path, result: TrainingResult, recipe: Mapping[str, Any]) -> Training:
    """Read the curves and benchmarks of a training, and predict it now, from the recipe of the run."""
    from affinage.model import parse
    from affinage.model.graph import analyze

    model = _Stored.model_validate(read_json(folder / "model.json") | read_json(folder / "monitor.json"))
    analysis, predicted = None, result.predicted
    if model.graph and model.context:
        with contextlib.suppress(UserError):  # another version may have stored it
            graph = parse(model.graph)
            analysis = analyze(graph, 1, model.context)
            predicted = predicted | _forecast(name, folder, result, recipe, graph, model.context)
    training = Training(name, result, model.points, predicted, analysis, model.context)
    for values in read_json_lines(folder / "metrics.jsonl"):
        line = _Line.model_validate(values)
        if (step := line.step) is None:
            continue
        for metric, value in values.items():
            if isinstance(value, int | float) and math.isfinite(value):
                training.curves.setdefault(metric, []).append((step, value))
            elif metric == "loss":
                training.nonfinite_steps.append(step)
        for dataset, validated in line.validation.items():
            if validated.loss is not None:
                training.validation.setdefault(dataset, []).append((step, validated.loss))
    return training


def _forecast(
    name: str, folder: Path, result: TrainingResult, recipe: Mapping[str, Any], graph: "Graph", context: int
) -> dict[str, float]:
    """What the planner estimates for the training on the devices that it ran on.

    Nothing for trainings that the planner does not know (other chips), or recipes of other versions.
    """
    from affinage.config.recipe import Recipe
    from affinage.data.tuning_data import documents_in_a_row
    from affinage.planning.plan import forecast, preferring

    steps, tokens, devices = result.steps or 0, result.tokens or 0, result.devices
    try:
        loaded = Recipe.model_validate(dict(recipe))
        settings = getattr(loaded, name)
        if not (settings and steps and tokens):
            return {}
        if name == "dpo":  # the stored graph is without the loss of preferences
            data = folder.parent / "preference-data"
            documents = documents_in_a_row(data) if (data / MANIFEST).is_file() else None
            graph = preferring(graph, settings, context, documents)
    except (ValidationError, UserError):
        return {}
    places: dict[str, Any] = {"mesh": devices.mesh, "device_kind": devices.kind, "devices": devices.count or 1}
    rows = tokens // steps // context
    if (found := forecast(graph, settings, loaded.parallel, rows=rows, context=context, **places)) is None:
        return {}
    memory, step = float(found[0].total), found[1].seconds
    return {"step_seconds": step, "seconds": step * steps, "tokens_per_second": tokens / steps / step, "memory": memory}


# ---- evaluations ----


class Evaluation(EvaluationResult):
    """The scores of `model` (base, sft or dpo), from the results in a folder."""

    model: str = ""
    folder: Path = Path()


def read_evaluation(model: str, folder: Path) -> Evaluation:
    """Read the results.json of an evaluation, which also `affinage eval` writes."""
    return Evaluation.model_validate(read_json(folder / "results.json") | {"model": model, "folder": folder})


def changes(first: Evaluation, last: Evaluation) -> dict[tuple[str, str], Difference]:
    """The paired differences by task and metric; none where only one of the two was asked in the chat template."""
    try:
        found = compare(read_answers(first.folder), read_answers(last.folder))
    except UserError:  # they have no items in common
        return {}
    in_chat = [{name for name, task in one.tasks.items() if task.chat_template} for one in (first, last)]
    return {(one.task, one.metric): one for one in found if one.task not in in_chat[0] ^ in_chat[1]}


# ---- near duplicates ----


class NearDuplicate(NamedTuple):
    """A document that was kept and one that was removed, around their first difference; `similarity` is Jaccard's."""

    similarity: float
    kept_id: str
    kept: list[Piece]
    removed_id: str
    removed: list[Piece]


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


# ---- the run ----


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
