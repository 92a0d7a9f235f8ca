"""What happens to a metric between the training log and the page: thinned without losing spikes, and smoothed."""

import math
from collections.abc import Sequence

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


def smoothed(points: Sequence[Point], span: float = 0.02) -> list[Point]:
    """Exponential moving average over about `span` of the series, without the bias of its beginning.

    The weight of the past is corrected as Adam corrects its moments (Kingma and Ba, 2015, section 3), so that the first
    points are not drawn towards zero.
    """
    decay = 1.0 - 1.0 / max(1.0, span * len(points))
    average, weight, result = 0.0, 0.0, []
    for x, y in points:
        average = decay * average + (1.0 - decay) * y
        weight = decay * weight + (1.0 - decay)
        result.append((x, average / weight))
    return result


def finite(points: Sequence[Point]) -> list[Point]:
    """The points that can be drawn."""
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
