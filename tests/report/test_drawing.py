"""Charts put points where their values say; scales, curves and numbers are what readers expect."""

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from affinage.report.charts import (
    Axis,
    Interval,
    Row,
    Series,
    line_figure,
    row_chart,
    smoothed,
    thinned,
)
from affinage.report.duplicates import differences
from affinage.report.language import Language

EN, FR = Language("en"), Language("fr")
SHARE = Axis("score", ".0%")
near = pytest.approx


def drawn(drawing: str, width: str = "wide") -> ElementTree.Element:
    """The picture for wide or for narrow pages."""
    (one,) = [each for each in ElementTree.fromstring(f"<p>{drawing}</p>") if each.get("class") == width]
    return one[0]


def placed(element: ElementTree.Element) -> tuple[float, float]:
    return tuple(map(float, re.findall(r"-?[\d.]+", element.get("transform") or "")[:2]))  # type: ignore[return-value]


def lines(picture: ElementTree.Element, color: str) -> list[list[float]]:
    """From where to where the horizontal lines of a color go."""
    found = [one for one in picture.iter() if one.tag.endswith("line") and one.get("stroke") == color]
    ends = [(placed(one)[0], placed(one)[0] + float(one.get("x2") or 0)) for one in found if one.get("x2") != "0"]
    return [sorted(pair) for pair in ends]


@pytest.mark.parametrize("log", [False, True])
def test_every_point_is_inside_and_higher_values_are_higher(log: bool):
    points = [(float(i + 1), 0.1 + (7.3 * i) % 11) for i in range(30)]
    figure = line_figure("a chart", [Series("loss", points)], "step", Axis("loss", "~g", log), EN)
    for width in ("wide", "narrow"):
        blue = [one for one in drawn(figure.drawing, width).iter() if one.get("stroke") == "var(--s0)"]
        path = max((one.get("d") or "" for one in blue), key=len)
        corners = [tuple(map(float, pair.split(","))) for pair in re.split("[ML]", path)[1:]]
        assert len(corners) == len(points) and all(-1 <= x <= 920 and -1 <= y <= 340 for x, y in corners)
        assert [x for x, _ in corners] == sorted(x for x, _ in corners)
        heights = [corners[i][1] for i in sorted(range(len(points)), key=lambda i: points[i][1])]
        assert heights == sorted(heights, reverse=True)  # pixels grow downwards


def test_error_bars_reach_one_standard_error_each_way_and_end_with_the_axis():
    picture = drawn(row_chart([Row("task", [Interval(0.5, 0.1, 0), Interval(0.9, 0.2, 1)], 0.25)], SHARE, "s", EN))
    (half,) = [one for one in picture.iter() if one.get("d") and one.get("stroke") == "var(--s0)"]  # the point at 0.5
    inner = 2 * placed(half)[0]
    assert [end / inner for end in lines(picture, "var(--s0)")[0]] == near([0.4, 0.6], abs=1e-3)
    assert [end / inner for end in lines(picture, "var(--s1)")[0]] == near([0.7, 1.0], abs=1e-3)


def test_values_without_an_end_have_an_axis_from_zero_and_their_texts():
    rows = [Row("text", [Interval(0.5, 0.1, 0, "0.5 model"), Interval(2.0, 0, 1, "2.0 gzip")])]
    drawing = row_chart(rows, Axis("bits"), "bits", EN, shares=False)
    points = [one for one in drawn(drawing).iter() if one.get("d") and "--s" in (one.get("fill") or "")]
    model, gzip = (placed(one)[0] for one in points)
    assert gzip / model == near(4, rel=0.01)
    low, high = lines(drawn(drawing), "var(--s0)")[0]
    assert [low / model, high / model] == near([0.8, 1.2], rel=1e-3)
    assert "0.5 model" in drawing and "2.0 gzip" in drawing


def test_drawings_have_a_text_and_escape_what_others_wrote():
    row = Row('<b>"task"</b>', [Interval(0.5, 0.1, 0)])
    drawing = row_chart([row], Axis("</text><script>"), "scores & <more>", EN)
    assert "<b>" not in drawing and "<script" not in drawing and "task" in drawing
    assert drawing.count('role="img" aria-label="scores &amp; &lt;more&gt;"') == 2


def test_what_cannot_be_shown_is_left_out_and_little_is_still_a_chart():
    points = [(0.0, 1.0), (1.0, math.nan), (2.0, 0.0), (3.0, 5.0)]
    figure = line_figure("a chart", [Series("l", points)], "step", Axis("loss", "~g", log=True), EN)
    (line,) = [one for one in drawn(figure.drawing).iter() if one.get("stroke") == "var(--s0)"]
    assert (line.get("d") or "").count("L") == 1
    for few in ([], [(1.0, 2.0)], [(1.0, 3.0), (2.0, 3.0)]):
        assert "loss" in line_figure("a chart", [Series("l", few)], "step", Axis("loss"), EN).drawing
    assert "</svg>" in row_chart([], Axis("bits"), "bits", EN, shares=False)


def test_axes_have_the_numbers_of_their_language():
    row = Row("t", [Interval(0.5, 0, 0)])
    english, french = (row_chart([row], Axis("", ".1%"), "s", t) for t in (EN, FR))
    assert "20.0%" in english and "20,0\u202f%" in french


@given(ys=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), limit=st.integers(4, 60))
def test_thinning_keeps_ends_extremes_and_order(ys: list[float], limit: int):
    points = [(float(i), y) for i, y in enumerate(ys)]
    kept = thinned(points, limit)
    assert len(kept) <= max(limit, 4) and set(kept) <= set(points)
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})
    assert min(y for _, y in kept) == min(ys) and max(y for _, y in kept) == max(ys)


def test_smoothing_follows_a_line_to_its_ends_and_leaves_few_points_as_they_are():
    line = [(float(i), 3.0 - 0.5 * i) for i in range(100)]
    noisy = [(x, y + (-1) ** i) for i, (x, y) in enumerate(line)]
    assert smoothed(line) == [near(point) for point in line]
    assert max(abs(a[1] - b[1]) for a, b in zip(smoothed(noisy, 0.3), line)) < 0.25
    assert smoothed(line[:2]) == line[:2] and smoothed([]) == []


def plain(text: str) -> str:
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
    ],
)
def test_numbers_are_written_as_readers_of_each_language_expect(write, value, english, french):
    assert (plain(getattr(EN, write)(value)), plain(getattr(FR, write)(value))) == (english, french)
    assert [getattr(EN, write)(each) for each in (None, math.nan, math.inf)] == ["–"] * 3


TEXT = st.text("aàb c\n", max_size=40)


@given(left=TEXT, right=TEXT)
def test_marked_differences_lose_no_text(left: str, right: str):
    pieces = differences(left, right)
    assert tuple("".join(text for text, _ in side) for side in pieces) == (left, right)
    shared = ["".join(text for text, differs in side if not differs) for side in pieces]
    assert shared[0] == shared[1]
