"""Recipes are YAML 1.2: read by ruamel.yaml with the line of every key, and printed in one line."""

import datetime
import itertools
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq, TaggedScalar
from ruamel.yaml.error import MarkedYAMLError

from affinage.errors import UserError

MAX_BYTES = 1_000_000
_DEEPEST = 100  # brackets within brackets
_PLAIN = re.compile(r'(?<!\\)"((?!(?i:true|false|null)")[^\W\d][\w./-]*)"')
Path = tuple[str | int, ...]  # the keys and list indices that lead to a value, outermost first


class Document(NamedTuple):
    """A parsed text: its value, and the 1-based line of each path in it."""

    value: Any
    lines: dict[Path, int]


def parse(text: str, name: str) -> Document:
    """Parse one YAML document of mappings, lists, words and numbers; `name` is what errors call it.

    Raises:
        UserError: for anything else, for tags, anchors and duplicate keys; `where` is `name:line`.
    """
    if len(text) > MAX_BYTES:
        fix = "A recipe is a few kilobytes; `data.sources` names the text to train on."
        raise UserError(f"this is larger than {MAX_BYTES:,} bytes", where=name, fix=fix)
    lines: dict[Path, int] = {(): 1}
    fix = "Check indentation (spaces, no tabs), quotes, brackets that are not closed, and `:` without a space after it."
    steps = (1 if bracket in "[{" else -1 for bracket in re.findall(r"[][{}]", text))
    if max(itertools.accumulate(steps, initial=0)) > _DEEPEST:  # deep ones take the parser minutes
        raise UserError("brackets are nested too deeply", where=name, fix=fix)
    try:
        for event in YAML(pure=True).parse(text):
            if getattr(event, "anchor", None) or getattr(event, "tag", None) or getattr(event, "value", "") == "<<":
                what = "tags, anchors and aliases are not allowed: a recipe holds words and numbers only"
                raise UserError(what, where=f"{name}:{event.start_mark.line + 1}", fix="Write the value out.")
        return Document(_plain(YAML(pure=True).load(text), (), lines), lines)
    except UserError:
        raise
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        problem = ", ".join(filter(None, [error.context, error.problem])).partition("\n")[0]
        raise UserError(f"this is not valid YAML: {problem}", where=where, fix=fix) from None
    except Exception as error:  # whatever ruamel.yaml raises for odd keys and characters
        raise UserError(f"this is not valid YAML: {str(error)[:200]}", where=name, fix=fix) from None


def _plain(value: Any, path: Path, lines: dict[Path, int]) -> Any:
    """Return the value in Python's own types, and note the line of each key and list entry."""
    if isinstance(value, CommentedMap):
        plain = {}
        for key, inner in value.items():
            if isinstance(key, tuple | Mapping):
                raise ValueError("a key must be a word or a number")
            word = key if isinstance(key, str) else as_yaml(_plain(key, path, lines))
            lines[(*path, word)] = value.lc.key(key)[0] + 1
            plain[word] = _plain(inner, (*path, word), lines)
        return plain
    if isinstance(value, CommentedSeq):
        lines.update({(*path, index): value.lc.item(index)[0] + 1 for index in range(len(value))})
        return [_plain(inner, (*path, index), lines) for index, inner in enumerate(value)]
    if isinstance(value, datetime.date):  # a revision such as 2026-01-02 is a word
        return value.isoformat()
    if isinstance(value, TaggedScalar):  # a lone `=`
        return str(value.value)
    return next((kind(value) for kind in (bool, int, float, str) if isinstance(value, kind)), None)


def as_yaml(value: Any) -> str:
    """Return a value in one line of YAML, which reads back as the same value: JSON without quotes of plain words."""
    text = json.dumps(value, default=lambda each: each.model_dump(mode="json"), ensure_ascii=False)
    return _PLAIN.sub(r"\1", text)


def brief(value: Any, most: int = 60) -> str:
    """Return a value for people in `most` characters: as YAML, text as it is."""
    text = value if isinstance(value, str) else as_yaml(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."
