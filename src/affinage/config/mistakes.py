"""What pydantic finds wrong with a recipe, said in plain sentences."""

import difflib
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from affinage.config.settings import Settings
from affinage.config.yaml_text import as_yaml
from affinage.errors import UserError, did_you_mean, meant

_WANTED = {  # pydantic's error types that mean "another kind of value is needed here"
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "a word or text",
    "tuple": "a list, such as [a, b]",
    "list": "a list, such as [a, b]",
    "dict": "a mapping of keys to values",
    "model": "a mapping of settings",
}
_ELSEWHERE = 3  # places that are suggested
_ALIKE, _SIMILAR = 0.75, 0.6  # of names, by difflib: certain enough to be sought in all places; worth a suggestion
_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def explain(
    error: ValidationError,
    model: type[Settings],
    raw: Any,
    locate: Callable[[Sequence[str | int]], str],
    within: Sequence[str] = (),
) -> UserError:
    """Turn all findings of `error` about `raw`, parsed as `model`, into one message with a line for each.

    `within` is where in the recipe `raw` stands: names that are suggested begin with it, so that they can be pasted.
    """
    found: dict[tuple[str, str, str], None] = {}  # an ordered set: unions report the same value several times
    for details in _without_union_echoes(error.errors(include_url=False), raw):
        path, what, fix = _sentence(details, model, raw, within)
        if details["type"] == "too_short" and details["input"]:
            continue  # pydantic leaves out the entries with mistakes of their own, and then finds too few
        found[(locate(path), what, fix)] = None
    mistakes = [UserError(what, where=where, fix=fix) for where, what, fix in sorted(found, key=_reading_order)]
    if len(mistakes) == 1:
        return mistakes[0]
    return UserError(f"the recipe has {len(mistakes)} mistakes\n" + "\n".join(map(str, mistakes)))


def _reading_order(found: tuple[str, str, str]) -> tuple[str, int]:
    file, _, line = found[0].rpartition(":")
    return file, int(line) if line.isdigit() else 0


def _without_union_echoes(errors: list[ErrorDetails], raw: Any) -> list[ErrorDetails]:
    """Of a union pydantic reports once per member: keep what says most of one mistake.

    That is a literal's finding, which names the words; what is wrong within the value, if a member has come so far; or
    one finding that says all that would do.
    """
    by_path: dict[tuple[str | int, ...], list[ErrorDetails]] = {}
    for details in errors:
        by_path.setdefault(_written(details["loc"], raw), []).append(details)
    kept: list[ErrorDetails] = []
    for path, group in by_path.items():
        literal = [details for details in group if details["type"] == "literal_error" and len(group) > 1]
        kinds = dict.fromkeys(wanted for details in group if (wanted := _wanted(details["type"])))
        if literal or len(kinds) < len(group):
            kept.extend(literal or group)
        elif not any(len(other) > len(path) and other[: len(path)] == path for other in by_path):
            kept.append({**group[0], "ctx": {"wanted": ", or ".join(kinds)}} if len(kinds) > 1 else group[0])
    return kept


def _wanted(kind: str) -> str:
    """What kind of value is needed where pydantic reports this type of error; "" if it is another error."""
    return "" if kind == "int_from_float" else _WANTED.get(kind.partition("_")[0], "")


def _written(loc: Sequence[str | int], raw: Any) -> tuple[str | int, ...]:
    """The part of pydantic's location that leads to something in the recipe (unions add type names to it)."""
    value, path = raw, []
    for key in loc:
        if _is_tag(key, value):
            continue
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            break
        path.append(key)
    return tuple(path)


def _is_tag(key: str | int, value: Any) -> bool:
    """Whether a part of a location names the member of a union, by its `kind`, its class or its type, and no key."""
    if not isinstance(value, dict) or key in value:
        return False
    named = isinstance(key, str) and (key.endswith(Settings.__name__) or key.startswith("dict["))
    return named or value.get("kind") == key


def _sentence(
    details: ErrorDetails, model: type[Settings], raw: Any, within: Sequence[str]
) -> tuple[tuple[str | int, ...], str, str]:
    """(path, what is wrong, what to do) of one finding."""
    kind, loc, context = details["type"], details["loc"], details.get("ctx", {})
    path = _written(loc, raw)
    dotted = ".".join(map(str, path)) or "the recipe"
    given = _shown(details["input"])
    if kind == "missing":
        missing = str(loc[-1])
        return (
            path,
            f"`{'.'.join(map(str, (*path, missing)))}` is missing",
            f"Add `{missing}:` {_needed(model, loc)}".rstrip() + ".",
        )
    if kind == "extra_forbidden":
        return path, f"`{dotted}` is not a setting", _suggestion(path, _keys(model, loc[:-1]), model, raw, within)
    if kind == "union_tag_not_found":
        return path, f"`{dotted}.kind` is missing", "Add `kind:`."
    if kind == "union_tag_invalid":
        words = [word.strip(" '\"") for word in context["expected_tags"].split(",")]
        what = f"`{dotted}.kind` is {_shown(context['tag'])}, and must be one of: {', '.join(words)}"
        return (*path, "kind"), what, did_you_mean(context["tag"], words)
    if kind == "literal_error":
        words = [word.strip(" '\"") for word in context["expected"].replace(" or ", ", ").split(",")]
        if loc[-1] == "[key]":
            return path, f"`{dotted}` is not a setting", _suggestion(path, words, model, raw, within)
        also = "a whole number, or " if loc[-1:] != path[-1:] else ""  # the last part is then a member of a union
        return (
            path,
            f"`{dotted}` is {given}, and must be {also}one of: {', '.join(words)}",
            did_you_mean(str(details["input"]), words),
        )
    if kind in _BOUNDS:
        words_, bound = _BOUNDS[kind]
        return path, f"`{dotted}` is {given}, and must be {words_} {context[bound]}", ""
    if kind == "too_short":
        return path, f"`{dotted}` is empty, and needs at least {context['min_length']}", ""
    if kind == "string_pattern_mismatch":
        return path, f"`{dotted}` is {given}, and may hold letters, digits, `.`, `_` and `-` only", ""
    if kind in ("value_error", "assertion_error"):
        return path, f"`{dotted}`: {context['error']}", ""
    if kind == "int_from_float":
        return path, f"`{dotted}` is {given}, and must be a whole number", ""
    if wanted := context.get("wanted") or _wanted(kind):
        example = _example(settings_at(model, loc), path) if kind.startswith("model") else ""
        return path, f"`{dotted}` is {given}, and must be {wanted}", example
    return path, f"`{dotted}` is {given}: {details['msg']}", ""


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if value is None:
        return "empty"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text[:60]}`" + ("..." if len(text) > 60 else "")


def _suggestion(
    path: Sequence[str | int], here: Sequence[str], model: type[Settings], raw: Any, within: Sequence[str]
) -> str:
    """The setting that is meant by `path`, by its whole name: one beside it, else one that stands in another place."""
    place = [*map(str, path)]
    question = meant(".".join([*within, *likely]) for likely in _likely(place, here, model, raw))
    return question or ("Settings here: " + ", ".join(here) + "." if here else "")


def _likely(path: list[str], here: Sequence[str], model: type[Settings], raw: Any) -> Sequence[Sequence[str]]:
    """The settings that `path` may be meant for, of those that stand `here` and of all others."""
    *around, word = path
    everywhere = list(_places(model))

    def beside(cutoff: float) -> list[Sequence[str]]:
        return [[*around, name] for name in difflib.get_close_matches(word, here, n=1, cutoff=cutoff)]

    def abbreviated() -> list[Sequence[str]]:
        beginnings = {name[: len(word) + 1]: name for name in here}
        found = difflib.get_close_matches(word, beginnings, n=1, cutoff=_ALIKE)
        return [[*around, beginnings[beginning]] for beginning in found]

    def elsewhere(name: str) -> list[Sequence[str]]:
        return _nearest([place for place in everywhere if place[-1] == name], path, raw)

    alike = difflib.get_close_matches(word, {place[-1] for place in everywhere}, n=1, cutoff=_ALIKE)
    return (
        beside(_ALIKE)
        or abbreviated()
        or elsewhere(word)
        or beside(_SIMILAR)
        or [place for name in alike for place in elsewhere(name)]
    )


def _nearest(places: list[Sequence[str]], path: Sequence[str], raw: Any) -> list[Sequence[str]]:
    """At most _ELSEWHERE of some places: those in the sections around `path`, and of others in those written down."""
    most = max((_shared(place, path) for place in places), default=0)
    near = [place for place in places if _shared(place, path) == most]
    written = [place for place in near if len(place) == 1 or place[0] in raw]
    return sorted(written or near, key=len)[:_ELSEWHERE]


def _shared(one: Sequence[str], other: Sequence[str]) -> int:
    """How many keys both begin with."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _places(model: type[Settings], around: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The keys that lead to each setting, without those that stand in lists."""
    for name, field in model.model_fields.items():
        place = (*around, name)
        yield place
        if get_origin(field.annotation) is dict:
            key = get_args(field.annotation)[0]
            yield from ((*place, word) for word in get_args(key) if get_origin(key) is typing.Literal)
        for inner in _settings_in(field.annotation, in_lists=False):
            yield from _places(inner, place)


def _needed(model: type[Settings], loc: Sequence[str | int]) -> str:
    """What the missing key should hold, for the message."""
    parent = settings_at(model, loc[:-1])
    annotation = parent.model_fields[str(loc[-1])].annotation if parent else None
    names = {int: "a whole number", float: "a number", str: "a name"}
    return f"with {names[annotation]}" if annotation in names else ""


def _example(settings: type[Settings] | None, path: Sequence[str | int]) -> str:
    """What a section may look like: one setting with its default; where it needs some, their names."""
    if settings is None:
        return ""
    fields = settings.model_fields
    plain = [(key, field.default) for key, field in fields.items() if isinstance(field.default, int | float | str)]
    key, value = next(((key, value) for key, value in plain if value != ""), ("", ""))
    if not key or any(field.is_required() for field in fields.values()) or not isinstance(path[-1], str):
        return f"Settings here: {', '.join(fields)}."
    return f"For example: {path[-1]}: {{{key}: {as_yaml(value)}}}"


def _keys(model: type[Settings], loc: Sequence[str | int]) -> list[str]:
    settings = settings_at(model, loc)
    return list(settings.model_fields) if settings else []


def settings_at(model: type[Settings], loc: Sequence[str | int]) -> type[Settings] | None:
    """The settings class that stands at `loc` below `model`, or None where there is none."""
    current: list[type[Settings]] = [model]  # the members of a union
    for key in loc:
        if isinstance(key, int):
            continue  # an entry of a list is described by the list's annotation
        chosen = [member for member in current if _has_kind(member, key) or member.__name__ == key]
        if chosen and len(current) > 1:
            current = chosen
            continue
        fields = next((member.model_fields for member in current if key in member.model_fields), None)
        if fields is None:
            return None
        current = _settings_in(fields[key].annotation)
    return current[0] if current else None


def _has_kind(member: type[Settings], kind: str) -> bool:
    return "kind" in member.model_fields and kind in get_args(member.model_fields["kind"].annotation)


def _settings_in(annotation: Any, *, in_lists: bool = True) -> list[type[Settings]]:
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    lists = (tuple, list) if in_lists else ()
    if get_origin(annotation) in (types.UnionType, typing.Union, typing.Annotated, *lists):
        return [found for member in get_args(annotation) for found in _settings_in(member, in_lists=in_lists)]
    return []


def admits_null(model: type[Settings], loc: Sequence[str | int]) -> bool:
    """Whether the setting at `loc` may be null; true where the settings classes do not say."""
    parent = settings_at(model, loc[:-1])
    if parent is None or str(loc[-1]) not in parent.model_fields:
        return True
    annotation = parent.model_fields[str(loc[-1])].annotation
    return annotation is Any or type(None) in get_args(annotation)
