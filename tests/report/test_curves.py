"""Thinning keeps what an eye would see, smoothing does not lie."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from affinage.report.curves import smoothed, thinned

series = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400).map(
    lambda ys: [(float(i), y) for i, y in enumerate(ys)]
)


@given(points=series, limit=st.integers(4, 60))
def test_thinning_keeps_ends_extremes_and_order(points: list[tuple[float, float]], limit: int) -> None:
    kept = thinned(points, limit)
    assert len(kept) <= max(limit, 4)
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})
    assert set(kept) <= set(points)
    assert min(y for _, y in kept) == min(y for _, y in points)
    assert max(y for _, y in kept) == max(y for _, y in points)


def slow_line_fit(points: list[tuple[float, float]], span: float) -> list[float]:
    """The definition: least squares over the window of each point."""
    count, half = len(points), int(span * len(points) / 2)
    result = []
    for i in range(count):
        first = min(max(i - half, 0), count - 2 * half - 1)
        window = range(first, first + 2 * half + 1)
        mean_x = sum(window) / len(window)
        mean_y = sum(points[j][1] for j in window) / len(window)
        slope = sum((j - mean_x) * (points[j][1] - mean_y) for j in window) / sum((j - mean_x) ** 2 for j in window)
        result.append(mean_y + slope * (i - mean_x))
    return result


@given(ys=st.lists(st.floats(-1e6, 1e6), min_size=20, max_size=200), span=st.floats(0.11, 0.9))
def test_smoothing_is_a_line_fit_in_a_window(ys: list[float], span: float) -> None:
    points = [(float(i), y) for i, y in enumerate(ys)]
    assert [y for _, y in smoothed(points, span)] == pytest.approx(slow_line_fit(points, span), rel=1e-5, abs=1e-3)


def test_smoothing_leaves_a_straight_line_alone() -> None:
    points = [(float(i), 3.0 - 0.01 * i) for i in range(300)]
    assert [y for _, y in smoothed(points)] == pytest.approx([y for _, y in points])


def test_short_series_are_shown_as_they_are() -> None:
    assert smoothed([(0.0, 1.0), (1.0, 5.0)]) == [(0.0, 1.0), (1.0, 5.0)]
    assert smoothed([]) == []
