"""Charts as inline SVG: lines, intervals and bars, each drawn for a wide and for a narrow page.

Colours are classes (`s0` to `s5`) that the style sheet fills for light, dark and paper; shapes and dashes differ too.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from affinage.report.curves import Point
from affinage.report.scales import Scale, fitted
from affinage.report.svg import drawing, element, line, marker, polyline, text

WIDE, HALF, THIRD, NARROW = 920.0, 452.0, 296.0, 350.0  # the page's column and parts of it, and a phone's; pixels
BESIDE = 11.0  # pixels between the intervals of a row


@dataclass(frozen=True)
class Axis:
    """What an axis says. `label` holds the unit; `write` turns the values of its ticks into labels."""

    label: str
    write: Callable[[Sequence[float]], list[str]]
    log: bool = False


@dataclass(frozen=True)
class Series:
    """One line or set of points of a chart.

    `style`: "faint" for raw values behind a line, "line", or "points" for few values, joined by a thin line, "dots" for
    values of different things, which nothing joins.
    `errors` are half-lengths of vertical bars, one per point; points that are `ringed` stand out.
    """

    label: str
    points: Sequence[Point]
    colour: int = 0
    style: Literal["faint", "line", "points", "dots"] = "line"
    errors: Sequence[float] = ()
    ringed: Sequence[bool] = ()


@dataclass(frozen=True)
class Interval:
    """A value with its standard error, of series `colour`; `title` is shown on hover."""

    value: float
    error: float
    colour: int
    title: str = ""


@dataclass(frozen=True)
class Row:
    """One line of an interval or bar chart. `chance` is what guessing gets, where that is known, with its title."""

    label: str
    intervals: Sequence[Interval]
    chance: float | None = None
    chance_title: str = ""


def responsive(draw: Callable[[float], Markup], wide: float = WIDE) -> Markup:
    """The drawing twice, for wide and narrow pages; the style sheet shows one."""
    return Markup('<div class="wide">{}</div><div class="narrow">{}</div>').format(draw(wide), draw(NARROW))


def line_chart(
    series: Sequence[Series], x: Axis, y: Axis, label: str, width: float, height: float, marks: Sequence[float] = ()
) -> Markup:
    """Lines over a common x axis.

    Args:
        series: drawn in order, later ones on top; values that a logarithmic axis cannot show are left out.
        x, y: what the axes say.
        label: what the picture is, for screen readers.
        width, height: pixels at full size.
        marks: x positions of vertical dashed lines (where a run was resumed).
    """
    right, top, bottom = width - 12.0, 26.0, height - 40.0
    shown = [_drawable(one, x.log, y.log) for one in series]
    up = fitted([v for one in shown for v in _reach(one)], bottom, top, log=y.log)
    left = _room_for_labels(y.write(up.ticks(_height_ticks(height))))
    xs = [p[0] for one in shown for p in one.points] or [0.0, 1.0]
    if x.log:
        across = fitted(xs, left, right, log=True)
    else:  # ends where the curve does: empty paper after it would read as a run cut short
        across = Scale(min(0.0, *xs) if min(xs) >= 0 else min(xs), max(xs) or 1.0, left, right)
    parts = [*_grid(across, up, x, y, width, height)]
    parts += [line(across(m), top, across(m), bottom, "resumed") for m in marks if across.low <= m <= across.high]
    for one in shown:
        parts += _bars(one, across, up)
    for one in shown:
        parts += _series(one, across, up)
    return drawing(width, height, label, *parts, class_="chart lines", data_frame=_frame(across, top, bottom))


def _drawable(series: Series, log_x: bool, log_y: bool) -> Series:
    kept = [
        (i, p)
        for i, p in enumerate(series.points)
        if math.isfinite(p[0]) and math.isfinite(p[1]) and (p[0] > 0 or not log_x) and (p[1] > 0 or not log_y)
    ]
    errors = [series.errors[i] for i, _ in kept] if series.errors else []
    ringed = [series.ringed[i] for i, _ in kept] if series.ringed else []
    return Series(series.label, [p for _, p in kept], series.colour, series.style, errors, ringed)


def _reach(series: Series) -> list[float]:
    errors = series.errors or [0.0] * len(series.points)
    return [v for (_, y), e in zip(series.points, errors) for v in (y - e, y + e)]


def _frame(across: Scale, top: float, bottom: float) -> str:
    frame = {"x": [across.low, across.high], "px": [across.start, across.stop], "py": [top, bottom], "log": across.log}
    return json.dumps(frame, separators=(",", ":"))


def _height_ticks(height: float) -> int:
    return 5 if height > 220 else 4


def _room_for_labels(labels: Sequence[str]) -> float:
    """Pixels left of the plot, so that labels of ordinary length leave plots under each other aligned."""
    return max(46.0, 14.0 + 6.6 * max(map(len, labels), default=0))


def _grid(across: Scale, up: Scale, x: Axis, y: Axis, width: float, height: float) -> list[Markup]:
    parts = [text(0, 13, y.label, "axis")]
    heights = up.ticks(_height_ticks(height))
    for tick, label in zip(heights, y.write(heights), strict=True):
        parts.append(line(across.start, up(tick), across.stop, up(tick), "grid"))
        parts.append(text(across.start - 8, up(tick) + 4, label, "tick", "end"))
    ticks = across.ticks(8 if width > 600 else 4)
    for tick, label in zip(ticks, x.write(ticks), strict=True):
        parts.append(line(across(tick), up.start, across(tick), up.start + 4, "base"))
        anchor = "end" if across(tick) > across.stop - 14 else "middle"
        parts.append(text(across(tick) + (4 if anchor == "end" else 0), up.start + 18, label, "tick", anchor))
    parts.append(line(across.start, up.start, across.stop, up.start, "base"))
    parts.append(text(across.stop, height - 4, x.label, "axis", "end"))
    return parts


def _bars(series: Series, across: Scale, up: Scale) -> list[Markup]:
    """The bars of errors, which no bar of another series hides the points of."""
    classes = f"error s{series.colour % 6}"
    return [
        line(across(x), up(y - error), across(x), up(y + error), classes)
        for (x, y), error in zip(series.points, series.errors)
    ]


def _series(series: Series, across: Scale, up: Scale) -> list[Markup]:
    colour = f"s{series.colour % 6}"
    placed = [(across(x), up(y)) for x, y in series.points]
    if not placed:
        return []
    parts = []
    if len(placed) > 1 and series.style != "dots":
        weight = {"faint": "faint", "line": "curve", "points": "thin"}[series.style]
        parts.append(polyline(placed, f"{weight} {colour}"))
    for (px, py), ringed in zip(placed, series.ringed):
        if ringed:
            parts.append(element("circle", cx=px, cy=py, r=8.0, class_=f"ring {colour}"))
    if series.style in ("points", "dots") or len(placed) == 1:
        radius = 4.0 if len(placed) <= 40 else 2.5
        parts += [marker(px, py, series.colour, radius) for px, py in placed]
    return parts


def interval_chart(
    rows: Sequence[Row], x: Axis, label: str, width: float, *, low: float = 0.0, hollow: bool = True
) -> Markup:
    """One row per task: values as points with bars of one standard error, chance as a dashed tick.

    The intervals of a row stand under each other, so that their bars can be compared; those of the first colour are
    hollow if `hollow`.
    The axis goes from `low` to 1.
    On narrow pages labels stand above their rows instead of beside them.
    """
    beside = width > 600
    left, right = (_label_width(rows) if beside else 8.0), width - 18.0
    more = BESIDE * max(0, max((len(row.intervals) for row in rows), default=0) - 2)
    pitch, first = (36.0 + more, 22.0 + more / 2) if beside else (52.0 + more, 38.0 + more / 2)
    bottom = first + pitch * len(rows) - (12.0 if beside else 30.0)
    across = Scale(low, 1.0, left, right)
    parts = []
    ticks = across.ticks(5 if beside else 4)
    for tick, written in zip(ticks, x.write(ticks), strict=True):
        parts.append(line(across(tick), 4.0, across(tick), bottom, "grid"))
        parts.append(text(across(tick), bottom + 18, written, "tick", "middle"))
    parts.append(text(right, bottom + 36, x.label, "axis", "end"))
    for i, row in enumerate(rows):
        middle = first + pitch * i
        if beside:
            parts.append(text(left - 14, middle + 4, _fitting(row.label, beside), "name", "end"))
        else:
            parts.append(text(left, middle - 18 - more / 2, _fitting(row.label, beside), "name"))
        parts += _interval_row(row, across, middle, hollow=hollow)
    return drawing(width, bottom + 42, label, *parts, class_="chart")


def _interval_row(row: Row, across: Scale, middle: float, *, hollow: bool) -> list[Markup]:
    parts = []
    if row.chance is not None:
        at, guess = across(row.chance), element("title", row.chance_title)
        parts.append(element("line", guess, x1=at, x2=at, y1=middle - 11, y2=middle + 11, class_="chance"))
    for i, one in enumerate(row.intervals):
        at = middle + BESIDE * (i - (len(row.intervals) - 1) / 2)
        low, high = (across(min(1.0, max(across.low, one.value + sign * one.error))) for sign in (-1, 1))
        parts.append(line(low, at, high, at, f"error s{one.colour % 6}"))
        title = f"{row.label}: {one.title}"
        parts.append(marker(across(one.value), at, one.colour, 4.5, title=title, hollow=hollow and one.colour == 0))
    return parts


def bar_chart(rows: Sequence[Row], x: Axis, label: str, width: float) -> Markup:
    """Groups of horizontal bars from zero, each with its value written at its end (`title` of the interval).

    A line of one standard error each way crosses the end of a bar that has one.
    """
    beside = width > 600
    left = _label_width(rows) if beside else 2.0
    right = width - 96.0
    top_value = max((one.value + one.error for row in rows for one in row.intervals), default=1.0)
    across = Scale(0.0, top_value or 1.0, left, right)
    parts, at = [], 4.0
    for row in rows:
        if not beside:
            parts.append(text(left, at + 11, _fitting(row.label, beside), "name"))
            at += 18
        else:
            parts.append(text(left - 14, at + 8 * len(row.intervals) + 4, _fitting(row.label, beside), "name", "end"))
        for one in row.intervals:
            length = max(1.0, across(one.value) - left)
            parts.append(element("rect", x=left, y=at, width=length, height=12.0, class_=f"bar s{one.colour % 6}"))
            if one.error:
                low, high = across(max(0.0, one.value - one.error)), across(one.value + one.error)
                parts.append(line(low, at + 6, high, at + 6, "spread"))
                length = max(length, high - left)
            parts.append(text(left + length + 7, at + 10, one.title, "value"))
            at += 16
        at += 12
    parts.append(line(left, 0, left, at - 8, "base"))
    parts.append(text(left, at + 8, x.label, "axis"))
    return drawing(width, at + 14, label, *parts, class_="chart")


def _label_width(rows: Sequence[Row]) -> float:
    return 24.0 + 7.0 * max((len(_fitting(row.label, True)) for row in rows), default=0)


def _fitting(label: str, beside: bool) -> str:
    """A label cut in its middle to the room it has, so that its beginning and its end still tell rows apart."""
    room = 38 if beside else 46
    return label if len(label) <= room else f"{label[: room // 2]}…{label[-(room // 2 - 1) :]}"
