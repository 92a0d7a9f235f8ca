"""Everything a report states about a run, read from its step folders. Steps that did not run are absent, not errors."""

import contextlib
import difflib
import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    SequencesResult,
    Size,
    TrainingResult,
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
HeldOut = tuple[Any, ...]
Piece = tuple[str, bool]  # text, whether the other side lacks it


# ---- trainings ----


class EvalPoint(Result):
    """The benchmarks after a step, by the metric that is compared, and of those that are worse than before `task`."""

    step: int = 0
    scores: dict[str, Metric] = {}
    worse: list[dict[str, Any]] = []


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
    held_out: dict[str, HeldOut] = field(default_factory=dict)


def held_out(name: str, folder: Path, recipe: Mapping[str, Any]) -> dict[str, HeldOut]:
    """By validation set of a training in a folder what is the same where it measured the same text.

    These are the counts of its documents and bytes. A set of more rows than are measured has the hash of its tokens,
    too: how text is cut into rows, and their order, decide which part of it is measured.
    """
    rows = folder.resolve().parent / str(read_json(folder / "feed.json").get("rows") or "no rows")
    files = Manifest.model_validate(read_json(rows / MANIFEST)).files
    settings = recipe.get(name)
    limit = settings.get("eval_sequences") if isinstance(settings, Mapping) else None
    made = dict[str, HeldOut]()
    for title, size in (read_result(rows, SequencesResult) or SequencesResult()).validation.items():
        made[title] = (size.documents or size.conversations, size.bytes)
        if isinstance(limit, int) and (size.rows or 0) > limit:
            tokens = sorted(path for path in files if path.startswith(f"validation/{title}/tokens-"))
            made[title] += (limit, *(files[path].sha256 for path in tokens))
    return made


def held_out_apart(compared: Sequence[Mapping[str, HeldOut]]) -> list[str]:
    """The validation sets that are not of the same text in all trainings that have them, as `held_out` tells."""
    names = dict.fromkeys(name for one in compared for name in one)
    return [name for name in names if len({one[name] for one in compared if name in one}) > 1]


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
    training.held_out.update(held_out(name, folder, recipe))
    for line in read_json_lines(folder / "metrics.jsonl"):
        if not isinstance(step := line.get("step"), int):
            continue
        for metric, value in line.items():
            if isinstance(value, int | float) and math.isfinite(value):
                training.curves.setdefault(metric, []).append((step, value))
        if "validation" not in line:
            continue
        for dataset, validated in TrainingResult.model_validate(line).validation.items():
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

    rows, devices = (result.tokens or 0) // (result.steps or 1) // context, result.devices
    try:
        loaded = Recipe.model_validate(dict(recipe))
        settings = getattr(loaded, name)
        if not (settings and result.steps and rows):
            return {}
        if name == "dpo":  # the stored graph is without the loss of preferences
            data = folder.parent / "preference-data"
            documents = documents_in_a_row(data) if (data / MANIFEST).is_file() else None
            graph = preferring(graph, settings, context, documents)
    except (ValidationError, UserError):
        return {}
    places: Any = {"mesh": devices.mesh, "device_kind": devices.kind, "devices": devices.count or 1}
    estimate = forecast(graph, settings, loaded.parallel, rows=rows, context=context, **places)
    if estimate is None:
        return {}
    memory, step = float(estimate[0].total), estimate[1].seconds
    speed = rows * context / step
    return {"step_seconds": step, "seconds": step * result.steps, "tokens_per_second": speed, "memory": memory}


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
        differences = compare(read_answers(first.folder), read_answers(last.folder))
    except UserError:  # they have no items in common
        return {}
    in_chat = [{name for name, task in one.tasks.items() if task.chat_template} for one in (first, last)]
    return {(one.task, one.metric): one for one in differences if one.task not in in_chat[0] ^ in_chat[1]}


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
        inexact = pq.read_table(dedup / "removed.parquet", filters=[("exact", "==", False)])
        order = [(name, "ascending") for name in ("jaccard", "source", "id")]
        pairs = inexact.sort_by(order).slice(0, _SHOWN).to_pylist()
        wanted = ds.field("id").isin(sorted({pair[key] for pair in pairs for key in ("id", "duplicate_of")}))
        rows = ds.dataset(files).to_table(columns=["source", "id", "text"], filter=wanted).to_pylist() if pairs else []
        texts = {(row["source"], row["id"]): row["text"] for row in rows}
        duplicates = []
        for pair in pairs:
            kept, removed = _around_difference(
                texts[pair["duplicate_of_source"], pair["duplicate_of"]], texts[pair["source"], pair["id"]]
            )
            duplicates.append(NearDuplicate(pair["jaccard"], pair["duplicate_of"], kept, pair["id"], removed))
        return tuple(duplicates)
    except (pa.ArrowException, OSError, KeyError):
        return ()  # another version's columns, or a file that is gone: the report has no such section then


def _around_difference(*texts: str) -> list[list[Piece]]:
    """Two texts around their first difference, each cut into pieces that are shared or only on its side."""
    start = max(0, len(os.path.commonprefix(texts)) - _BEFORE)  # noqa: RUF071
    start = texts[0].rfind(" ", 0, start) + 1 or start
    # Twice as much is compared as is shown: what one excerpt has beyond the end of the other is no difference.
    excerpts = (("… " if start else "") + text[start : start + 2 * _LENGTH] for text in texts)
    left, right = (re.findall(r"\s+|\w+|[^\w\s]", text) for text in excerpts)
    pieces: list[list[Piece]] = [[], []]
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        for side, part in zip(pieces, (left[i1:i2], right[j1:j2])):
            if part:
                side.append(("".join(part), tag != "equal"))
    return [_cut(side) for side in pieces]


def _cut(pieces: list[Piece]) -> list[Piece]:
    """The pieces within the first `_LENGTH` characters, up to a space if there is one."""
    cut, room = list[Piece](), _LENGTH
    for text, differs in pieces:
        if len(text) > room:
            end = text.rfind(" ", 0, room)
            return [*cut, (text[: room if end < 0 else end], differs), (" …", False)]
        cut, room = [*cut, (text, differs)], room - len(text)
    return cut


# ---- the run ----


class Settings(Result):
    """The settings of a run's recipe that the report reads by name."""

    name: str = ""
    description: str = ""
    report: dict[str, Any] = {}
    data: dict[str, Any] = {}


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
        worked = trained[name].worked if name in trained else None
        seconds = max(manifest.seconds or 0.0, worked or 0.0) or None
        steps.append(manifest.model_copy(update={"step": name, "seconds": seconds}))
    command = read_json(run_folder / "run.json").get("command")
    begun = {name: folders[name] for name in MODELS if name in folders and name not in read}
    unfinished = [
        (read_training(name, folder, TrainingResult(), recipe), read_json(folder / "feed.json").get("steps"))
        for name, folder in begun.items()
        if (folder / "metrics.jsonl").is_file()
    ]
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
        evaluations=tuple(
            read_evaluation(model, folders[step]) for model in MODELS.values() if (step := f"evaluate-{model}") in read
        ),
        versions={name: version for step in steps for name, version in step.versions.items()},
    )


def at_checkpoint(facts: Facts, step: int) -> Facts:
    """The facts that are those of the last training's weights at a step, or of an average there: no losses or scores.

    At another step than the last the times are left out, too.
    """
    if not facts.trainings:
        return facts
    last, ended = facts.trainings[-1], step == facts.trainings[-1].result.steps
    tokens = (last.result.tokens or 0) * step // (last.result.steps or 1)
    changed: dict[str, Any] = {"steps": step, "tokens": tokens, "final_loss": None, "validation": {}}
    last = Training(last.name, last.result.model_copy(update=changed), [], {}, last.analysis, last.context)
    trainings = [*facts.trainings[:-1], last]
    if not ended:
        timeless = (one.result.model_copy(update={"seconds": {}}) for one in trainings)
        trainings = [replace(one, result=result) for one, result in zip(trainings, timeless)]
    return replace(facts, trainings=tuple(trainings), steps=facts.steps if ended else (), evaluations=())


def losses_and_scores(run: Path) -> dict[str, Any]:
    """The losses of a run's last training, and the headline scores of the last model that was evaluated."""
    losses, scores = dict[str, float | None](), dict[str, Any]()
    for training, model in MODELS.items():
        if (result := read_result(run / training, TrainingResult)) is not None:
            losses = {f"{training} loss": result.final_loss}
            for name, one in result.validation.items():
                # Losses per token of different tokenizers cannot be compared, bits per byte can.
                losses |= {f"{training} loss, {name}": one.loss, f"{training} bits per byte, {name}": one.bits_per_byte}
        if (evaluated := read_result(run / f"evaluate-{model}", EvaluationResult)) is not None:
            scores = {score.task: score._asdict() for score in evaluated.headlines}
    return {"losses": {name: loss for name, loss in losses.items() if loss is not None}, "scores": scores}
