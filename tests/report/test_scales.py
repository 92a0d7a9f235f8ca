"""Ticks are round, scales map the right way."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from affinage.report.scales import Scale, fitted, linear_ticks, log_ticks, nice_step

values = st.floats(-1e12, 1e12, allow_nan=False)
positive = st.floats(1e-9, 1e9)


@given(span=st.floats(1e-9, 1e12), target=st.integers(1, 10))
def test_steps_are_one_two_or_five_times_a_power_of_ten(span: float, target: int) -> None:
    step = nice_step(span, target)
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert any(mantissa == pytest.approx(nice) for nice in (1, 2, 5))
    assert step >= span / target * (1 - 1e-6)


@given(low=values, span=st.floats(1e-3, 1e12), target=st.integers(2, 10))
def test_linear_ticks_lie_within_and_are_even(low: float, span: float, target: int) -> None:
    ticks = linear_ticks(low, low + span, target)
    step = nice_step(span, target)
    assert all(
        low - 1e-6 * step - 1e-9 * abs(low) <= tick <= low + span + 1e-6 * step + 1e-9 * abs(low) for tick in ticks
    )
    assert len(ticks) <= target + 2
    assert all(b - a == pytest.approx(step, rel=1e-3, abs=1e-9 * abs(low)) for a, b in itertools.pairwise(ticks))


@given(low=positive, factor=st.floats(1.5, 1e6))
def test_log_ticks_lie_within(low: float, factor: float) -> None:
    ticks = log_ticks(low, low * factor)
    assert ticks == sorted(ticks)
    assert all(low * 0.999 <= tick <= low * factor * 1.001 for tick in ticks)
    if factor >= 10:
        assert len(ticks) >= 2


@given(data=st.lists(values, min_size=1, max_size=30))
def test_a_fitted_scale_shows_every_value(data: list[float]) -> None:
    scale = fitted(data, 200.0, 20.0)
    assert scale.low < scale.high
    assert all(20 - 1e-6 <= scale(value) <= 200 + 1e-6 for value in data)


@given(data=st.lists(positive, min_size=1, max_size=30))
def test_a_fitted_logarithmic_scale_shows_every_value(data: list[float]) -> None:
    scale = fitted(data, 0.0, 100.0, log=True)
    assert all(-1e-6 <= scale(value) <= 100 + 1e-6 for value in data)


def test_points_land_where_they_should() -> None:
    linear = Scale(0.0, 10.0, 50.0, 250.0)
    assert [linear(v) for v in (0, 5, 10)] == [50, 150, 250]
    upwards = Scale(0.0, 10.0, 200.0, 0.0)
    assert upwards(2.5) == 150
    logarithmic = Scale(1.0, 100.0, 0.0, 100.0, log=True)
    assert logarithmic(10) == pytest.approx(50)


def test_values_that_cannot_be_drawn_do_not_break_a_scale() -> None:
    assert fitted([], 0.0, 1.0).ticks()
    assert fitted([math.nan, math.inf], 0.0, 1.0).ticks()
    assert fitted([0.0, -3.0], 0.0, 1.0, log=True).ticks()
    assert fitted([3.0, 3.0], 0.0, 1.0)(3.0) == pytest.approx(0.5)
