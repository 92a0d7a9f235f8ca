"""The charts of a report: which facts go into which picture."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from markupsafe import Markup

from affinage.report.charts import (
    COLORS,
    HALF,
    LOG_RANGE,
    THIRD,
    WIDE,
    Axis,
    Interval,
    Point,
    Row,
    Series,
    line_chart,
    row_chart,
    smoothed,
    thinned,
)
from affinage.report.evaluations import IN_CHAT, Evaluation, marked
from affinage.report.language import N_, Language
from affinage.report.trainings import Training

MODELS = {"base": N_("base"), "sft": N_("fine-tuned"), "dpo": N_("preferences")}
LOSS_AXES = {  # by what a loss is of
    "token": (N_("nats per token"), N_("nats per token, logarithmic")),
    "pair": (N_("nats per pair"), N_("nats per pair, logarithmic")),
}
METRICS = {  # the small charts beside the loss: title, axis, number format
    "learning_rate": (N_("Learning rate"), N_("per update"), "~g"),
    "tokens_per_second": (N_("Throughput"), N_("tokens per second"), "~s"),
    "grad_norm": (N_("Gradient norm"), N_("global L2 norm before clipping"), "~s"),
    "mfu": (N_("Model FLOPs utilization"), N_("share of the peak"), "~%"),
    "expert_load_max": (N_("Fullest expert"), N_("its load over the even share"), "~s"),
    "dropped_share": (N_("Dropped choices"), N_("share of the choices of experts"), "~%"),
}


class Key(NamedTuple):
    """One entry of a legend."""

    label: str
    color: int
    style: str  # faint, line, points, dots, hollow, bar or chance


@dataclass(frozen=True)
class Figure:
    """A picture with its title, its legend, and the values a reader can point at (JSON, "" for none)."""

    title: str
    drawing: Markup
    legend: tuple[Key, ...] = ()
    note: str = ""
    values: str = ""


def model_name(evaluation: Evaluation, t: Language) -> str:
    """What the page calls a model as it was evaluated."""
    name = t(MODELS[evaluation.model]) if evaluation.model in MODELS else evaluation.model
    return name if evaluation.step is None else t("{name}, step {step}", name=name, step=t.count(evaluation.step))


def by_name(evaluations: Sequence[Evaluation], t: Language) -> dict[str, Evaluation]:
    """The evaluations by the names of their models."""
    return {model_name(one, t): one for one in evaluations}


def metrics_of(evaluations: Iterable[Evaluation]) -> list[tuple[str, str]]:
    """All tasks with their metrics, in the order in which they were first seen."""
    return list(dict.fromkeys((score.task, score.metric) for one in evaluations for score in one.scores))


def loss_figure(training: Training, t: Language) -> Figure | None:
    """Training loss, raw and smoothed, with the loss on each validation set."""
    raw = training.curves.get("loss", [])
    if not raw and not training.validation:
        return None
    series = _with_smoothed(raw, t("training, each logged step"), t("training"))
    for i, (name, points) in enumerate(training.validation.items(), 1):
        series.append(Series(t("validation: {name}", name=name), thinned(points, 60), i, "points"))
    label = t("Loss against steps: training, smoothed and raw, and validation sets")
    y = loss_axis(series, training.loss_unit, t)
    return _curves(t("Loss"), series, y, t, label=label, marks=training.result.resumed_at)


def loss_axis(series: Sequence[Series], unit: str, t: Language) -> Axis:
    """The axis of losses: logarithmic where they fall far."""
    values = [y for one in series for _, y in one.points if y > 0]
    log = max(values, default=1.0) > LOG_RANGE * min(values, default=1.0)
    return Axis(t(LOSS_AXES[unit][log]), "~g", log)


def benchmark_figures(training: Training, t: Language) -> list[Figure]:
    """Benchmarks during a training, and bits per byte of each language, where there are at least two points."""
    scored = []
    for i, task in enumerate(dict.fromkeys(task for point in training.points for task in point.scores)):
        points, errors, ringed = [], [], []
        for point in training.points:
            score = point.scores.get(task)
            if score is not None and score.value is not None:
                points.append((float(point.step), score.value))
                errors.append(score.stderr or 0.0)
                ringed.append(any(one.task == task for one in point.worse))
        scored.append(Series(task, points, i % COLORS, "points", errors, ringed))
    bits = [Series(name, points, i, "points") for i, (name, points) in enumerate(training.bits_per_byte.items())]
    y, title = Axis(t("score ± one standard error"), ".0%"), t("Benchmarks during training")
    note = (
        t("Ringed: worse than at an earlier step, by more than chance (McNemar’s test).")
        if training.regressions
        else ""
    )
    groups = [scored[first : first + COLORS] for first in range(0, len(scored), COLORS)]
    drawn = [(f"{title} ({i})" if len(groups) > 1 else title, group, y, note) for i, group in enumerate(groups, 1)]
    drawn.append((t("Bits per byte"), bits, Axis(t("bits per byte of validation text"), "~g"), ""))
    drawn = [each for each in drawn if any(len(one.points) > 1 for one in each[1])]
    wide = WIDE if len(drawn) == 1 else HALF  # one alone stands under the loss step by step
    marks = training.result.resumed_at
    figures = []
    for title, series, axis, note in drawn:
        figure = _curves(title, series, axis, t, wide=wide, height=240, marks=marks)
        figures.append(replace(figure, note=note or figure.note))
    return figures


def metric_figures(training: Training, t: Language) -> list[Figure]:
    """Learning rate, throughput, gradient norm and the others of `METRICS`, where they were logged."""
    shown = [metric for metric in METRICS if training.curves.get(metric)]
    if not any(share for _, share in training.curves.get("dropped_share", ())):
        shown = [metric for metric in shown if metric != "dropped_share"]
    figures = []
    for metric in shown:
        title, y, form = METRICS[metric]
        points = training.curves[metric]
        series = _with_smoothed(points, t("each logged step"), t("smoothed"))
        if metric == "learning_rate":
            series = [Series(t(title), thinned(points))]
        wide, marks = THIRD if len(shown) == 3 else HALF, training.result.resumed_at
        figures.append(_curves(t(title), series, Axis(t(y), form), t, wide=wide, height=200, marks=marks))
    return figures


def _with_smoothed(raw: Sequence[Point], faint: str, line: str) -> list[Series]:
    """A curve smoothed, and as it was logged behind it; of one too short to be smoothed only that."""
    mean = smoothed(raw)
    if mean == list(raw):
        return [Series(faint, thinned(raw))]
    return [Series(faint, thinned(raw), 0, "faint"), Series(line, thinned(mean))]


def _curves(
    title: str,
    series: Sequence[Series],
    y: Axis,
    t: Language,
    *,
    label: str = "",
    wide: int = WIDE,
    height: int = 340,
    marks: Sequence[int] = (),
) -> Figure:
    x = Axis(t("step"))
    drawing = line_chart(series, x, y, label or title, t.code, wide=wide, height=height, marks=marks)
    note = (
        t("Resumed at step {steps}, marked by dashed lines.", steps=t.listed(marks)) if marks and wide == WIDE else ""
    )
    legend = keys_of(series) if len(series) > 1 or series[0].label != title else ()
    return Figure(title, drawing, legend, note, values_of(x.label, series))


def keys_of(series: Sequence[Series]) -> tuple[Key, ...]:
    """The legend of a line chart."""
    return tuple(Key(one.label, one.color, one.style) for one in series)


def values_of(x_label: str, series: Sequence[Series]) -> str:
    """What a reader can point at, as JSON."""
    listed = [
        {"label": one.label, "color": one.color, "points": [[x, float(f"{y:.5g}")] for x, y in one.points]}
        for one in series
        if one.style != "faint"
    ]
    return json.dumps({"x": x_label, "series": listed}, separators=(",", ":"), ensure_ascii=False)


def score_figure(evaluations: Mapping[str, Evaluation], t: Language, title: str) -> Figure | None:
    """The headline metric of every task, models side by side; the base model's points are hollow beside others."""
    models, rows = list(evaluations), []
    for task in dict.fromkeys(score.task for one in evaluations.values() for score in one.headlines):
        found = [(m, s) for m, one in evaluations.items() for s in one.headlines if s.task == task]
        intervals = [Interval(score.value, score.stderr or 0.0, models.index(model)) for model, score in found]
        chance = next((score.chance for _, score in found if score.chance is not None), None)
        in_chat = [model for model, score in found if score.chat_template]
        of_some = f"{task} ({IN_CHAT} {', '.join(in_chat)})"
        rows.append(Row(of_some if 0 < len(in_chat) < len(found) else marked(task, bool(in_chat)), intervals, chance))
    if not rows:
        return None
    hollow = len(models) > 1 and evaluations[models[0]].model == "base"
    legend = [Key(name, i, "hollow" if hollow and i == 0 else "points") for i, name in enumerate(models)]
    if any(row.chance is not None for row in rows):
        legend.append(Key(t("chance"), 0, "chance"))
    axis, label = Axis(t("score of the task’s headline metric"), ".0%"), t("Scores per task with standard errors")
    note = in_chat_note(t) if any(IN_CHAT in row.label for row in rows) else ""
    return Figure(title, row_chart(rows, axis, label, t.code, hollow=hollow), tuple(legend), note)


def in_chat_note(t: Language) -> str:
    """What the mark of scores with the chat template means."""
    return t("† asked in the chat template: not comparable with scores asked without it.")


def compression_figure(evaluations: Sequence[Evaluation], t: Language) -> Figure:
    """Bits per byte of every model beside general compressors, per validation set."""
    bits: dict[str, dict[str, float]] = {}  # validation set -> who -> bits per byte
    judged = [evaluation for evaluation in evaluations if evaluation.compression]
    for one in judged:
        name = model_name(one, t) if len(judged) > 1 else t("this model")
        for text, by in one.compression.items():
            bits.setdefault(text, {})[name] = by["model"]
    for one in judged:
        for text, by in one.compression.items():
            bits[text].update({who: value for who, value in by.items() if who != "model"})
    names = list(dict.fromkeys(name for values in bits.values() for name in values))
    rows = [
        Row(text, [Interval(value, 0.0, names.index(who), f"{t.decimal(value)}  {who}") for who, value in by.items()])
        for text, by in bits.items()
    ]
    label = t("Bits per byte by model and compressor")
    drawing = row_chart(rows, Axis(t("bits per byte of held-out text")), label, t.code, bars=True)
    return Figure(label, drawing, tuple(Key(name, i, "bar") for i, name in enumerate(names)))
