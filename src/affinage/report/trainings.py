"""What a training left behind: its result, its curves, and what was predicted for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from affinage.report.charts import Point
from affinage.report.costs import Node, node_costs
from affinage.report.evaluations import headline
from affinage.report.forecasts import predicted
from affinage.results import Metric, Result, TrainingResult, Validated, read_json, read_json_lines

CURVES = (
    *("loss", "learning_rate", "tokens_per_second", "grad_norm", "mfu"),
    *("expert_load_max", "dropped_share"),
)


@dataclass(frozen=True)
class Worse:
    """A benchmark that is worse after a step than it was: both scores, and the probability that chance does this."""

    task: str
    step: int
    than: int  # an earlier step
    before: float | None
    now: float | None
    p: float | None


@dataclass(frozen=True)
class EvalPoint:
    """The benchmarks after a step: task -> (its headline score, standard error, whether it is worse than before)."""

    step: int
    scores: Mapping[str, tuple[float | None, float | None, bool]]


@dataclass(frozen=True)
class Compared:
    """One quantity as it was predicted and as it was measured."""

    quantity: str
    predicted: float | None
    measured: float | None


class Training(TrainingResult):
    """One training. Curves map a metric to (step, value); `validation_curves` do so per validation set."""

    name: str
    curves: dict[str, list[Point]]
    validation_curves: dict[str, list[Point]]
    broken_steps: list[int]  # steps whose loss was not a finite number
    compared: list[Compared]
    nodes: tuple[Node, ...]
    context: int | None
    eval_points: list[EvalPoint]  # benchmarks during the training
    monitored: bool  # whether regressions of the benchmarks can end it
    bits_per_byte: dict[str, list[Point]]  # of the validation text of a language
    worse: list[Worse]  # benchmarks that became worse: for each of them the last time

    @property
    def loss_kind(self) -> str:
        """The prefix of the words for its loss: per token, or per pair of answers."""
        return "pair_loss" if self.name == "dpo" else "loss"


class _Evaluated(Result):
    """Benchmarks of a line of metrics.jsonl."""

    tasks: dict[str, dict[str, Metric]] = {}
    bits_per_byte: dict[str, float] = {}


class _Line(Result):
    """A line of metrics.jsonl."""

    step: float | None = None
    loss: float | None = None
    learning_rate: float | None = None
    tokens_per_second: float | None = None
    grad_norm: float | None = None
    mfu: float | None = None
    expert_load_max: float | None = None
    dropped_share: float | None = None
    validation: dict[str, Validated] = {}
    evaluation: _Evaluated = _Evaluated()


class _Regression(Result):
    """A task that is worse than at an earlier step."""

    task: str = ""
    than: int = 0
    p: float | None = None


class _MonitorPoint(Result):
    """The benchmarks of a monitor after a step."""

    step: int = 0
    scores: dict[str, Metric] = {}
    worse: list[_Regression] = []


class _Monitor(Result):
    """The file of a monitor."""

    points: list[_MonitorPoint] = []


def read_training(name: str, folder: Path, result: TrainingResult, recipe: Mapping[str, Any]) -> Training:
    """Reads the curves and benchmarks of a training, and predicts it now, from the recipe of the run."""
    nodes, context = node_costs(folder)
    monitored = _Monitor.model_validate(read_json(folder / "monitor.json")).points
    points = [_of_monitor(point) for point in monitored]
    curves: dict[str, list[Point]] = {}
    validation: dict[str, list[Point]] = {}
    bits: dict[str, list[Point]] = {}
    broken, evaluated = [], []
    for value in read_json_lines(folder / "metrics.jsonl"):
        line = _Line.model_validate(value)
        if (step := line.step) is None:
            continue
        if "loss" in value and line.loss is None:
            broken.append(int(step))
        for metric in CURVES:
            if (found := getattr(line, metric)) is not None:
                curves.setdefault(metric, []).append((step, found))
        for name_of_set, facts in line.validation.items():
            if facts.loss is not None:
                validation.setdefault(name_of_set, []).append((step, facts.loss))
        if line.evaluation.tasks:
            evaluated.append(_of_line(int(step), line.evaluation))
        for language, found in line.evaluation.bits_per_byte.items():
            bits.setdefault(language, []).append((step, found))
    return Training.model_construct(
        **{field: getattr(result, field) for field in TrainingResult.model_fields},
        name=name,
        curves=curves,
        validation_curves=validation,
        broken_steps=broken,
        compared=_compared(result, predicted(name, folder, result, recipe)),
        nodes=nodes,
        context=context,
        eval_points=points or evaluated,
        monitored=bool(points),
        bits_per_byte=bits,
        worse=_worse(monitored, {point.step: point for point in points}),
    )


def _of_monitor(point: _MonitorPoint) -> EvalPoint:
    worse = {one.task for one in point.worse}
    scores = {task: (score.value, score.stderr, task in worse) for task, score in point.scores.items()}
    return EvalPoint(point.step, scores)


def _of_line(step: int, evaluation: _Evaluated) -> EvalPoint:
    """The benchmarks, each by its headline metric."""
    scores = {}
    for task, metrics in evaluation.tasks.items():
        score = metrics.get(headline(task, metrics), Metric())
        scores[task] = (score.value, score.stderr, False)
    return EvalPoint(step, scores)


def _worse(monitored: Sequence[_MonitorPoint], points: Mapping[int, EvalPoint]) -> list[Worse]:
    found: dict[str, Worse] = {}
    for point in monitored:
        for one in sorted(point.worse, key=lambda one: -(one.p or 0.0)):  # the surest one last
            before, now = (points[at].scores.get(one.task) if at in points else None for at in (one.than, point.step))
            found[one.task] = Worse(
                one.task, point.step, one.than, before[0] if before else None, now[0] if now else None, one.p
            )
    return list(found.values())


def _compared(result: TrainingResult, planned: Mapping[str, float]) -> list[Compared]:
    """What is predicted, and what the time of the steps says about it."""
    seconds = result.seconds.get("compute", 0.0) + result.seconds.get("data", 0.0) or None
    steps, per_step = result.steps, result.flops_per_step
    measured = {
        "step_seconds": seconds / steps if seconds and steps else None,
        "memory": result.memory.peak_bytes,
        "parameters": result.parameters.total,
        "seconds": seconds,
        "flops_per_second": per_step * steps / seconds if per_step and steps and seconds else None,
        "tokens_per_second": result.tokens_per_second,
        "mfu": result.mfu,
    }
    expected = {**result.predicted, **planned}
    rows = [Compared(name, expected.get(name), measured.get(name)) for name in dict.fromkeys((*expected, *measured))]
    return [row for row in rows if row.predicted is not None or row.measured is not None]
