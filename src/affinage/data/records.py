"""What readers give: a record that can become a document, or one that cannot, with where it is and why."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from affinage.config.sources import SourceSettings

MAX_RECORD_BYTES = 128_000_000  # of one document; a longer one is skipped, so that memory stays bounded
_FIELD = re.compile(r"\{([^{}]+)\}")


@dataclass(frozen=True)
class Record:
    """One document as its file gives it. Fields the file does not have are empty."""

    id: str
    text: str
    source: str = ""
    language: str = ""
    url: str = ""
    licence: str = ""


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot become a document: a reason to count, and the place and particulars to show."""

    id: str
    reason: str
    detail: str
    text: str = ""


class DamagedFile(Exception):
    """A file that cannot be read to its end, or not as what its name says. `str()` of it tells why."""


NOT_ASKED_FOR = "not asked for"  # the reason of records that a source's `where` leaves out
BROKEN = ("not JSON", "not UTF-8", "not a JSON object", "no text key", "text is not a string", "binary", "too large")


def needed_columns(settings: SourceSettings) -> set[str]:
    """The top-level keys or columns that may be read for a record of this source."""
    keys = ["source", "language", "lang", "licence", "license", "metadata", *settings.filter]
    for key in (settings.text_key, settings.id_key, settings.url_key, settings.license_key):
        keys += _FIELD.findall(key) or [key]
    return {part for key in keys for part in (key, key.split(".", 1)[0])}


def record_of(fields: Mapping[str, Any], place: str, settings: SourceSettings) -> Record | BadRecord:
    """A record from a JSON object or the row of a table; its id is `place` if it has none of its own."""
    for key, wanted in settings.filter.items():
        value = plain(look_up(fields, key))
        if value not in ((wanted,) if isinstance(wanted, str) else wanted):
            return BadRecord(place, NOT_ASKED_FOR, f"{key} is {value!r}")
    text = look_up(fields, settings.text_key)
    if text is _MISSING:
        there = encodable(", ".join(map(str, fields)))
        return BadRecord(place, "no text key", f"no {settings.text_key!r} among the keys {there}")
    if not isinstance(text, str):
        kind = type(text).__name__
        return BadRecord(place, "text is not a string", f"{settings.text_key!r} is {kind}", str(text)[:200])
    if not text.strip():
        return BadRecord(place, "empty", f"{settings.text_key!r} is empty")
    licences = [settings.license_key] if settings.license_key else ["licence", "license"]
    return Record(
        id=_first(fields, [settings.id_key]) or place,
        text=encodable(text),
        source=_first(fields, ["source"]),
        language=_first(fields, ["language", "lang"]),
        url=_filled_in(fields, settings.url_key),
        licence=_first(fields, licences),
    )


_MISSING: Any = object()


def look_up(fields: Mapping[str, Any], key: str) -> Any:
    """The value of a key; `a.b` is the key of that name, or else the key b within a."""
    if key in fields:
        return fields[key]
    outer, dot, inner = key.partition(".")
    within = fields.get(outer) if dot else None
    return look_up(within, inner) if isinstance(within, Mapping) else _MISSING


def plain(value: Any) -> str:
    """A word or whole number as text, a list of words joined; "" for anything else."""
    if isinstance(value, list):
        return ", ".join(filter(None, map(plain, value)))
    if isinstance(value, bool) or not isinstance(value, str | int):
        return ""
    return encodable(str(value))


def _first(fields: Mapping[str, Any], keys: list[str]) -> str:
    return next(filter(None, (plain(look_up(fields, key)) for key in keys)), "")


def _filled_in(fields: Mapping[str, Any], pattern: str) -> str:
    """The value of a key, or a pattern with the values of its keys; "" if one of them has none."""
    keys = _FIELD.findall(pattern)
    if not keys:
        return plain(look_up(fields, pattern))
    values = {key: plain(look_up(fields, key)) for key in keys}
    return _FIELD.sub(lambda match: values[match[1]], pattern) if all(values.values()) else ""


def encodable(text: str) -> str:
    """The text with lone surrogates (JSON's \\ud800) replaced by U+FFFD: UTF-8 has no form for them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
