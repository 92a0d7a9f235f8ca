"""YAML as plain values, with the line that every key and list entry stands on."""

import re
from dataclasses import dataclass
from typing import Any

import yaml

from affinage.errors import UserError

Path = tuple[str | int, ...]  # the keys and list indices that lead to a value, outermost first

_RESOLVED = {  # scalar tags of the YAML 1.2 core schema: `no` stays a word, 1e-3 is a number, 12:30 is a word
    "null": re.compile(r"~|null|Null|NULL|"),
    "bool": re.compile(r"true|True|TRUE|false|False|FALSE"),
    "int": re.compile(r"[-+]?[0-9][0-9_]*"),
    "float": re.compile(
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
    ),
}

_COLLECTIONS = {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}
_TAG = "the tag `{}` is not allowed: a recipe holds words and numbers only"
_MOST_VALUES = 100_000
_MOST_DIGITS = 100

# What SafeLoader's own resolver (YAML 1.1) may call a scalar that has no tag; which of them it is, is decided here.
_PLAIN_TAGS = {
    f"tag:yaml.org,2002:{kind}" for kind in ("str", "null", "bool", "int", "float", "timestamp", "merge", "value")
}


@dataclass(frozen=True)
class Marked:
    """A parsed text: its value, and the 1-based line of each path in it."""

    value: Any
    lines: dict[Path, int]


def parse(text: str, name: str) -> Marked:
    """Parse one YAML document of mappings, lists and scalars; `name` says in errors where it came from.

    Numbers and words are told apart by the YAML 1.2 core schema, with `_` allowed between digits. Duplicate keys,
    tags and keys that are not words are refused.

    Raises:
        UserError: the text is not such a document; `where` is `name:line`.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        what = "this is not valid YAML: " + ", ".join(filter(None, [error.context, error.problem]))
        raise UserError(what, where=where, fix=_yaml_fix(text, mark.line if mark else 0)) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"this is not valid YAML: {error}", where=name) from None
    lines: dict[Path, int] = {}
    try:
        return Marked(None if root is None else _value(root, (), lines, name, frozenset()), lines)
    except RecursionError:
        raise UserError("this is nested too deeply", where=name) from None


def _yaml_fix(text: str, line: int) -> str:
    source = text.splitlines()[line] if line < len(text.splitlines()) else ""
    if source.startswith("\t") or source.lstrip(" ").startswith("\t"):
        return "Indent with spaces; YAML does not allow tabs."
    return "Look at the indentation, at quotes and brackets that are not closed, and at a `:` without a space after it."


def _value(node: yaml.Node, path: Path, lines: dict[Path, int], name: str, above: frozenset[int]) -> Any:
    where = f"{name}:{node.start_mark.line + 1}"
    if id(node) in above:
        raise UserError("this alias contains itself", where=where)
    if len(lines) > _MOST_VALUES:  # a few aliases of aliases can stand for billions
        raise UserError(f"this holds more than {_MOST_VALUES:,} values", where=where)
    if not isinstance(node, yaml.ScalarNode) and node.tag not in _COLLECTIONS:
        raise UserError(_TAG.format(node.tag), where=where)
    above = above | {id(node)}
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode):
                raise UserError("a key must be a word", where=f"{name}:{line}")
            if key in mapping:
                first = lines[(*path, key)]
                raise UserError(
                    f"`{key}` is given twice, here and in line {first}",
                    where=f"{name}:{line}",
                    fix="Keep one of the two.",
                )
            lines[(*path, key)] = line
            mapping[key] = _value(value_node, (*path, key), lines, name, above)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_value(child, (*path, index), lines, name, above) for index, child in enumerate(node.value)]
    assert isinstance(node, yaml.ScalarNode)
    return _scalar(node, where)


def _scalar(node: yaml.ScalarNode, where: str) -> Any:
    if node.tag not in _PLAIN_TAGS:
        raise UserError(_TAG.format(node.tag), where=where)
    text: str = node.value
    if node.style is not None:
        return text
    if _RESOLVED["null"].fullmatch(text):
        return None
    if _RESOLVED["bool"].fullmatch(text):
        return text.lower() == "true"
    if _RESOLVED["int"].fullmatch(text) and len(text) > _MOST_DIGITS:
        raise UserError(f"this number has {len(text):,} digits", where=where)
    if _RESOLVED["int"].fullmatch(text):
        return int(text.replace("_", ""))
    if _RESOLVED["float"].fullmatch(text):
        return float(text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan").lower())
    return text
