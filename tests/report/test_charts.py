"""Charts put points where their values say, and say what they show."""

import itertools
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from affinage.report.charts import Axis, Interval, Row, Series, bar_chart, interval_chart, line_chart, responsive
from affinage.report.quantities import Quantities

NUMBERS = Quantities("en")
AXIS = Axis("steps", NUMBERS.ticks)
SHARE = Axis("score", NUMBERS.percent_ticks)


def elements(drawing: str, tag: str, class_: str = "") -> list[ElementTree.Element]:
    found = ElementTree.fromstring(drawing).iter(tag)
    return [one for one in found if class_ in (one.get("class") or "").split() or not class_]


def path(element: ElementTree.Element) -> list[tuple[float, float]]:
    return [tuple(map(float, pair.split(","))) for pair in re.split("[ML]", element.get("d") or "")[1:]]  # type: ignore[misc]


@given(
    ys=st.lists(st.floats(0.1, 1e4), min_size=2, max_size=50),
    width=st.sampled_from([350.0, 452.0, 920.0]),
    log=st.booleans(),
)
def test_every_point_is_inside_and_higher_values_are_higher(ys: list[float], width: float, log: bool) -> None:
    points = [(float(i + 1), y) for i, y in enumerate(ys)]
    y_axis = Axis("loss", NUMBERS.ticks, log)
    drawing = line_chart([Series("loss", points)], Axis("step", NUMBERS.ticks, log), y_axis, "a chart", width, 300.0)
    placed = path(elements(drawing, "path", "curve")[0])
    assert len(placed) == len(points)
    assert all(0 <= x <= width and 0 <= y <= 300 for x, y in placed)
    assert [x for x, _ in placed] == sorted(x for x, _ in placed)
    order = sorted(range(len(ys)), key=lambda i: ys[i])
    heights = [placed[i][1] for i in order]
    assert all(a >= b - 0.11 for a, b in itertools.pairwise(heights))  # pixels grow downwards; a tenth is rounding


def test_ticks_and_labels_agree_with_the_curve() -> None:
    drawing = line_chart([Series("loss", [(0.0, 0.0), (100.0, 10.0)])], AXIS, AXIS, "a chart", 920.0, 340.0)
    ticks = {one.text: one for one in elements(drawing, "text", "tick")}
    (x0, y0), (x1, y1) = path(elements(drawing, "path", "curve")[0])
    assert {"0", "2", "10", "20", "100"} <= ticks.keys()
    assert float(ticks["10"].get("y") or 0) == pytest.approx(y1 + 4, abs=0.2) or "20" in ticks
    lines = [float(one.get("y1") or 0) for one in elements(drawing, "line", "grid")]
    assert max(lines) == pytest.approx(y0, abs=0.1) and min(lines) == pytest.approx(y1, abs=0.1)
    assert x0 < x1


def test_values_that_an_axis_cannot_show_are_left_out() -> None:
    points = [(0.0, 1.0), (1.0, float("nan")), (2.0, 0.0), (3.0, 5.0)]
    axis = Axis("loss", NUMBERS.ticks, log=True)
    drawing = line_chart([Series("loss", points)], AXIS, axis, "a chart", 920.0, 340.0)
    assert len(path(elements(drawing, "path", "curve")[0])) == 2


def test_an_empty_chart_is_still_a_chart() -> None:
    assert elements(line_chart([Series("loss", [])], AXIS, AXIS, "a chart", 350.0, 200.0), "text", "axis")
    assert elements(line_chart([Series("loss", [(1.0, 2.0)])], AXIS, AXIS, "a chart", 350.0, 200.0), "circle")


def test_error_bars_reach_one_standard_error_each_way_and_chance_has_its_place() -> None:
    row = Row("task", [Interval(0.5, 0.1, 0, "50 ± 10 %"), Interval(0.9, 0.2, 1, "90 ± 20 %")], 0.25, "chance 25%")
    drawing = interval_chart([row], SHARE, "scores", 920.0)
    grid = [float(one.get("x1") or 0) for one in elements(drawing, "line", "grid")]
    left, right = min(grid), max(grid)

    def share(x: str | None) -> float:
        return (float(x or 0) - left) / (right - left)

    bars = [(share(bar.get("x1")), share(bar.get("x2"))) for bar in elements(drawing, "line", "error")]
    assert bars == [pytest.approx((0.4, 0.6), abs=1e-3), pytest.approx((0.7, 1.0), abs=1e-3)]  # cut at 100 %
    assert share(elements(drawing, "line", "chance")[0].get("x1")) == pytest.approx(0.25, abs=1e-3)
    assert "hollow" in (elements(drawing, "circle", "mark")[0].get("class") or "")


def test_bars_are_as_long_as_their_values() -> None:
    rows = [Row("text", [Interval(0.5, 0, 0, "0.5 model"), Interval(2.0, 0, 1, "2.0 gzip")])]
    short, long = (float(one.get("width") or 0) for one in elements(bar_chart(rows, AXIS, "bars", 920.0), "rect"))
    assert long / short == pytest.approx(4, rel=0.01)


def test_a_bar_s_standard_error_crosses_its_end_and_its_value_stands_behind_it() -> None:
    rows = [Row("ours", [Interval(0.5, 0.1, 0, "50 ± 10 %")]), Row("theirs", [Interval(0.4, 0, 1, "40 %")])]
    drawing = bar_chart(rows, SHARE, "bars", 920.0)
    bar = elements(drawing, "rect")[0]
    left, length = (float(bar.get(name) or 0) for name in ("x", "width"))
    (spread,) = elements(drawing, "line", "spread")
    ends = [(float(spread.get(name) or 0) - left) / length for name in ("x1", "x2")]
    assert ends == pytest.approx([0.8, 1.2], rel=1e-3)
    written = next(one for one in elements(drawing, "text", "value") if one.text == "50 ± 10 %")
    assert float(spread.get("x2") or 0) < float(written.get("x") or 0) < 920


def test_drawings_have_a_text_and_escape_it() -> None:
    row = Row('<b>"task"</b>' * 9, [Interval(0.5, 0.1, 0, "</title><script>")])
    drawing = responsive(lambda width: interval_chart([row], SHARE, "scores & <more>", width))
    assert "<script" not in drawing and "<b>" not in drawing
    assert drawing.count('role="img" aria-label="scores &amp; &lt;more&gt;"') == 2
