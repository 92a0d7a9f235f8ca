"""Charts put points where their values say; scales, curves and numbers are what readers expect."""

import itertools
import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from affinage.report.charts import Axis, Interval, Row, Series, bar_chart, interval_chart, line_chart, responsive
from affinage.report.curves import smoothed, thinned
from affinage.report.differences import differences
from affinage.report.quantities import Quantities
from affinage.report.scales import Scale, fitted, linear_ticks, nice_step

EN, FR = Quantities("en"), Quantities("fr")
AXIS, SHARE = Axis("steps", EN.ticks), Axis("score", EN.percent_ticks)
values = st.floats(-1e12, 1e12, allow_nan=False)
positive = st.floats(1e-9, 1e9)
near = pytest.approx


def elements(drawing: str, tag: str, class_: str = "") -> list[ElementTree.Element]:
    found = ElementTree.fromstring(drawing).iter(tag)
    return [one for one in found if class_ in (one.get("class") or "").split() or not class_]


def at(element: ElementTree.Element, name: str) -> float:
    return float(element.get(name) or 0)


def path(element: ElementTree.Element) -> list[tuple[float, float]]:
    return [tuple(map(float, pair.split(","))) for pair in re.split("[ML]", element.get("d") or "")[1:]]  # type: ignore[misc]


@given(st.lists(st.floats(0.1, 1e4), min_size=2, max_size=50), st.sampled_from([350.0, 452.0, 920.0]), st.booleans())
def test_every_point_is_inside_and_higher_values_are_higher(ys: list[float], width: float, log: bool):
    points = [(float(i + 1), y) for i, y in enumerate(ys)]
    axes = Axis("step", EN.ticks, log), Axis("loss", EN.ticks, log)
    placed = path(elements(line_chart([Series("loss", points)], *axes, "a chart", width, 300.0), "path", "curve")[0])
    assert len(placed) == len(points)
    assert all(0 <= x <= width and 0 <= y <= 300 for x, y in placed)
    assert [x for x, _ in placed] == sorted(x for x, _ in placed)
    heights = [placed[i][1] for i in sorted(range(len(ys)), key=lambda i: ys[i])]
    assert all(a >= b - 0.11 for a, b in itertools.pairwise(heights))  # pixels grow downwards; a tenth is rounding


def test_error_bars_reach_one_standard_error_each_way_and_chance_has_its_place():
    row = Row("task", [Interval(0.5, 0.1, 0, "50 ± 10 %"), Interval(0.9, 0.2, 1, "90 ± 20 %")], 0.25, "chance 25%")
    drawing = interval_chart([row], SHARE, "scores", 920.0)
    grid = [at(one, "x1") for one in elements(drawing, "line", "grid")]
    left, right = min(grid), max(grid)

    def shares(element: ElementTree.Element, *names: str) -> list[float]:
        return [(at(element, name) - left) / (right - left) for name in names]

    bars = [shares(bar, "x1", "x2") for bar in elements(drawing, "line", "error")]
    assert bars == [near([0.4, 0.6], abs=1e-3), near([0.7, 1.0], abs=1e-3)]  # cut at 100 %
    assert shares(elements(drawing, "line", "chance")[0], "x1") == near([0.25], abs=1e-3)
    assert "hollow" in (elements(drawing, "circle", "mark")[0].get("class") or "")


def test_bars_are_as_long_as_their_values_with_the_standard_error_across_their_ends():
    rows = [Row("text", [Interval(0.5, 0, 0, "0.5 model"), Interval(2.0, 0, 1, "2.0 gzip")])]
    short, long = (at(one, "width") for one in elements(bar_chart(rows, AXIS, "bars", 920.0), "rect"))
    assert long / short == near(4, rel=0.01)
    rows = [Row("ours", [Interval(0.5, 0.1, 0, "50 ± 10 %")]), Row("theirs", [Interval(0.4, 0, 1, "40 %")])]
    drawing = bar_chart(rows, SHARE, "bars", 920.0)
    bar, (spread,) = elements(drawing, "rect")[0], elements(drawing, "line", "spread")
    ends = [(at(spread, name) - at(bar, "x")) / at(bar, "width") for name in ("x1", "x2")]
    assert ends == near([0.8, 1.2], rel=1e-3)
    written = next(one for one in elements(drawing, "text", "value") if one.text == "50 ± 10 %")
    assert at(spread, "x2") < at(written, "x") < 920


def test_drawings_have_a_text_and_escape_it():
    row = Row('<b>"task"</b>' * 9, [Interval(0.5, 0.1, 0, "</title><script>")])
    drawing = responsive(lambda width: interval_chart([row], SHARE, "scores & <more>", width))
    assert "<script" not in drawing and "<b>" not in drawing
    assert drawing.count('role="img" aria-label="scores &amp; &lt;more&gt;"') == 2


@given(low=values, span=st.floats(1e-3, 1e12), target=st.integers(2, 10))
def test_linear_ticks_are_round_even_and_within(low: float, span: float, target: int):
    step, ticks = nice_step(span, target), linear_ticks(low, low + span, target)
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert any(mantissa == near(nice) for nice in (1, 2, 5)) and step >= span / target * (1 - 1e-6)
    slack = 1e-6 * step + 1e-9 * abs(low)
    assert all(low - slack <= tick <= low + span + slack for tick in ticks) and len(ticks) <= target + 2
    assert all(b - a == near(step, rel=1e-3, abs=1e-9 * abs(low)) for a, b in itertools.pairwise(ticks))


@given(data=st.lists(values, min_size=1, max_size=30), other=st.lists(positive, min_size=1, max_size=30))
def test_a_fitted_scale_shows_every_value(data: list[float], other: list[float]):
    scale, logarithmic = fitted(data, 200.0, 20.0), fitted(other, 0.0, 100.0, log=True)
    assert scale.low < scale.high and all(20 - 1e-6 <= scale(value) <= 200 + 1e-6 for value in data)
    assert all(-1e-6 <= logarithmic(value) <= 100 + 1e-6 for value in other)


def test_points_land_where_they_should():
    assert [Scale(0.0, 10.0, 50.0, 250.0)(v) for v in (0, 5, 10)] == [50, 150, 250]
    assert Scale(0.0, 10.0, 200.0, 0.0)(2.5) == 150
    assert Scale(1.0, 100.0, 0.0, 100.0, log=True)(10) == near(50)
    assert fitted([3.0, 3.0], 0.0, 1.0)(3.0) == near(0.5)
    for nothing, log in (([], False), ([math.nan, math.inf], False), ([0.0, -3.0], True)):
        assert fitted(nothing, 0.0, 1.0, log=log).ticks()
    points = [(0.0, 1.0), (1.0, math.nan), (2.0, 0.0), (3.0, 5.0)]
    drawing = line_chart([Series("loss", points)], AXIS, Axis("loss", EN.ticks, log=True), "a chart", 920.0, 340.0)
    assert len(path(elements(drawing, "path", "curve")[0])) == 2, "what cannot be shown is left out"
    assert elements(line_chart([Series("loss", [])], AXIS, AXIS, "a chart", 350.0, 200.0), "text", "axis")
    assert elements(line_chart([Series("loss", [(1.0, 2.0)])], AXIS, AXIS, "a chart", 350.0, 200.0), "circle")


@given(ys=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), limit=st.integers(4, 60))
def test_thinning_keeps_ends_extremes_and_order(ys: list[float], limit: int):
    points = [(float(i), y) for i, y in enumerate(ys)]
    kept = thinned(points, limit)
    assert len(kept) <= max(limit, 4) and set(kept) <= set(points)
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})
    assert min(y for _, y in kept) == min(ys) and max(y for _, y in kept) == max(ys)


def slow_line_fit(points: list[tuple[float, float]], span: float) -> list[float]:
    """The definition: least squares over the window of each point."""
    count, half = len(points), int(span * len(points) / 2)
    result = []
    for i in range(count):
        first = min(max(i - half, 0), count - 2 * half - 1)
        window = range(first, first + 2 * half + 1)
        mean_x, mean_y = sum(window) / len(window), sum(points[j][1] for j in window) / len(window)
        slope = sum((j - mean_x) * (points[j][1] - mean_y) for j in window) / sum((j - mean_x) ** 2 for j in window)
        result.append(mean_y + slope * (i - mean_x))
    return result


@given(ys=st.lists(st.floats(-1e6, 1e6), min_size=20, max_size=100), span=st.floats(0.11, 0.9))
def test_smoothing_is_a_line_fit_in_a_window(ys: list[float], span: float):
    points = [(float(i), y) for i, y in enumerate(ys)]
    assert [y for _, y in smoothed(points, span)] == near(slow_line_fit(points, span), rel=1e-5, abs=1e-3)
    assert smoothed(points[:2]) == points[:2] and smoothed([]) == [], "few points are shown as they are"


def plain(text: str | list[str]) -> str | list[str]:
    if isinstance(text, list):
        return [plain(one) for one in text]  # type: ignore[misc]
    return text.replace("\u202f", " ").replace("\u00a0", " ")


@pytest.mark.parametrize(
    ("write", "value", "english", "french"),
    [
        ("count", 1443968, "1,443,968", "1 443 968"),
        ("short", 1443968, "1.44M", "1,44 M"),
        ("short", 39.3e9, "39.3B", "39,3 Md"),
        ("bytes", 3_050_000, "3.05 MB", "3,05 Mo"),
        ("flops", 1.4e20, "140 EFLOP", "140 EFLOP"),
        ("duration", 3599.9, "1 h 00 min", "1 h 00 min"),
        ("duration", 21 * 86400 + 7200, "21 d 2 h", "21 j 2 h"),
        ("percent", 0.971, "97.1%", "97,1 %"),
        ("number", 0.00012, "1.2 × 10⁻⁴", "1,2 × 10⁻⁴"),
        ("ticks", [0, 0.5, 1.0], ["0", "0.5", "1.0"], ["0", "0,5", "1,0"]),
        ("ticks", [0, 10_000, 20_000], ["0", "10k", "20k"], ["0", "10 k", "20 k"]),
        ("ticks", [0, 0.001, 0.002], ["0", "1 × 10⁻³", "2 × 10⁻³"], ["0", "1 × 10⁻³", "2 × 10⁻³"]),
        ("percent_ticks", [0, 0.2, 1.0], ["0%", "20%", "100%"], ["0 %", "20 %", "100 %"]),
    ],
)
def test_numbers_are_written_as_readers_of_each_language_expect(write, value, english, french):
    assert (plain(getattr(EN, write)(value)), plain(getattr(FR, write)(value))) == (english, french)
    assert write.endswith("ticks") or [getattr(EN, write)(each) for each in (None, math.nan, math.inf)] == ["–"] * 3


@given(value=st.floats(1e-6, 1e15))
def test_a_short_number_is_close_to_the_number(value: float):
    text = EN.short(value)
    scale = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "Q": 1e15}.get(text[-1], 1.0)
    assert float(text.rstrip("kMBTQ")) * scale == near(value, rel=0.006)


TEXT = st.text("aàb c\n", max_size=40)


@given(left=TEXT, right=TEXT)
def test_marked_differences_lose_no_text(left: str, right: str):
    pieces = differences(left, right)
    assert tuple("".join(text for text, _ in side) for side in pieces) == (left, right)
    shared = ["".join(text for text, differs in side if not differs) for side in pieces]
    assert shared[0] == shared[1]
