"""The charts of a page: which facts go into which picture; and static SVG, by Vega-Lite for wide and narrow pages.

Colors are the variables of the style sheet, which has values for light, dark and paper. Series differ in shape and dash
too, so that color is never the only difference.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jinja2
import numpy as np
from markupsafe import Markup

from affinage.report.facts import Evaluation, Point, Training
from affinage.report.language import N_, Language
from affinage.results import Score

WIDE, HALF, NARROW = 920, 452, 350  # the page's column and parts of it, and a phone's; pixels
COLORS = 6  # series beyond them repeat the first colors
Spec = dict[str, Any]
LOG_RANGE = 3.0  # a loss that falls by more than this factor is drawn on a logarithmic axis, to show its end
TITLES = {"pretrain": N_("Pretraining"), "sft": N_("Fine-tuning"), "dpo": N_("Preferences")}
MODELS = {"base": N_("base"), "sft": N_("fine-tuned"), "dpo": N_("preferences")}
IN_CHAT = "†"  # marks scores with the chat template
_SHAPES = ("circle", "square", "triangle-up", "diamond")


class Axis(NamedTuple):
    """The label of an axis, with its unit. `form` is a number format of d3, such as "~s" or ".0%"."""

    label: str
    form: str = "~s"
    log: bool = False


class Series(NamedTuple):
    """One line or set of points of a chart, or, without points, an entry of a legend.

    `style`: "faint" for raw values behind a line, "line", "points" for few values joined by a thin line, or "chance"
    for what guessing gets. `errors` are half-lengths of vertical bars, one per point; `ringed` points stand out.
    """

    label: str
    points: Sequence[Point] = ()
    color: int = 0
    style: Literal["faint", "line", "points", "chance"] = "line"
    errors: Sequence[float] = ()
    ringed: Sequence[bool] = ()


class Bar(NamedTuple):
    """A share in a row of a chart, with its standard error; `row` is the label of the row."""

    row: str
    value: float
    error: float
    color: int


class Figure(NamedTuple):
    """A picture with its title, its legend, and the values a reader can point at (JSON, "" for none)."""

    title: str
    drawing: Markup
    legend: Sequence[Series] = ()
    note: str = ""
    values: str = ""


def line_figure(
    title: str, series: Sequence[Series], x: str, y: Axis, t: Language, *, wide: int = WIDE, marks: Sequence[int] = ()
) -> Figure:
    """Lines over a common x axis, later ones on top; values that a logarithmic axis cannot show are left out.

    `wide` is pixels on a wide page, `marks` the steps at which the run was resumed.
    """
    rows = []
    for number, one in enumerate(series):
        with_points = one.style == "points" or len(one.points) == 1
        look = _look(one.color) | {"style": one.style, "series": number}
        look["size"] = (80 if len(one.points) <= 40 else 24) if with_points else 0
        errors, ringed = one.errors or [0.0] * len(one.points), one.ringed or [False] * len(one.points)
        for (at, value), error, ring in zip(one.points, errors, ringed, strict=True):
            if math.isfinite(at) and math.isfinite(value) and (value > 0 or not y.log):
                low = value - error if value > error or not y.log else value  # a logarithmic axis has no place for it
                rows.append(look | {"x": at, "y": value, "low": low, "high": value + error, "ringed": ring})
    xs, ends = [row["x"] for row in rows] or [1.0], [row[end] for row in rows for end in ("low", "high")]
    low = min(0.0, *xs)
    domain = [low, max(xs)] if max(xs) > low else [0.0, 1.0]
    scale: Spec = {"type": "log", "nice": False} if y.log else {"zero": False}
    scale |= {"domain": [min(ends) * 0.95, max(ends) * 1.05]} if y.log and ends else {}
    spec = {
        "rows": rows,
        "marks": [{"x": mark} for mark in marks],
        "height": 340 if wide == WIDE else 220,
        "x": x,
        "y_axis": y,
    }
    drawing = _drawn("line", wide, title, t, domain=domain, y_scale=scale, **spec)
    note = ""
    if any(any(one.ringed) for one in series):
        note = t("Ringed: worse than at an earlier step, by more than chance (McNemar’s test).")
    elif marks and wide == WIDE:
        note = t("Resumed at step {steps}, marked by dashed lines.", steps=t.listed(marks))
    values = [
        {"label": one.label, "points": [[at, float(f"{value:.5g}")] for at, value in one.points]}
        for one in series
        if one.style != "faint"
    ]
    packed = json.dumps({"x": x, "domain": domain, "series": values}, separators=(",", ":"), ensure_ascii=False)
    return Figure(title, drawing, series if len(series) > 1 or series[0].label != title else (), note, packed)


def row_chart(bars: Sequence[Bar], guesses: Mapping[str, float], x: Axis, label: str, t: Language) -> Markup:
    """One row per label, on an axis from 0 to 1: values under each other, with lines of one standard error each way.

    `guesses` are what guessing gets, by row. On a narrow page labels stand above their rows.
    """
    values: list[Spec] = []
    counts: Counter[str] = Counter()
    for one in bars:
        ends = {"low": max(0.0, one.value - one.error), "high": min(1.0, one.value + one.error)}
        values.append({"row": one.row, "place": str(counts[one.row]), "value": one.value} | ends | _look(one.color))
        counts[one.row] += 1
    marks = [{"row": row, "value": value} for row, value in guesses.items()]
    group = 12 * max(counts.values(), default=1)  # pixels
    return _drawn("rows", WIDE, label, t, values=values, guesses=marks, group=group, x_axis=x)


def _look(color: int) -> Spec:
    return {"color": f"var(--s{color % COLORS})", "shape": _SHAPES[color % len(_SHAPES)]}


def _drawn(template: str, wide: int, label: str, t: Language, **values: Any) -> Markup:
    """The drawing for a wide and for a narrow page, of which the style sheet shows one, as SVG that scales."""
    import vl_convert  # loads a JavaScript engine

    loader = jinja2.PackageLoader("affinage.report", "templates/charts")
    templates = jinja2.Environment(loader=loader, autoescape=False)  # noqa: S701 - of JSON
    shared = json.loads(templates.get_template("shared.json.j2").render())
    head, drawings = Markup('<svg class="chart" role="img" aria-label="{}" ').format(label), []
    for width in (wide, NARROW):
        spec = json.loads(templates.get_template(f"{template}.json.j2").render(values | {"width": width, "wide": wide}))
        drawn = vl_convert.vegalite_to_svg(shared | spec, format_locale="fr-FR" if t.code == "fr" else None)
        body = re.sub(r'font-family="[^"]*"', "", drawn[drawn.index("viewBox=") :])
        drawings.append(head + Markup(body))  # noqa: S704 - Vega escapes the texts
    return Markup('<div class="wide">{}</div><div class="narrow">{}</div>').format(*drawings)


def thinned(points: Sequence[Point], limit: int = 500) -> list[Point]:
    """At most `limit` (4 or more) of the points, as on a screen: the ends, and the extremes of each stretch between."""
    if len(points) <= limit:
        return list(points)
    kept = {0, len(points) - 1}
    for stretch in np.array_split(np.arange(1, len(points) - 1), (limit - 2) // 2):
        values = [points[at][1] for at in stretch]
        kept |= {int(stretch[np.argmin(values)]), int(stretch[np.argmax(values)])}
    return [points[at] for at in sorted(kept)]


def smoothed(points: Sequence[Point], span: float = 0.04) -> list[Point]:
    """A straight line fitted to the window around every point, `span` of the series wide (Savitzky and Golay, 1964).

    Unlike a running average it neither lags behind a falling loss nor flattens the ends, where the window stays whole.
    """
    from scipy.signal import savgol_filter

    half = int(span * len(points) / 2)
    if half < 1:
        return list(points)
    x, y = (np.array(axis, dtype=np.float64) for axis in zip(*points, strict=True))
    return list(zip(x.tolist(), savgol_filter(y, 2 * half + 1, 1).tolist(), strict=True))


# ---- which facts go into which picture ----


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


def benchmark_figure(training: Training, t: Language) -> Figure | None:
    """Benchmarks during a training, where there are at least two points."""
    scored = []
    for i, task in enumerate(dict.fromkeys(task for point in training.points for task in point.scores)):
        known = [
            (point, score) for point in training.points if (score := point.scores.get(task)) and score.value is not None
        ]
        points = [(point.step, score.value or 0.0) for point, score in known]
        ringed = [any(one.get("task") == task for one in point.worse) for point, _ in known]
        scored.append(Series(task, points, i, "points", [score.stderr or 0.0 for _, score in known], ringed))
    if not any(len(one.points) > 1 for one in scored):
        return None
    y = Axis(t("score ± one standard error"), ".0%")
    return line_figure(t("Benchmarks during training"), scored, t("step"), y, t, marks=training.result.resumed_at)


def metric_figure(training: Training, metric: str, title: str, y: Axis, t: Language) -> Figure:
    """A curve of a training, smoothed; the learning rate as it is."""
    points = training.curves[metric]
    plain = metric == "learning_rate"
    series = [Series(title, thinned(points))] if plain else _with_smoothed(points, t("each logged step"), t("smoothed"))
    return line_figure(title, series, t("step"), y, t, wide=HALF, marks=training.result.resumed_at)


def score_figure(evaluations: Mapping[str, Evaluation], t: Language, title: str) -> Figure | None:
    """The headline metric of every task, models side by side."""
    models = list(evaluations)
    tasks: dict[str, dict[str, Score]] = {}  # task -> model -> score
    for model, one in evaluations.items():
        for score in one.headlines:
            tasks.setdefault(score.task, {})[model] = score
    if not tasks:
        return None
    bars, guesses = [], {}
    for task, scores in tasks.items():
        in_chat = [model for model, one in scores.items() if one.chat_template]
        label = f"{task} {IN_CHAT} {', '.join(in_chat)}" if in_chat else task
        bars += [Bar(label, one.value, one.stderr or 0.0, models.index(model)) for model, one in scores.items()]
        if (chance := next(iter(scores.values())).chance) is not None:
            guesses[label] = chance
    legend = [Series(name, (), i, "points") for i, name in enumerate(models)]
    legend += [Series(t("chance"), style="chance")] if guesses else []
    axis = Axis(t("score of the task’s headline metric"), ".0%")
    drawing = row_chart(bars, guesses, axis, t("Scores per task with standard errors"), t)
    note = t("† asked in the chat template: not comparable with scores asked without it.")
    return Figure(title, drawing, legend, note if any(IN_CHAT in one.row for one in bars) else "")
