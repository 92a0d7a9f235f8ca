"""What every setting means, read from the classes that hold it: its type, bounds, default and the comment beside it."""

import ast
import inspect
import io
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from affinage.config.settings import Settings
from affinage.config.yaml_text import as_yaml

_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "any value"}


class Setting(NamedTuple):
    """One key of a recipe."""

    key: str  # dotted; `*` stands for a name of the user's, `[]` for a place in a list
    type: str  # in words, with bounds
    default: str  # as YAML, "" where the key must be given
    meaning: str  # "" where the name says it all


class Section(NamedTuple):
    """The settings of one class, as they stand in one place of the recipe."""

    key: str  # "" for the recipe itself
    meaning: str
    settings: tuple[Setting, ...]


def sections(model: type[Settings], key: str = "") -> Iterator[Section]:
    """The class's own settings, then those of the classes inside it, depth first."""
    inside: list[tuple[str, type[Settings]]] = []
    found = []
    for name, field in model.model_fields.items():
        dotted = f"{key}.{name}" if key else name
        inner = [(dotted + suffix, child) for suffix, child in _classes(field.annotation)]
        inside += inner
        default = "" if field.is_required() else _default(field, bool(inner))
        found.append(Setting(dotted, _type(field), default, comments(model).get(name, "")))
    yield Section(key, inspect.cleandoc(model.__doc__ or ""), tuple(found))
    for dotted, child in inside:
        yield from sections(child, dotted)


def classes_inside(model: type[Settings]) -> set[type[Settings]]:
    """The settings classes that values of `model` are made of, itself included."""
    found, waiting = set(), [model]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting += [child for field in current.model_fields.values() for _, child in _classes(field.annotation)]
    return found


@cache
def comments(model: type[Settings]) -> dict[str, str]:
    """The comment of each field, its class's or the one it is inherited from: beside it, or in the lines above it."""
    found: dict[str, str] = {}
    for owner in reversed(model.__mro__):
        if issubclass(owner, Settings) and owner is not Settings:
            found |= _own_comments(owner)
    return {name: text for name, text in found.items() if name in model.model_fields}


def _own_comments(model: type[Settings]) -> dict[str, str]:
    source = textwrap.dedent(inspect.getsource(model))
    beside: dict[int, str] = {}
    alone: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            whole_line = not token.line[: token.start[1]].strip()
            (alone if whole_line else beside)[token.start[0]] = token.string.lstrip("# ").strip()
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for node in body.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        first = node.lineno
        while first - 1 in alone:
            first -= 1
        lines = [alone[line] for line in range(first, node.lineno)]
        lines += [beside[line] for line in range(node.lineno, (node.end_lineno or node.lineno) + 1) if line in beside]
        found[node.target.id] = " ".join(lines)
    return found


def _classes(annotation: Any, suffix: str = "") -> Iterator[tuple[str, type[Settings]]]:
    """The settings classes in a type, and where in a value of it they stand."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        yield suffix, annotation
        return
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _classes(inner[0], suffix)
    elif origin in (tuple, list):
        yield from _classes(inner[0], f"{suffix}[]")
    elif origin is dict:
        yield from _classes(inner[1], f"{suffix}.*")
    elif origin in (typing.Union, types.UnionType):
        for member in inner:
            yield from _classes(member, suffix)


def _type(field: FieldInfo) -> str:
    text = _words(field.annotation)
    bounds = [
        f"{sign} {bound:g}"
        for constraint in field.metadata
        for name, sign in _BOUNDS.items()
        if (bound := getattr(constraint, name, None)) is not None
    ]
    return f"{text} {', '.join(bounds)}" if bounds else text


def _words(annotation: Any) -> str:
    if annotation in _WORDS:
        return _WORDS[annotation]
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return "section"
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(inner[0])
    if origin is Literal:
        return " | ".join(str(word) for word in inner)
    if origin in (tuple, list):
        return f"list of {_words(inner[0])}"
    if origin is dict:
        return f"mapping of {_words(inner[0])} to {_words(inner[1])}"
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(_words(member) for member in inner if member is not type(None)))
    return getattr(annotation, "__name__", str(annotation))


def _default(field: FieldInfo, is_section: bool) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined or isinstance(value, Settings):
        return "its own defaults"
    if value is None:
        return "none" if not is_section else "left out"
    return as_yaml(value)
