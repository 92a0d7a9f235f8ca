"""What a training left behind: its result, its curves, its benchmarks, and what the planner predicts for it."""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from affinage.errors import UserError
from affinage.report.charts import Point
from affinage.results import MANIFEST, Metric, Result, TrainingResult, Validated, read_json, read_json_lines

if TYPE_CHECKING:
    from affinage.model import Graph
    from affinage.model.analysis import NodeCost


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


class _Monitor(Result):
    points: list[EvalPoint] = []


class _Evaluated(Result):
    bits_per_byte: dict[str, float] = {}


class _Line(Result):
    """What a line of metrics.jsonl has beside its numbers."""

    step: int | None = None
    validation: dict[str, Validated] = {}
    evaluation: _Evaluated = _Evaluated()


class _Model(Result):
    graph: dict[str, Any] = {}
    context: int | None = None


@dataclass(frozen=True)
class Training:
    """One training. Curves are points (step, value): by metric, validation set, and language of the validation text."""

    name: str
    result: TrainingResult
    points: list[EvalPoint]  # benchmarks during the training
    predicted: dict[str, float]
    analysis: "list[NodeCost] | None"  # of the model
    context: int | None  # tokens of a sequence
    curves: dict[str, list[Point]] = field(default_factory=dict)
    validation: dict[str, list[Point]] = field(default_factory=dict)
    bits_per_byte: dict[str, list[Point]] = field(default_factory=dict)
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
    from affinage.model.analysis import analyze

    model = _Model.model_validate(read_json(folder / "model.json"))
    points = _Monitor.model_validate(read_json(folder / "monitor.json")).points
    analysis, predicted = None, result.predicted
    if model.graph and model.context:
        with contextlib.suppress(UserError):  # another version may have stored it
            graph = parse(model.graph)
            analysis = analyze(graph, 1, model.context)
            predicted = predicted | _forecast(name, folder, result, recipe, graph, model.context)
    training = Training(name, result, points, predicted, analysis, model.context)
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
        for language, bits in line.evaluation.bits_per_byte.items():
            training.bits_per_byte.setdefault(language, []).append((step, bits))
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
