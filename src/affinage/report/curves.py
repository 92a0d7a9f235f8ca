"""What happens to a metric between the training log and the page: thinned without losing spikes, and smoothed."""

from collections.abc import Sequence

import numpy as np

Point = tuple[float, float]
LIMIT = 500  # points per series on the page; more than a screen is wide shows nothing more


def thinned(points: Sequence[Point], limit: int = LIMIT) -> list[Point]:
    """At most `limit` of the points: the first, the last, and of every stretch between the lowest and the highest.

    Args:
        points: (x, y), x not decreasing.
        limit: at least 4.
    """
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
    centre = np.arange(count)
    first = np.clip(centre - half, 0, count - 2 * half - 1)
    last = first + 2 * half + 1

    def window_mean(values: np.ndarray) -> np.ndarray:
        total = np.concatenate([[0.0], np.cumsum(values)])
        return (total[last] - total[first]) / (last - first)

    place = (centre - count / 2) / count
    mean_place, mean_y = window_mean(place), window_mean(y)
    slope = (window_mean(place * y) - mean_place * mean_y) / (window_mean(place * place) - mean_place**2)
    return list(zip(x.tolist(), (mean_y + slope * (place - mean_place)).tolist(), strict=True))
