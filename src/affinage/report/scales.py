"""From values to places on the page: ticks at round numbers, linear and logarithmic scales."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


def nice_step(span: float, target: int) -> float:
    """The step of 1, 2 or 5 times a power of ten that cuts `span` into about `target` parts."""
    raw = span / max(1, target)
    power = 10.0 ** math.floor(math.log10(raw))
    for factor in (1.0, 2.0, 5.0):
        if raw <= factor * power * (1 + 1e-9):
            return factor * power
    return 10.0 * power


def linear_ticks(low: float, high: float, target: int = 5) -> list[float]:
    """Multiples of a nice step within [low, high]."""
    if not high > low:
        return [low]
    step = nice_step(high - low, target)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def log_ticks(low: float, high: float, target: int = 5) -> list[float]:
    """Powers of ten within [low, high], thinned where there are many, with values between where there are few."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    decades = last - first
    if decades > 2 * target:
        exponents = range(first, last + 1, math.ceil(decades / target))
        ticks = [10.0**e for e in exponents]
    else:
        factors = (1, 2, 3, 4, 6, 8) if high < 20 * low else (1, 2, 5) if decades <= target // 2 + 1 else (1,)
        ticks = [f * 10.0**e for e in range(first, last + 1) for f in factors]
    return [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]


@dataclass(frozen=True)
class Scale:
    """Maps values in [low, high] onto pixels [start, stop]; `stop` may be less than `start`, as for heights."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value; on a logarithmic scale the value must be positive."""
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self, target: int = 5) -> list[float]:
        """Round values within the scale, where lines and labels go."""
        return (log_ticks if self.log else linear_ticks)(self.low, self.high, target)


def fitted(values: Sequence[float], start: float, stop: float, *, log: bool = False, target: int = 5) -> Scale:
    """The scale that shows all of `values`, its ends moved out to round numbers. Non-finite values are ignored."""
    shown = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    if not shown:
        return Scale(1.0, 10.0, start, stop, log=True) if log else Scale(0.0, 1.0, start, stop)
    low, high = min(shown), max(shown)
    if log:
        if high <= low * 1.01:
            low, high = low / 2, high * 2
        return Scale(low * 0.96, high * 1.04, start, stop, log=True)
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-300):
        pad = abs(low) / 2 or 1.0
        low, high = low - pad, high + pad
    step = nice_step(high - low, target)
    return Scale(math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, start, stop)
