"""A value in one line of YAML, which reads back as the same value."""

import math
from typing import Any

from affinage.config.settings import Settings

_WORDS = ("null", "true", "false", "yes", "no", "on", "off")


def as_yaml(value: Any) -> str:
    """A value as it would be written in one line of a recipe: quoted where YAML would read something else."""
    if isinstance(value, Settings):
        value = value.model_dump()
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return value if _is_plain(value) else _quoted(value)
        case float():
            return _float(value)
        case dict():
            return "{" + ", ".join(f"{as_yaml(key)}: {as_yaml(inner)}" for key, inner in value.items()) + "}"
        case tuple() | list() | frozenset():
            return "[" + ", ".join(map(as_yaml, value)) + "]"
        case _:
            return str(value)


def brief(value: Any, most: int = 60) -> str:
    """A value for people, in `most` characters: as YAML, of mappings without what is empty; text as it is."""
    text = value if isinstance(value, str) else as_yaml(_filled(value))
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _filled(value: Any) -> Any:
    if isinstance(value, list):
        return [_filled(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: _filled(each) for key, each in value.items() if each is not None and each not in ("", {}, [])}


def _float(value: float) -> str:
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    text = repr(value)
    return text if "." in text else text.replace("e", ".0e")  # 1e-05 is text to YAML


def _is_plain(text: str) -> bool:
    letters = all(letter.isalnum() or letter in "_/." for letter in text)
    return letters and text[:1].isalpha() and text.lower() not in _WORDS


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
