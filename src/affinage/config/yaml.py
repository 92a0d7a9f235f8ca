"""Recipes are YAML 1.2: read by ruamel.yaml with the line of every key, and printed in one line."""

import json
import re
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from affinage.errors import UserError, first_line

MAX_BYTES = 1_000_000
_DEEPEST = 100  # lists and mappings within each other; the parser takes minutes for many thousands
_NUMBERS = ("int", "float", "bool", "null")
_TAGS = (*_NUMBERS, "map", "seq", "str", "timestamp", "value", "merge")  # what is written without any tag
_PLAIN = re.compile(r'(?<!\\)"((?!(?i:true|false|null)")[^\W\d][\w./-]*)"')
Path = tuple[str | int, ...]  # the keys and list indices that lead to a value, outermost first


def parse(text: str | bytes, name: str) -> tuple[Any, dict[Path, int]]:
    """Parse one YAML document of mappings, lists, words and numbers; `name` is what errors call it.

    Returns its value, and the 1-based line of each path in it. Raises UserError, whose `where` is `name:line`, for
    anything else, for tags of other types, anchors and duplicate keys.
    """
    if len(text) > MAX_BYTES:
        fix = "A recipe is a few kilobytes; `data.sources` names the text to train on."
        raise UserError(f"this is larger than {MAX_BYTES:,} bytes", where=name, fix=fix)
    lines: dict[Path, int] = {(): 1}
    reader = YAML(typ="safe", pure=True)
    reader.max_depth = _DEEPEST
    try:
        root = reader.compose(text)
        return None if root is None else _plain(root, (), lines, reader.constructor), lines
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        problem = ", ".join(filter(None, [error.context, error.problem])).partition("\n")[0]
    except Exception as error:  # whatever ruamel.yaml raises for odd characters and numbers
        where, problem = name, first_line(error)
    fix = "Check the encoding (UTF-8), indentation (no tabs), quotes, open brackets, and `:` without a space after it."
    raise UserError(f"this is not valid YAML: {problem}", where=where, fix=fix)


def _plain(node: Node, path: Path, lines: dict[Path, int], constructor: Any) -> Any:
    """Return the value of a node in Python's own types, and note the line of each key and list entry in it."""
    tag = str(node.tag).removeprefix("tag:yaml.org,2002:")
    if node.anchor or tag not in _TAGS:
        problem = "tags, anchors and aliases are not allowed; write the value out"
        raise MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    if isinstance(node, SequenceNode):
        lines |= {(*path, index): entry.start_mark.line + 1 for index, entry in enumerate(node.value)}
        return [_plain(entry, (*path, index), lines, constructor) for index, entry in enumerate(node.value)]
    if isinstance(node, MappingNode):
        plain: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, ScalarNode) or key.value in plain:
                problem = f"duplicate key `{key.value}`" if isinstance(key, ScalarNode) else "a key must be a word"
                raise MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            lines[(*path, key.value)] = key.start_mark.line + 1
            plain[key.value] = _plain(value, (*path, key.value), lines, constructor)
        return plain
    return constructor.construct_object(node) if tag in _NUMBERS else node.value


def as_yaml(value: Any) -> str:
    """Return a value in one line of YAML, which reads back as the same value: JSON without quotes of plain words."""
    text = json.dumps(value, default=lambda each: each.model_dump(mode="json"), ensure_ascii=False)
    return _PLAIN.sub(r"\1", text)


def brief(value: Any, most: int = 60) -> str:
    """Return a value for people in `most` characters: as YAML, text as it is."""
    text = value if isinstance(value, str) else as_yaml(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."
