"""The charts of a report: which facts go into which picture."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from affinage.report.charts import (
    HALF,
    WIDE,
    Axis,
    Figure,
    Interval,
    Key,
    Point,
    Row,
    Series,
    line_figure,
    row_chart,
    smoothed,
    thinned,
)
from affinage.report.evaluations import IN_CHAT, Evaluation, Score
from affinage.report.language import N_, Language
from affinage.report.trainings import Training

LOG_RANGE = 3.0  # a loss that falls by more than this factor is drawn on a logarithmic axis, to show its end
TITLES = {"pretrain": N_("Pretraining"), "sft": N_("Fine-tuning"), "dpo": N_("Preferences")}
MODELS = {"base": N_("base"), "sft": N_("fine-tuned"), "dpo": N_("preferences")}


def model_name(evaluation: Evaluation, t: Language) -> str:
    """What the page calls a model as it was evaluated."""
    return t(MODELS.get(evaluation.model, evaluation.model))


def metrics_of(evaluations: Iterable[Evaluation]) -> list[tuple[str, str]]:
    """All tasks with their metrics, in the order in which they were first seen."""
    tasks = [scores for one in evaluations for scores in one.by_task.values()]
    return list(dict.fromkeys((score.task, score.metric) for scores in tasks for score in scores.values()))


def loss_axis(series: Sequence[Series], training: str, t: Language) -> Axis:
    """The axis of the losses of a training: logarithmic where they fall far."""
    values = [y for one in series for _, y in one.points if y > 0]
    log = max(values, default=1.0) > LOG_RANGE * min(values, default=1.0)
    unit = t("nats per pair") if training == "dpo" else t("nats per token")
    return Axis(t("{unit}, logarithmic", unit=unit) if log else unit, "~g", log)


def _with_smoothed(raw: Sequence[Point], faint: str, line: str) -> list[Series]:
    """A curve smoothed, and as it was logged behind it; of one too short to be smoothed only that."""
    if (mean := smoothed(raw)) == list(raw):
        return [Series(faint, thinned(raw))]
    return [Series(faint, thinned(raw), 0, "faint"), Series(line, thinned(mean))]


def loss_figure(training: Training, t: Language) -> Figure | None:
    """Training loss, raw and smoothed, with the loss on each validation set."""
    raw = training.curves.get("loss", [])
    if not raw and not training.validation:
        return None
    series = _with_smoothed(raw, t("training, each logged step"), t("training"))
    for i, (name, points) in enumerate(training.validation.items(), 1):
        series.append(Series(t("validation: {name}", name=name), thinned(points, 60), i, "points"))
    y = loss_axis(series, training.name, t)
    return line_figure(t("Loss"), series, t("step"), y, t, marks=training.result.resumed_at)


def benchmark_figures(training: Training, t: Language) -> list[Figure]:
    """Benchmarks during a training, and bits per byte of each language, where there are at least two points."""
    scored = []
    for i, task in enumerate(dict.fromkeys(task for point in training.points for task in point.scores)):
        known = [
            (point, score) for point in training.points if (score := point.scores.get(task)) and score.value is not None
        ]
        points = [(point.step, score.value or 0.0) for point, score in known]
        ringed = [any(one.task == task for one in point.worse) for point, _ in known]
        scored.append(Series(task, points, i, "points", [score.stderr or 0.0 for _, score in known], ringed))
    bits = [Series(name, points, i, "points") for i, (name, points) in enumerate(training.bits_per_byte.items())]
    worse = t("Ringed: worse than at an earlier step, by more than chance (McNemar’s test).")
    shown = [
        (t("Benchmarks during training"), scored, Axis(t("score ± one standard error"), ".0%")),
        (t("Bits per byte"), bits, Axis(t("bits per byte of validation text"), "~g")),
    ]
    shown = [each for each in shown if any(len(one.points) > 1 for one in each[1])]
    wide = WIDE if len(shown) == 1 else HALF  # one alone stands under the loss step by step
    look: dict[str, Any] = {"wide": wide, "height": 240, "marks": training.result.resumed_at}
    figures = []
    for title, series, y in shown:
        note = worse if series is scored and training.regressions else ""
        figures.append(line_figure(title, series, t("step"), y, t, note=note, **look))
    return figures


def metric_figure(training: Training, metric: str, title: str, y: Axis, t: Language) -> Figure:
    """A curve of a training, smoothed; the learning rate as it is."""
    points = training.curves[metric]
    plain = metric == "learning_rate"
    series = [Series(title, thinned(points))] if plain else _with_smoothed(points, t("each logged step"), t("smoothed"))
    return line_figure(title, series, t("step"), y, t, wide=HALF, height=200, marks=training.result.resumed_at)


def score_figure(evaluations: Mapping[str, Evaluation], t: Language, title: str) -> Figure | None:
    """The headline metric of every task, models side by side; the base model's points are hollow beside others."""
    models = list(evaluations)
    tasks: dict[str, dict[str, Score]] = {}  # task -> model -> score
    for model, one in evaluations.items():
        for score in one.headlines:
            tasks.setdefault(score.task, {})[model] = score
    if not tasks:
        return None
    rows = []
    for task, scores in tasks.items():
        intervals = [Interval(one.value, one.stderr or 0.0, models.index(model)) for model, one in scores.items()]
        in_chat = [model for model, one in scores.items() if one.chat_template]
        some = f" ({IN_CHAT} {', '.join(in_chat)})" if in_chat else ""
        label = f"{task} {IN_CHAT}" if len(in_chat) == len(scores) else task + some
        rows.append(Row(label, intervals, next(iter(scores.values())).chance))
    hollow = len(models) > 1 and evaluations[models[0]].model == "base"
    legend = [Key(name, i, "hollow" if hollow and i == 0 else "points") for i, name in enumerate(models)]
    if any(row.chance is not None for row in rows):
        legend.append(Key(t("chance"), 0, "chance"))
    axis = Axis(t("score of the task’s headline metric"), ".0%")
    drawing = row_chart(rows, axis, t("Scores per task with standard errors"), t, hollow=hollow)
    note = t("† asked in the chat template: not comparable with scores asked without it.")
    return Figure(title, drawing, legend, note if any(IN_CHAT in row.label for row in rows) else "")


def compression_figure(evaluations: Mapping[str, Evaluation], t: Language) -> Figure:
    """Bits per byte of every model beside general compressors, per validation set."""
    bits: dict[str, dict[str, float]] = {}  # validation set -> who -> bits per byte
    for who, one in evaluations.items():
        for text, by in one.compression.items():
            bits.setdefault(text, {})[who if len(evaluations) > 1 else t("this model")] = by["model"]
    for one in evaluations.values():
        for text, by in one.compression.items():
            bits[text].update({who: value for who, value in by.items() if who != "model"})
    names = list(dict.fromkeys(name for values in bits.values() for name in values))
    rows = [
        Row(text, [Interval(value, 0.0, names.index(who), f"{t.decimal(value)}  {who}") for who, value in by.items()])
        for text, by in bits.items()
    ]
    title = t("Bits per byte by model and compressor")
    drawing = row_chart(rows, Axis(t("bits per byte of held-out text")), title, t, shares=False)
    return Figure(title, drawing, [Key(name, i, "points") for i, name in enumerate(names)])
