"""Numbers as people of one language write them: thousands, decimals, bytes, durations, errors."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from affinage.durations import duration

ABSENT = "–"
_NARROW = "\u202f"  # narrow no-break space: between a number and its unit, and in French between thousands
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_LARGE = {
    "en": ((1e15, "Q"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")),
    "fr": ((1e12, "bn"), (1e9, "Md"), (1e6, "M"), (1e3, "k")),
}
_SI = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BYTE = {"en": "B", "fr": "o"}
_DAY = {"en": "d", "fr": "j"}


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


@dataclass(frozen=True)
class Quantities:
    """Writes numbers for the readers of `language` ("en" or "fr"). Absent or non-finite values become a dash."""

    language: str

    def _localised(self, text: str) -> str:
        if self.language != "fr":
            return text
        return text.replace(",", _NARROW).replace(".", ",")

    def count(self, value: float | None) -> str:
        """All digits of a whole number, thousands separated."""
        return self._localised(f"{value:,.0f}") if value is not None and _finite(value) else ABSENT

    def listed(self, values: Sequence[int], most: int = 8) -> str:
        """Whole numbers after each other, cut short after `most`."""
        return ", ".join(map(self.count, values[:most])) + (" …" if len(values) > most else "")

    def number(self, value: float | None, digits: int = 3) -> str:
        """A number to `digits` significant digits; a power of ten where it is very small or very large."""
        if value is None or not _finite(value):
            return ABSENT
        if value == 0:
            return "0"
        magnitude = math.floor(math.log10(abs(value)))
        if magnitude < -3 or magnitude > 6:
            mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
            mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
            power = f"10{str(int(exponent)).translate(_SUPERSCRIPTS)}"
            return power if mantissa == "1" else f"{self._localised(mantissa)}{_NARROW}×{_NARROW}{power}"
        return self._localised(f"{value:,.{max(0, digits - 1 - magnitude)}f}")

    def decimal(self, value: float | None, places: int = 2) -> str:
        """A number with a fixed count of decimals, for columns that line up."""
        return self._localised(f"{value:,.{places}f}") if value is not None and _finite(value) else ABSENT

    def short(self, value: float | None, digits: int = 3) -> str:
        """A count to a few digits: 1.44M in English, 1,44 M in French."""
        if value is None or not _finite(value):
            return ABSENT
        gap = _NARROW if self.language == "fr" else ""
        return self._scaled(value, _LARGE[self.language], digits, gap, "")

    def flops(self, value: float | None, unit: str = "FLOP") -> str:
        """A count of floating-point operations with an SI prefix."""
        return self._scaled(value, _SI, 3, _NARROW, unit) if value is not None and _finite(value) else ABSENT

    def bytes(self, value: float | None) -> str:
        """A size in decimal units: 3.04 MB in English, 3,04 Mo in French."""
        if value is None or not _finite(value):
            return ABSENT
        return self._scaled(value, _SI, 3, _NARROW, _BYTE[self.language])

    def moment(self, seconds: float | None) -> str:
        """A short time with three digits: 1.25 s, 84.3 ms."""
        if seconds is None or not _finite(seconds):
            return ABSENT
        value, unit = (seconds, "s") if seconds >= 1 else (1000 * seconds, "ms")
        places = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
        return f"{self._localised(f'{value:.{places}f}')}{_NARROW}{unit}"

    def _scaled(self, value: float, steps: tuple[tuple[float, str], ...], digits: int, gap: str, unit: str) -> str:
        for size, prefix in steps:
            if float(f"{abs(value):.{digits - 1}e}") >= size:
                scaled = value / size
                places = max(0, digits - 1 - math.floor(math.log10(abs(float(f"{scaled:.{digits - 1}e}")))))
                return f"{self._localised(f'{scaled:.{places}f}')}{gap}{prefix}{unit}"
        text = f"{value:.0f}" if float(value).is_integer() else f"{value:.{digits}g}"
        return f"{self._localised(text)}{_NARROW + unit if unit else ''}"

    def duration(self, seconds: float | None) -> str:
        """Seconds in the two largest units that matter: 2 h 05 min in English, 3 j 4 h in French."""
        if seconds is None or not _finite(seconds):
            return ABSENT
        text = duration(seconds).replace("d", _DAY[self.language])
        return self._localised(re.sub(r"(?<=\d) ", _NARROW, text).replace(" ", "\u00a0"))

    def percent(self, share: float | None, places: int = 1) -> str:
        """A share between 0 and 1 as a percentage."""
        if share is None or not _finite(share):
            return ABSENT
        return f"{self._localised(f'{100 * share:.{places}f}')}{_NARROW if self.language == 'fr' else ''}%"

    def with_error(self, value: float | None, error: float | None, *, as_percent: bool = False) -> str:
        """A value with its standard error, both with the same decimals."""
        if value is None or not _finite(value):
            return ABSENT
        scale, sign = (100.0, self.percent(0, 0)[1:]) if as_percent else (1.0, "")
        shown = value * scale
        places = 1 if as_percent else max(0, 2 - math.floor(math.log10(abs(shown)))) if shown else 2
        text = self._localised(f"{shown:,.{places}f}")
        if error is not None and _finite(error) and error > 0:
            text += f"{_NARROW}±{_NARROW}{self._localised(f'{error * scale:,.{places}f}')}"
        return text + sign
