"""Numbers are written as readers of each language expect them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from affinage.report.quantities import Quantities

EN, FR = Quantities("en"), Quantities("fr")


def plain(text: str) -> str:
    return text.replace("\u202f", " ").replace("\u00a0", " ")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (EN.count(1443968), "1,443,968"),
        (FR.count(1443968), "1 443 968"),
        (EN.short(1443968), "1.44M"),
        (FR.short(1443968), "1,44 M"),
        (EN.short(999_999), "1.00M"),
        (EN.short(39.3e9), "39.3B"),
        (FR.short(39.3e9), "39,3 Md"),
        (EN.short(412), "412"),
        (EN.bytes(3_050_000), "3.05 MB"),
        (FR.bytes(3_050_000), "3,05 Mo"),
        (EN.bytes(0), "0 B"),
        (EN.flops(1.4e20), "140 EFLOP"),
        (EN.duration(0.84), "0.8 s"),
        (EN.duration(59.7), "1 min 00 s"),
        (EN.duration(153), "2 min 33 s"),
        (EN.duration(3599.9), "1 h 00 min"),
        (EN.duration(7500), "2 h 05 min"),
        (FR.duration(21 * 86400 + 7200), "21 j 2 h"),
        (EN.percent(0.971), "97.1%"),
        (FR.percent(0.971), "97,1 %"),
        (EN.with_error(0.971, 0.0083, as_percent=True), "97.1 ± 0.8%"),
        (FR.with_error(0.971, 0.0083, as_percent=True), "97,1 ± 0,8 %"),
        (EN.with_error(61.4, 2.91), "61.4 ± 2.9"),
        (EN.number(0.0012), "0.00120"),
        (EN.number(0.00012), "1.2 × 10⁻⁴"),
        (EN.number(1e-8), "10⁻⁸"),
        (EN.ticks([0, 0.5, 1.0]) == ["0", "0.5", "1.0"], True),
        (EN.ticks([0, 10_000, 20_000]) == ["0", "10k", "20k"], True),
        ([plain(t) for t in FR.ticks([0, 500, 1000])] == ["0", "500", "1 000"], True),
        ([plain(t) for t in EN.ticks([0, 0.001, 0.002])] == ["0", "1 × 10⁻³", "2 × 10⁻³"], True),
        (EN.percent_ticks([0, 0.2, 1.0]) == ["0%", "20%", "100%"], True),
    ],
)
def test_written_as_expected(written: object, expected: object) -> None:
    assert (plain(written) if isinstance(written, str) else written) == expected


@pytest.mark.parametrize(
    "write", [EN.count, EN.short, EN.bytes, EN.duration, EN.percent, EN.number, EN.flops, EN.decimal]
)
@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_what_is_unknown_is_a_dash(write: object, value: float | None) -> None:
    assert write(value) == "–"  # type: ignore[operator]


@given(value=st.floats(1e-6, 1e15))
def test_a_short_number_is_close_to_the_number(value: float) -> None:
    text = EN.short(value)
    scale = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "Q": 1e15}.get(text[-1], 1.0)
    assert float(text.rstrip("kMBTQ")) * scale == pytest.approx(value, rel=0.006)
