"""Recipes are YAML 1.2: read by ruamel.yaml with the line of every key, and written back in one line."""

import datetime
import itertools
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq, TaggedScalar
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from affinage.errors import UserError

MAX_BYTES = 1_000_000
_PLAIN = re.compile(r'(?<!\\)"((?!(?i:true|false|null)")[^\W\d][\w./-]*)"')
Path = tuple[str | int, ...]  # the keys and list indices that lead to a value, outermost first


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
    lines: dict[Path, int] = {(): 1}
    fix = "Check the indentation, quotes and brackets that are not closed, and each `:` without a space after it."
    try:
        for event in YAML(pure=True).parse(text):
            if getattr(event, "anchor", None) or getattr(event, "tag", None) or getattr(event, "value", "") == "<<":
                what = "tags, anchors and aliases are not allowed: a recipe holds words and numbers only"
                raise UserError(what, where=f"{name}:{event.start_mark.line + 1}", fix="Write the value out.")
        return Document(_plain(YAML(pure=True).load(text), (), lines, name), lines)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = "this is not valid YAML: " + ", ".join(filter(None, [error.context, error.problem]))
        if isinstance(error, DuplicateKeyError):
            what, fix = f"`{str(error.problem).split(chr(34))[1]}` is given twice", "Keep one of the two."
        elif mark and "\t" in "".join(text.splitlines()[mark.line : mark.line + 1]):
            fix = "Indent with spaces; YAML does not allow tabs."
        raise UserError(what, where=f"{name}:{mark.line + 1}" if mark else name, fix=fix) from None
    except (YAMLError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:  # of odd keys
        raise UserError(f"this is not valid YAML: {str(error)[:200]}", where=name, fix=fix) from None


def _plain(value: Any, path: Path, lines: dict[Path, int], name: str) -> Any:
    """The value as Python's own types; notes the line of each key and list entry."""
    if isinstance(value, CommentedMap):
        found = {}
        for key, inner in value.items():
            line = value.lc.key(key)[0] + 1
            if isinstance(key, tuple | dict | list):
                raise UserError("a key must be a word", where=f"{name}:{line}", fix="Put a quoted word in its place.")
            word = key if isinstance(key, str) else as_yaml(_scalar(key))
            lines[(*path, word)] = line
            found[word] = _plain(inner, (*path, word), lines, name)
        return found
    if isinstance(value, CommentedSeq):
        lines.update({(*path, index): value.lc.item(index)[0] + 1 for index in range(len(value))})
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
    """A value in one line of YAML, which reads back as the same value: JSON without the quotes of plain words."""
    text = json.dumps(value, default=lambda each: each.model_dump(mode="json"), ensure_ascii=False)
    return _PLAIN.sub(r"\1", text)


def brief(value: Any, most: int = 60) -> str:
    """A value for people, in `most` characters: as YAML, without what is empty; text as it is."""

    def filled(each: Any) -> Any:
        if isinstance(each, dict):
            return {k: filled(inner) for k, inner in each.items() if inner is not None and inner not in ("", {}, [])}
        return list(map(filled, each)) if isinstance(each, list) else each

    text = value if isinstance(value, str) else as_yaml(filled(value))
    return text if len(text) <= most else f"{text[: most - 3]}..."
