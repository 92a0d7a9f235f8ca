"""Charts as static SVG, drawn by Vega-Lite for a wide and for a narrow page.

Colors are placeholders that become the variables of the style sheet, which has values for light, dark and paper. Series
differ in shape and dash too, so that color is never the only difference.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from markupsafe import Markup, escape

WIDE, HALF, THIRD, NARROW = 920.0, 452.0, 296.0, 350.0  # the page's column and parts of it, and a phone's; pixels
COLORS = 6  # series beyond them repeat the first colors
LOG_RANGE = 3.0  # a loss that falls by more than this factor is drawn on a logarithmic axis, to show its end
POINTS = 500  # per series; more than a screen is wide shows nothing more
Point = tuple[float, float]
Spec = dict[str, Any]

_PLACEHOLDERS = {"ink": "#010101", "muted": "#010102", "grid": "#010103", "line": "#010104", "paper": "#010105"}
_PLACEHOLDERS |= {f"s{i}": f"#0102{i:02x}" for i in range(COLORS)}
_SHAPES = ("circle", "square", "triangle-up", "diamond")
_FRENCH = {"decimal": ",", "thousands": "\u202f", "grouping": [3], "currency": ["", ""], "percent": "\u202f%"}


@dataclass(frozen=True)
class Axis:
    """The label of an axis, with its unit. `form` is a number format of d3, such as "~s" or ".0%"."""

    label: str
    form: str = "~s"
    log: bool = False
    names: Sequence[str] = ()  # labels of 0, 1, 2, ... instead of numbers


@dataclass(frozen=True)
class Series:
    """One line or set of points of a chart.

    `style`: "faint" for raw values behind a line, "line", "points" for few values joined by a thin line, or "dots" for
    values that nothing joins. `errors` are half-lengths of vertical bars, one per point; `ringed` points stand out.
    """

    label: str
    points: Sequence[Point]
    color: int = 0
    style: Literal["faint", "line", "points", "dots"] = "line"
    errors: Sequence[float] = ()
    ringed: Sequence[bool] = ()


@dataclass(frozen=True)
class Interval:
    """A value with its standard error, of series `color`; `text` is what a bar chart writes at its end."""

    value: float
    error: float
    color: int
    text: str = ""


@dataclass(frozen=True)
class Row:
    """One line of an interval or bar chart. `chance` is the score of guessing, where it is known."""

    label: str
    intervals: Sequence[Interval]
    chance: float | None = None


def responsive(draw: Callable[[float], Markup], wide: float = WIDE) -> Markup:
    """The drawing twice, for wide and narrow pages; the style sheet shows one."""
    return Markup('<div class="wide">{}</div><div class="narrow">{}</div>').format(draw(wide), draw(NARROW))


def line_chart(
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    label: str,
    width: float,
    height: float,
    language: str,
    marks: Sequence[float] = (),
) -> Markup:
    """Lines over a common x axis.

    Args:
        series: drawn in order, later ones on top; values that a logarithmic axis cannot show are left out.
        x, y: labels and formats of the axes.
        label: what the picture shows, for screen readers.
        width, height: pixels at full size.
        language: "en" or "fr", for the numbers of the axes.
        marks: x positions of vertical dashed lines (steps at which the run was resumed).
    """
    rows = [[row for row in _rows(one, y.log) if _drawable(row, x, y)] for one in series]
    xs = [row["x"] for of_one in rows for row in of_one] or [1.0]
    low = min(xs) if x.log or min(xs) < 0 else 0.0
    domain = [low, max(xs)] if max(xs) > low else [low * 0.9, max(xs) * 1.1 or 1.0]
    pad = {"left": 58, "right": 14, "top": 26, "bottom": 42}
    inner = [width - pad["left"] - pad["right"], height - pad["top"] - pad["bottom"]]
    across = {"field": "x", "type": "quantitative", "scale": {"domain": domain, "nice": False, **_kind(x)}}
    across["axis"] = _axis(x, 8 if width > 600 else 4) | {"titleAnchor": "end", "grid": False}
    up = {"field": "y", "type": "quantitative", "scale": {"zero": False, **_kind(y)}}
    if y.log and (reach := [row[end] for of_one in rows for row in of_one for end in ("low", "high")]):
        up["scale"] = {"type": "log", "domain": [min(reach) * 0.95, max(reach) * 1.05], "nice": False}
    up["axis"] = _axis(y, 5 if height > 220 else 4) | {
        **{"titleAngle": 0, "titleAnchor": "start", "titleAlign": "left", "titleX": -pad["left"], "titleY": -16},
        **{"domain": False, "ticks": False},
    }
    layers: list[Spec] = [_layer([{"x": m} for m in marks], _rule("muted", dash=[2, 4]), x=across)] if marks else []
    for one, data in zip(series, rows, strict=True):
        if one.errors:
            layers.append(_layer(data, _rule(f"s{one.color % COLORS}", 2), x=across, y=up, y2={"field": "high"}))
            layers[-1]["encoding"]["y"] = up | {"field": "low"}
    for one, data in zip(series, rows, strict=True):
        layers += [_layer(data, mark, x=across, y=up) for mark in _marks(one, len(data))]
        if ringed := [row for row in data if row["ringed"]]:
            layers.append(_layer(ringed, _mark("point", one.color, size=200, filled=False), x=across, y=up))
    layers = layers or [_layer([{"x": 0.0, "y": 0.0}], _mark("point", 0, opacity=0), x=across, y=up)]
    frame: Spec = {"x": domain, "px": [pad["left"], width - pad["right"]], "py": [pad["top"], height - pad["bottom"]]}
    return _svg(layers, inner, pad, label, language, {"data-frame": json.dumps(frame | {"log": x.log})})


def _rows(series: Series, log: bool) -> list[Spec]:
    errors = series.errors or [0.0] * len(series.points)
    ringed = series.ringed or [False] * len(series.points)
    rows = []
    for (px, py), error, ring in zip(series.points, errors, ringed, strict=True):
        low = py - error if py - error > 0 or not log else py  # a logarithmic axis has no place for the rest
        rows.append({"x": px, "y": py, "low": low, "high": py + error, "ringed": ring})
    return rows


def _drawable(row: Mapping[str, float], x: Axis, y: Axis) -> bool:
    """Whether both coordinates are finite, and positive where the axis is logarithmic."""
    return all(math.isfinite(row[n]) and (row[n] > 0 or not axis.log) for n, axis in (("x", x), ("y", y)))


def _kind(axis: Axis) -> Spec:
    return {"type": "log"} if axis.log else {}


def _marks(series: Series, count: int) -> list[Spec]:
    """The Vega-Lite marks of a series of `count` points."""
    joined: dict[str, Spec] = {
        "faint": {"strokeWidth": 1, "opacity": 0.42},
        "line": {"strokeWidth": 2},
        "points": {"strokeWidth": 1, "strokeDash": [4, 3]},
    }
    marks = []
    if count > 1 and series.style in joined:
        marks.append(_mark("line", series.color, **joined[series.style]))
    if count == 1 or series.style in ("points", "dots"):
        marks.append(_mark("point", series.color, size=80 if count <= 40 else 24))
    return marks


def _mark(kind: str, color: int, **settings: Any) -> Spec:
    name = _PLACEHOLDERS[f"s{color % COLORS}"]
    if kind != "point":
        return {"type": kind, "stroke": name, **settings}
    filled = settings.pop("filled", True)
    fill, stroke = (name, _PLACEHOLDERS["paper"]) if filled else ("transparent", name)
    point = {"type": kind, "shape": _SHAPES[color % 4], "fill": fill, "stroke": stroke, "strokeWidth": 1.3}
    return point | {"opacity": 1} | settings


def _rule(color: str, thick: float = 1.0, dash: Sequence[int] = ()) -> Spec:
    dashed = {"strokeDash": list(dash)} if dash else {}
    return {"type": "rule", "stroke": _PLACEHOLDERS[color], "strokeWidth": thick, **dashed}


def _axis(axis: Axis, ticks: int) -> Spec:
    made: Spec = {"title": axis.label or None, "format": axis.form, "tickCount": ticks, "labelOverlap": True}
    if axis.names:
        written = json.dumps(list(axis.names))
        made |= {"labelExpr": f"{written}[datum.value] || ''", "values": list(range(len(axis.names)))}
    return made


def _layer(data: Sequence[Spec], mark: Spec, **encoding: Spec) -> Spec:
    return {"data": {"values": list(data)}, "mark": {"clip": False, **mark}, "encoding": encoding}


def interval_chart(
    rows: Sequence[Row], x: Axis, label: str, width: float, language: str, *, low: float = 0.0, hollow: bool = True
) -> Markup:
    """One row per task: values as points with bars of one standard error, chance as a dashed tick.

    The intervals of a row stand under each other, so that their bars can be compared; those of the first color are
    hollow if `hollow`. The axis goes from `low` to 1. On narrow pages labels stand above their rows.
    """
    beside = width > 600
    most = max((len(row.intervals) for row in rows), default=0)
    pitch = (24 if beside else 40) + 11 * max(1, most)
    pad = {"left": _label_width(rows) if beside else 10, "right": 20, "top": 8 if beside else 4, "bottom": 42}
    height = float(pitch * len(rows))
    across = {"type": "quantitative", "scale": {"domain": [low, 1], "nice": False}}
    across["axis"] = _axis(x, 5) | {"titleAnchor": "end", "domain": False, "ticks": False}
    up = {"field": "y", "type": "quantitative", "axis": None, "scale": {"domain": [height, 0], "nice": False}}
    points: dict[int, list[Spec]] = {}
    names, guesses = [], []
    for number, row in enumerate(rows):
        top = pitch * number + (0 if beside else 18)
        middle = top + (pitch - (0 if beside else 18)) / 2
        names.append({"x": low, "y": middle if beside else pitch * number + 8, "text": _fitting(row.label)})
        if row.chance is not None:
            guesses.append({"x": row.chance, "y": middle - 5.5 * most - 2, "y2": middle + 5.5 * most + 2})
        for place, one in enumerate(row.intervals):
            at = middle + 11 * (place - (len(row.intervals) - 1) / 2)
            ends = [min(1.0, max(low, one.value + sign * one.error)) for sign in (-1, 1)]
            points.setdefault(one.color, []).append({"x": one.value, "low": ends[0], "high": ends[1], "y": at})
    of_x = across | {"field": "x"}
    layers = [_layer(guesses, _rule("ink", 1.5, [3, 3]), x=of_x, y=up, y2={"field": "y2"})] if guesses else []
    for color, data in sorted(points.items()):
        bar = _layer(data, _rule(f"s{color % COLORS}", 2), x=across | {"field": "low"}, x2={"field": "high"}, y=up)
        filled = not (hollow and color == 0)
        layers += [bar, _layer(data, _mark("point", color, size=90, filled=filled), x=of_x, y=up)]
        if not filled:  # a hollow point hides the bar behind it
            layers[-1]["mark"]["fill"] = _PLACEHOLDERS["paper"]
    layers.append(_texts(names, of_x, up, "right" if beside else "left"))
    return _svg(layers, [_inner(width, pad), height], pad, label, language)


def bar_chart(rows: Sequence[Row], label: str, x_label: str, width: float, language: str) -> Markup:
    """Groups of horizontal bars from zero, each with its text at its end.

    A line of one standard error each way crosses the end of a bar that has one.
    """
    beside = width > 600
    pad = {"left": _label_width(rows) if beside else 2, "right": 110, "top": 4, "bottom": 22}
    bars: list[Spec] = []
    names: list[Spec] = []
    at = 0.0
    for row in rows:
        if not beside:
            names.append({"x": 0.0, "y": at + 8, "text": _fitting(row.label)})
            at += 20
        else:
            names.append({"x": 0.0, "y": at + 8 * len(row.intervals), "text": _fitting(row.label)})
        for one in row.intervals:
            ends = {"low": max(0.0, one.value - one.error), "high": one.value + one.error}
            color = _PLACEHOLDERS[f"s{one.color % COLORS}"]
            place = {"x": one.value, "y": at + 2, "y2": at + 14, "mid": at + 8}
            bars.append(place | ends | {"text": one.text, "color": color})
            at += 16
        at += 12
    most = max((bar["high"] for bar in bars), default=1.0) or 1.0
    across = {"field": "x", "type": "quantitative", "scale": {"domain": [0, most], "nice": False}}
    across["axis"] = {"title": x_label or None, "labels": False, "ticks": False, "titleAnchor": "start", "grid": False}
    up = {"field": "y", "type": "quantitative", "axis": None, "scale": {"domain": [at, 0], "nice": False}}
    middle = up | {"field": "mid"}
    fill = {"field": "color", "type": "nominal", "scale": None, "legend": None}
    spread = [bar for bar in bars if bar["low"] < bar["high"]]
    layers = [
        _layer(bars, {"type": "rect"}, x=across, x2={"datum": 0}, y=up, y2={"field": "y2"}, fill=fill),
        _layer(spread, _rule("ink", 1.5), x=across | {"field": "low"}, x2={"field": "high"}, y=middle),
        _texts(bars, across | {"field": "high"}, middle, "left", 7),
        _texts(names, across, up, "right" if beside else "left"),
    ]
    return _svg(layers, [_inner(width, pad), at], pad, label, language)


def _texts(data: Sequence[Spec], x: Spec, y: Spec, align: str, dx: float | None = None) -> Spec:
    shift = {"right": -12.0, "left": 0.0}[align] if dx is None else dx
    mark = {"type": "text", "align": align, "baseline": "middle", "dx": shift, "fontSize": 13}
    return _layer(data, mark | {"fill": _PLACEHOLDERS["ink"]}, x=x, y=y, text={"field": "text", "type": "nominal"})


def _inner(width: float, pad: Mapping[str, float]) -> float:
    return width - pad["left"] - pad["right"]


def _label_width(rows: Sequence[Row]) -> float:
    return 24.0 + 7.0 * max((len(_fitting(row.label)) for row in rows), default=0)


def _fitting(label: str, room: int = 42) -> str:
    """A label cut in its middle, so that its beginning and its end still tell rows apart."""
    return label if len(label) <= room else f"{label[: room // 2]}…{label[-(room // 2 - 1) :]}"


def _svg(
    layers: Sequence[Spec],
    inner: Sequence[float],
    pad: Mapping[str, float],
    label: str,
    language: str,
    attributes: Mapping[str, str] | None = None,
) -> Markup:
    """Renders layers to an SVG element that scales to its place, with a text for those who do not see it."""
    import vl_convert  # loads a JavaScript engine

    colors = {"label": "muted", "title": "muted", "grid": "grid", "domain": "line", "tick": "line"}
    axis = {f"{part}Color": _PLACEHOLDERS[color] for part, color in colors.items()}
    sizes = {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"}
    spec = {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        **{"width": inner[0], "height": inner[1], "padding": dict(pad), "autosize": "none", "background": None},
        "layer": list(layers),
        "config": {"aria": False, "view": {"stroke": None}, "axis": axis | sizes},
    }
    drawn = vl_convert.vegalite_to_svg(spec, format_locale=_FRENCH if language == "fr" else None)
    for name, color in _PLACEHOLDERS.items():
        drawn = drawn.replace(color, f"var(--{name})")
    width, height = inner[0] + pad["left"] + pad["right"], inner[1] + pad["top"] + pad["bottom"]
    more = "".join(f' {name}="{escape(value)}"' for name, value in (attributes or {}).items())
    head = f'<svg class="chart" role="img" aria-label="{escape(label)}" viewBox="0 0 {width:g} {height:g}"{more}>'
    return Markup(re.sub(r"^<svg[^>]*>", lambda _: head, re.sub(r'font-family="[^"]*"', "", drawn), count=1))  # noqa: S704


def thinned(points: Sequence[Point], limit: int = POINTS) -> list[Point]:
    """At most `limit` (4 or more) of the points: the ends, and of each stretch between the lowest and the highest."""
    if len(points) <= limit:
        return list(points)
    stretches = (limit - 2) // 2
    inner = points[1:-1]
    kept = [points[0]]
    for i in range(stretches):
        stretch = inner[i * len(inner) // stretches : (i + 1) * len(inner) // stretches]
        low = min(range(len(stretch)), key=lambda j: stretch[j][1])
        high = max(range(len(stretch)), key=lambda j: stretch[j][1])
        kept += [stretch[j] for j in sorted({low, high})]
    return [*kept, points[-1]]


def smoothed(points: Sequence[Point], span: float = 0.04) -> list[Point]:
    """A straight line fitted to the window around every point, `span` of the series wide (Savitzky and Golay, 1964).

    Unlike a running average it neither lags behind a falling loss nor flattens the ends, where the window stays whole.
    """
    count = len(points)
    half = int(span * count / 2)
    if half < 1:
        return list(points)
    x, y = (np.array(axis, dtype=np.float64) for axis in zip(*points, strict=True))
    center = np.arange(count)
    first = np.clip(center - half, 0, count - 2 * half - 1)
    last = first + 2 * half + 1

    def window_mean(values: np.ndarray) -> np.ndarray:
        total = np.concatenate([[0.0], np.cumsum(values)])
        return (total[last] - total[first]) / (last - first)

    place = (center - count / 2) / count
    mean_place, mean_y = window_mean(place), window_mean(y)
    slope = (window_mean(place * y) - mean_place * mean_y) / (window_mean(place * place) - mean_place**2)
    return list(zip(x.tolist(), (mean_y + slope * (place - mean_place)).tolist(), strict=True))
