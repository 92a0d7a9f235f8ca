"""Charts as static SVG, drawn by Vega-Lite twice: for a wide and for a narrow page.

Colors are the variables of the style sheet, which has values for light, dark and paper. Series differ in shape and dash
too, so that color is never the only difference.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from markupsafe import Markup, escape

WIDE, HALF, THIRD, NARROW = 920, 452, 296, 350  # the page's column and parts of it, and a phone's; pixels
COLORS = 6  # series beyond them repeat the first colors
LOG_RANGE = 3.0  # a loss that falls by more than this factor is drawn on a logarithmic axis, to show its end
POINTS = 500  # per series; more than a screen is wide shows nothing more
Point = tuple[float, float]
Spec = dict[str, Any]

_SHAPES = ("circle", "square", "triangle-up", "diamond")
_LINES: dict[str, Spec] = {
    "faint": {"strokeWidth": 1, "opacity": 0.42},
    "line": {"strokeWidth": 2},
    "points": {"strokeWidth": 1, "strokeDash": [4, 3]},
}


@dataclass(frozen=True)
class Axis:
    """The label of an axis, with its unit. `form` is a number format of d3, such as "~s" or ".0%"."""

    label: str
    form: str = "~s"
    log: bool = False


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


def line_chart(
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    label: str,
    language: str,
    *,
    wide: int = WIDE,
    height: int = 340,
    marks: Sequence[float] = (),
) -> Markup:
    """Lines over a common x axis; values that a logarithmic axis cannot show are left out.

    Args:
        series: drawn in order, later ones on top.
        x, y: labels and formats of the axes.
        label: what the picture shows, for screen readers.
        language: "en" or "fr", for the numbers of the axes.
        wide, height: pixels on a wide page.
        marks: x positions of vertical dashed lines (steps at which the run was resumed).
    """
    rows = [_points(one, x, y) for one in series]
    every = [row for of_one in rows for row in of_one]
    xs = [row["x"] for row in every] or [1.0]
    low = min(xs) if x.log or min(xs) < 0 else 0.0
    domain = [low, max(xs)] if max(xs) > low else [low * 0.9, max(xs) * 1.1 or 1.0]
    across: Spec = {"field": "x", "type": "quantitative", "scale": {"domain": domain, "nice": False, **_kind(x)}}
    up: Spec = {"field": "y", "type": "quantitative", "scale": {"zero": False, **_kind(y)}}
    if y.log and every:
        ends = [row[end] for row in every for end in ("low", "high")]
        up["scale"] |= {"domain": [min(ends) * 0.95, max(ends) * 1.05], "nice": False}
    up["axis"] = {"title": None, "format": y.form, "domain": False, "ticks": False, "labelOverlap": True}
    color: Spec = {"field": "color", "type": "nominal", "scale": None, "legend": None}

    def layers(ticks: int) -> list[Spec]:
        axis = {"title": x.label, "titleAnchor": "end", "format": x.form, "tickCount": ticks, "grid": False}
        places = {"x": across | {"axis": axis | {"labelOverlap": True}}, "y": up}
        drawn = [_layer([{"x": mark} for mark in marks], _rule("muted", strokeDash=[2, 4]), x=places["x"])]
        errors = [row for one, of_one in zip(series, rows) if one.errors for row in of_one]
        ends = {"y": up | {"field": "low"}, "y2": {"field": "high"}, "stroke": color}
        drawn.append(_layer(errors, {"type": "rule", "strokeWidth": 2}, **(places | ends)))
        for one, of_one in zip(series, rows):
            if len(of_one) > 1 and one.style in _LINES:
                drawn.append(_layer(of_one, {"type": "line", **_LINES[one.style]}, **places, stroke=color))
        for one, of_one in zip(series, rows):
            if len(of_one) == 1 or one.style in ("points", "dots"):
                mark = {"type": "point", "opacity": 1, "strokeWidth": 1.3, "size": 80 if len(of_one) <= 40 else 24}
                encoding = places | {"fill": color, "shape": color | {"field": "shape"}}
                drawn.append(_layer(of_one, mark | {"stroke": "var(--paper)"}, **encoding))
        ringed = [row for row in every if row["ringed"]]
        ring = {"type": "point", "shape": "circle", "opacity": 1, "size": 200, "fill": "transparent"}
        drawn.append(_layer(ringed, ring, **places, stroke=color))
        return [layer for layer in drawn if layer["data"]["values"]] or [_layer([{}], {"type": "point"}, **places)]

    title = {"text": y.label, "anchor": "start", "frame": "bounds", "fontSize": 12, "fontWeight": "normal"}
    frame = {"data-frame": json.dumps({"x": domain, "log": x.log})}
    drawings = []
    for width in (wide, NARROW):
        size = {"width": width, "height": min(height, 260) if width < wide else height}
        spec = size | {"title": title | {"color": "var(--muted)"}, "layer": layers(8 if width > 600 else 4)}
        drawings.append(_svg(spec | {"autosize": {"type": "fit", "contains": "padding"}}, label, language, frame))
    return _responsive(drawings)


def _points(series: Series, x: Axis, y: Axis) -> list[Spec]:
    """The points of a series that can be drawn, with the ends of their error bars, and how they look."""
    look = {"color": f"var(--s{series.color % COLORS})", "shape": _SHAPES[series.color % len(_SHAPES)]}
    errors = series.errors or [0.0] * len(series.points)
    ringed = series.ringed or [False] * len(series.points)
    rows = []
    for (px, py), error, ring in zip(series.points, errors, ringed, strict=True):
        if all(math.isfinite(value) and (value > 0 or not axis.log) for value, axis in ((px, x), (py, y))):
            low = py - error if py - error > 0 or not y.log else py  # a logarithmic axis has no place for the rest
            rows.append({"x": px, "y": py, "low": low, "high": py + error, "ringed": ring, **look})
    return rows


def _kind(axis: Axis) -> Spec:
    return {"type": "log"} if axis.log else {}


def row_chart(
    rows: Sequence[Row],
    x: Axis,
    label: str,
    language: str,
    *,
    bars: bool = False,
    low: float = 0.0,
    hollow: bool = False,
    wide: int = WIDE,
) -> Markup:
    """One row per task: values under each other, with lines of one standard error each way.

    Args:
        rows: their labels are unique.
        x: label and format of the axis.
        label: what the picture shows, for screen readers.
        language: "en" or "fr", for the numbers of the axis.
        bars: values are bars from zero with their texts at their ends, else points between `low` and 1.
        low: where the axis of points begins.
        hollow: points of the first color are hollow.
        wide: pixels on a wide page; on a narrow one, labels stand above their rows.
    """
    names = [row.label for row in rows]
    values: list[Spec] = []
    for name, row in zip(names, rows):
        for place, one in enumerate(row.intervals):
            color = f"var(--s{one.color % COLORS})"
            ends = {"low": max(low, one.value - one.error), "high": one.value + one.error}
            ends["high"] = ends["high"] if bars else min(1.0, ends["high"])
            look = {"color": color, "shape": _SHAPES[one.color % len(_SHAPES)], "text": one.text}
            look["fill"] = "var(--paper)" if hollow and one.color == 0 else color
            values.append({"row": name, "place": str(place), "value": one.value, "zero": 0.0, **ends, **look})
    most = max((value["high"] for value in values), default=1.0) or 1.0
    guesses = [{"row": name, "value": row.chance} for name, row in zip(names, rows) if row.chance is not None]
    # A longer bar needs room for its text: about a third of the page on the right.
    across: Spec = {"field": "value", "type": "quantitative"}
    across["scale"] = {"domain": [0, most * 1.25] if bars else [low, 1], "nice": False, "zero": bars}
    unmarked = {"domain": False, "ticks": False}
    across["axis"] = {"title": x.label or None, "titleAnchor": "end", "format": x.form, "tickCount": 5, **unmarked}
    across["axis"] |= {"labels": False, "grid": False} if bars else {}
    row_of = {"field": "row", "type": "nominal", "sort": names}
    place = {"field": "place", "type": "nominal", "scale": {"type": "band", "paddingInner": 0, "paddingOuter": 0}}
    group = (17 if bars else 12) * max((len(row.intervals) for row in rows), default=1)

    def field(name: str) -> Spec:
        return {"field": name, "type": "nominal", "scale": None, "legend": None}

    drawings = []
    for width in (wide, NARROW):
        beside = width > 600
        axis = {"title": None, "labelLimit": 330, "labelPadding": 10, "labelFontSize": 13, "labelColor": "var(--ink)", **unmarked}
        gap = 14 if beside else 26
        share = gap / (group + gap)  # of a step of the scale
        scale = {"type": "band", "paddingInner": share, "paddingOuter": share * (0.3 if beside else 0.8)}
        up = row_of | {"axis": axis | {"grid": False} if beside else None, "scale": scale}
        places = {"y": up, "yOffset": place}
        spread = [value for value in values if value["low"] < value["high"]]
        ends = {"x": across | {"field": "low"}, "x2": {"field": "high"}}
        rule = _rule("ink", strokeWidth=1.5) if bars else {"type": "rule", "strokeWidth": 2}
        intervals = _layer(spread, rule, **ends, **places, **({} if bars else {"stroke": field("color")}))
        if bars:
            bar = {"x": across | {"field": "zero"}, "x2": {"field": "value"}, "fill": field("color")}
            text = {"type": "text", "align": "left", "dx": 7, "fontSize": 13, "fill": "var(--ink)"}
            written = {"x": across | {"field": "high"}, "text": {"field": "text", "type": "nominal"}}
            layers = [_layer(values, {"type": "bar"}, **bar, **places), intervals]
            layers.append(_layer(values, text, **written, **places))
        else:
            look = {name: field(source) for name, source in (("stroke", "color"), ("fill", "fill"), ("shape", "shape"))}
            guess = {"x": across, "y": up | {"bandPosition": 0}, "y2": {"field": "row", "bandPosition": 1}}
            layers = [_layer(guesses, _rule("ink", strokeWidth=1.5, strokeDash=[3, 3]), **guess), intervals]
            layers.append(_layer(values, {"type": "point", "size": 80, "opacity": 1}, x=across, **places, **look))
        if not beside:
            above = {"type": "text", "align": "left", "baseline": "bottom", "dy": -2, "fontSize": 13, "limit": 330}
            above["fill"] = "var(--ink)"
            start = {"x": {"datum": 0 if bars else low}, "text": {"field": "row", "type": "nominal"}}
            layers.append(_layer([{"row": name} for name in names], above, **start, y=up | {"bandPosition": 0}))
        shown = [layer for layer in layers if layer["data"]["values"]]
        step = {"height": {"step": group + gap, "for": "position"}}
        spec = {"width": width, **step, "autosize": {"type": "fit-x", "contains": "padding"}, "layer": shown}
        drawings.append(_svg(spec, label, language))
    return _responsive(drawings)


def _layer(data: Sequence[Spec], mark: Spec, **encoding: Spec) -> Spec:
    return {"data": {"values": list(data)}, "mark": {"clip": False, **mark}, "encoding": encoding}


def _rule(color: str, **settings: Any) -> Spec:
    return {"type": "rule", "stroke": f"var(--{color})", **settings}


def _svg(spec: Spec, label: str, language: str, attributes: Mapping[str, str] | None = None) -> Markup:
    """Render to an SVG element that scales to its place, with a text for those who do not see it."""
    import vl_convert  # loads a JavaScript engine

    colors = {"label": "muted", "title": "muted", "grid": "grid", "domain": "line", "tick": "line"}
    axis = {f"{part}Color": f"var(--{color})" for part, color in colors.items()}
    axis |= {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"}
    padding = {"left": 2, "right": 16, "top": 4, "bottom": 4}
    config = {"aria": False, "view": {"stroke": None}, "axis": axis}
    whole = {"$schema": "https://vega.github.io/schema/vega-lite/v5.json", "background": None, "padding": padding}
    drawn = vl_convert.vegalite_to_svg(
        whole | {"config": config} | spec, format_locale="fr-FR" if language == "fr" else None
    )
    size = re.search(r'viewBox="[^"]*"', drawn)
    more = "".join(f' {name}="{escape(value)}"' for name, value in (attributes or {}).items())
    head = f'<svg class="chart" role="img" aria-label="{escape(label)}" {size[0] if size else ""}{more}>'
    return Markup(re.sub(r"^<svg[^>]*>", lambda _: head, re.sub(r'font-family="[^"]*"', "", drawn), count=1))  # noqa: S704


def _responsive(drawings: Sequence[Markup]) -> Markup:
    """The drawings for wide and narrow pages; the style sheet shows one."""
    return Markup('<div class="wide">{}</div><div class="narrow">{}</div>').format(*drawings)


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
    from scipy.signal import savgol_filter

    half = int(span * len(points) / 2)
    if half < 1:
        return list(points)
    x, y = (np.array(axis, dtype=np.float64) for axis in zip(*points, strict=True))
    return list(zip(x.tolist(), savgol_filter(y, 2 * half + 1, 1).tolist(), strict=True))
