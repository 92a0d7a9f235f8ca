"""Messages of a page, from the gettext catalogues in `locale/`, and numbers as readers of its language write them."""

import gettext
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import resources

from babel import Locale
from babel.dates import format_datetime
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po

from affinage.durations import duration

LANGUAGES = ("en", "fr")
ABSENT = "–"
_NARROW = "\u202f"  # narrow no-break space: between a number and its unit, and in French between thousands
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_LARGE = {
    "en": ((1e15, "Q"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")),
    "fr": ((1e12, "bn"), (1e9, "Md"), (1e6, "M"), (1e3, "k")),
}
_SI = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def N_(message: str) -> str:
    """Marks a message of a table, which is translated where it is used."""
    return message


# What steps write beside the reason for which they removed a document.
DETAILS = (
    N_("{number} characters"),
    N_("{number} characters on average"),
    N_("{number} of its characters"),
    N_("Jaccard {number} to {id} of {source}"),
    N_("no words"),
    N_("{language}, as its source says"),
    N_("there is no text in it"),
    N_("no text in the article {title}"),
    N_("no text in {url}"),
    N_("no {key} among {names}: set `text_key` of the source"),
    N_("over {number} MB in one text file; split it"),
    N_("a line over {number} MB"),
    N_("a page over {number} MB: {url}"),
    N_("this is a PDF, UTF-16 or no text: it has NUL bytes"),
    N_("its header says so"),
    N_("nothing between header and license"),
    "{language} {number}",
)


@cache
def _catalogue(code: str) -> gettext.NullTranslations:
    if code == "en":  # the messages themselves are English
        return gettext.NullTranslations()
    compiled = io.BytesIO()
    with (resources.files("affinage.report") / "locale" / f"{code}.po").open("rb") as file:
        write_mo(compiled, read_po(file, locale=code))
    compiled.seek(0)
    return gettext.GNUTranslations(compiled)


@dataclass(frozen=True)
class Language:
    """Messages and numbers for the readers of `code`, one of `LANGUAGES`.

    Called with an English message, it returns that in the language, with `{name}` replaced by the values if there are
    any. Numbers that are absent or not finite become a dash.
    """

    code: str

    def __call__(self, message: str, count: int | None = None, /, **values: object) -> str:
        """The message with its values filled in; in the form for `count` things, if the catalogue has such forms."""
        known = _catalogue(self.code)
        text = known.gettext(message) if count is None else known.ngettext(message, message, count)
        return text.format(**values) if values else text

    def reason(self, reason: str) -> str:
        """Why documents were removed; a reason of a plug-in, which no catalogue has, is returned as it is."""
        return _catalogue(self.code).pgettext("reason", reason)

    def detail(self, detail: str) -> str:
        """What a step wrote beside a reason; what is none of `DETAILS` is returned as it is."""
        for message in DETAILS:
            blank = r"\\{(number)?(\w*)\\}"
            pattern = re.sub(
                blank, lambda one: f"(?P<{one[1] or one[2]}>{'[0-9.]+' if one[1] else '.+'})", re.escape(message)
            )
            if found := re.fullmatch(pattern, detail):
                values = found.groupdict()
                if number := values.get("number"):
                    values["number"] = self.decimal(float(number), len(number.partition(".")[2]))
                return self(message, **values)
        return detail

    def name(self, code: str) -> str:
        """A language of the text by its ISO code: French (fr)."""
        name = Locale(self.code).languages.get(code)
        return f"{name} ({code})" if name else code or self(N_("unknown"))

    def date(self, moment: datetime) -> str:
        """A day and a time, in UTC."""
        return format_datetime(moment.astimezone(UTC), "d MMMM y, HH:mm", locale=self.code)

    def count(self, value: float | None) -> str:
        """All digits of a whole number, thousands separated."""
        return self.decimal(value, 0)

    def decimal(self, value: float | None, places: int = 2) -> str:
        """A number with a fixed count of decimals, for columns that line up."""
        if value is None or not math.isfinite(value):
            return ABSENT
        text = f"{value:,.{places}f}"
        return text.replace(",", _NARROW).replace(".", ",") if self.code == "fr" else text

    def number(self, value: float | None) -> str:
        """A number to three significant digits; a power of ten where it is very small or very large."""
        if value is None or not math.isfinite(value) or value == 0:
            return self.decimal(value, 0)
        magnitude = math.floor(math.log10(abs(value)))
        if -3 <= magnitude <= 6:
            return self.decimal(value, max(0, 2 - magnitude))
        mantissa, exponent = f"{value:.2e}".split("e")
        written = self.decimal(float(mantissa), len(mantissa.rstrip("0").partition(".")[2]))
        power = f"10{str(int(exponent)).translate(_SUPERSCRIPTS)}"
        return power if written == "1" else f"{written}{_NARROW}×{_NARROW}{power}"

    def short(self, value: float | None) -> str:
        """A count to three digits: 1.44M in English, 1,44 M in French."""
        return self._scaled(value, _LARGE[self.code], _NARROW if self.code == "fr" else "", "")

    def flops(self, value: float | None) -> str:
        """A count of floating-point operations with an SI prefix."""
        return self._scaled(value, _SI, _NARROW, "FLOP")

    def bytes(self, value: float | None) -> str:
        """A size in decimal units: 3.04 MB in English, 3,04 Mo in French."""
        return self._scaled(value, _SI, _NARROW, "o" if self.code == "fr" else "B")

    def _scaled(self, value: float | None, steps: tuple[tuple[float, str], ...], gap: str, unit: str) -> str:
        if value is None or not math.isfinite(value):
            return ABSENT
        rounded = float(f"{value:.2e}")
        size, prefix = next((step for step in steps if abs(rounded) >= step[0]), (1.0, ""))
        if not prefix:
            return (f"{value:.0f}" if value == int(value) else self.number(value)) + (_NARROW + unit if unit else "")
        return f"{self.decimal(value / size, 2 - math.floor(math.log10(abs(rounded) / size)))}{gap}{prefix}{unit}"

    def duration(self, seconds: float | None) -> str:
        """Seconds in the two largest units that matter: 2 h 05 min in English, 3 j 4 h in French."""
        if seconds is None or not math.isfinite(seconds):
            return ABSENT
        text = re.sub(r"(?<=\d) ", _NARROW, duration(seconds)).replace(" ", "\u00a0")
        return text.replace("d", "j").replace(".", ",") if self.code == "fr" else text

    def percent(self, share: float | None, places: int = 1) -> str:
        """A share between 0 and 1 as a percentage."""
        if share is None or not math.isfinite(share):
            return ABSENT
        return self.decimal(100 * share, places) + (f"{_NARROW}%" if self.code == "fr" else "%")

    def score(self, value: float | None, error: float | None, *, is_share: bool = True) -> str:
        """A score with its standard error, both with the same decimals; in percent if it is a share."""
        if value is None or not math.isfinite(value):
            return ABSENT
        scale = 100.0 if is_share else 1.0
        places = 1 if is_share or not value else max(0, 2 - math.floor(math.log10(abs(value))))
        text = self.decimal(value * scale, places)
        if error and math.isfinite(error):
            text += f"{_NARROW}±{_NARROW}{self.decimal(error * scale, places)}"
        return text + self.percent(0, 0)[1:] * is_share

    def change(self, value: float, *, is_share: bool) -> str:
        """A signed difference of scores, of shares in points."""
        size = self.decimal(100 * abs(value), 1) if is_share else self.number(abs(value))
        return ("+" if value > 0 else "−" if value < 0 else "") + size + (f" {self('pts')}" if is_share else "")

    def listed(self, values: Sequence[int], most: int = 8) -> str:
        """Whole numbers after each other, cut short after `most`."""
        return ", ".join(map(self.count, values[:most])) + (" …" if len(values) > most else "")


def language_of(code: str | None) -> Language:
    """The language of a page for readers of `code`: English where there is no catalogue."""
    return Language(code if code in LANGUAGES else "en")
