"""Recipes are YAML 1.2: read by ruamel.yaml with the line of every key, and written back in one line."""

import datetime
import functools
import io
import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq, TaggedScalar
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from affinage.config.settings import Settings
from affinage.errors import UserError

MAX_BYTES = 1_000_000
Path = tuple[str | int, ...]
"""The keys and list indices that lead to a value, outermost first."""


class Document(NamedTuple):
    """A parsed text: its value, and the 1-based line of each path in it."""

    value: Any
    lines: dict[Path, int]


def parse(text: str, name: str) -> Document:
    """Parse one YAML document of mappings, lists, words and numbers; `name` says in errors where it came from.

    Raises:
        UserError: for anything else, for tags, anchors and duplicate keys; `where` is `name:line`.
    """
    if len(text) > MAX_BYTES:
        fix = "A recipe is a few kilobytes; text to train on is named by `data.sources`."
        raise UserError(f"this is larger than {MAX_BYTES:,} bytes", where=name, fix=fix)
    try:
        for event in YAML(pure=True).parse(text):
            if getattr(event, "anchor", None) or getattr(event, "tag", None):
                what = "tags, anchors and aliases are not allowed: a recipe holds words and numbers only"
                raise UserError(what, where=f"{name}:{event.start_mark.line + 1}", fix="Write the value out.")
        lines: dict[Path, int] = {(): 1}
        return Document(_plain(YAML(pure=True).load(text), (), lines, name), lines)
    except DuplicateKeyError as error:
        key = re.search(r'key "(.*?)"', error.problem or "")
        what = f"`{key[1] if key else '?'}` is given twice"
        raise UserError(what, where=_where(name, error), fix="Keep one of the two.") from None
    except MarkedYAMLError as error:
        what = "this is not valid YAML: " + ", ".join(filter(None, [error.context, error.problem]))
        raise UserError(what, where=_where(name, error), fix=_fix(text, error)) from None
    except (YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"this is not valid YAML: {str(error)[:200]}", where=name) from None


def _where(name: str, error: MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    return f"{name}:{mark.line + 1}" if mark else name


def _fix(text: str, error: MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    if mark and text.splitlines()[mark.line : mark.line + 1] and "\t" in text.splitlines()[mark.line]:
        return "Indent with spaces; YAML does not allow tabs."
    return "Look at the indentation, at quotes and brackets that are not closed, and at a `:` without a space after it."


def _plain(value: Any, path: Path, lines: dict[Path, int], name: str) -> Any:
    """The value as Python's own types; notes the line of each key and list entry."""
    if isinstance(value, CommentedMap):
        if value.merge:
            raise UserError("`<<` is not allowed", where=f"{name}:{lines[path]}", fix="Write the settings out.")
        found = {}
        for key, inner in value.items():
            line = value.lc.key(key)[0] + 1
            if isinstance(key, tuple | dict | list):
                raise UserError("a key must be a word", where=f"{name}:{line}")
            word = key if isinstance(key, str) else as_yaml(_scalar(key))
            lines[(*path, word)] = line
            found[word] = _plain(inner, (*path, word), lines, name)
        return found
    if isinstance(value, CommentedSeq):
        for index in range(len(value)):
            lines[(*path, index)] = value.lc.item(index)[0] + 1
        return [_plain(inner, (*path, index), lines, name) for index, inner in enumerate(value)]
    return _scalar(value)


def _scalar(value: Any) -> Any:
    if isinstance(value, datetime.date):  # a revision such as 2026-01-02 is a word
        return value.isoformat()
    if isinstance(value, TaggedScalar):  # a lone `=`
        return str(value.value)
    return next((kind(value) for kind in (bool, int, float, str) if isinstance(value, kind)), None)


def common(one: Sequence[str | int], other: Sequence[str | int]) -> int:
    """How many keys both paths begin with."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


def as_yaml(value: Any) -> str:
    """A value in one line of YAML, which reads back as the same value."""
    out = io.StringIO()
    _writer().dump(_dumped(value), out)
    return out.getvalue().removesuffix("\n").removesuffix("\n...")


@functools.cache
def _writer() -> YAML:
    writer = YAML(typ="safe", pure=True)
    writer.default_flow_style, writer.width = True, 10**9
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    return writer


def _dumped(value: Any) -> Any:
    if isinstance(value, Settings):
        return _dumped(value.model_dump())
    if isinstance(value, dict):
        return {key: _dumped(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list | frozenset):
        return [_dumped(inner) for inner in value]
    return _scalar(value)


def brief(value: Any, most: int = 60) -> str:
    """A value for people, in `most` characters: as YAML, without what is empty; text as it is."""
    text = value if isinstance(value, str) else as_yaml(_filled(value))
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _filled(value: Any) -> Any:
    if isinstance(value, list):
        return [_filled(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: _filled(each) for key, each in value.items() if each is not None and each not in ("", {}, [])}
