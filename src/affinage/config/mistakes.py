"""What pydantic finds wrong with a recipe, in plain sentences: where, which key, the nearest known name."""

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from affinage.config.settings import Settings, classes_in
from affinage.config.yaml import Path, as_yaml, common
from affinage.errors import UserError, did_you_mean, meant

_WANTED = {  # the beginnings of pydantic's error types -> what is needed
    "int_from_float": "a whole number",
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "byte_size": "a number of bytes, such as 40MB",
    "bool": "true or false",
    "string_type": "a word or text",
    "tuple": "a list, such as [a, b]",
    "list": "a list, such as [a, b]",
    "dict": "a mapping of keys to values",
    "model": "a mapping of settings",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "literal_error": "one of: {expected}",
}
_FORMS = {  # what settings with a pattern hold
    "name": "letters, digits, `.`, `_` and `-`, without a slash",
    "remote": "the URL of a folder, such as s3://bucket/runs",
    "profile": "a step, or a range such as 20-25",
    "sha256": "64 hexadecimal digits",
}
_OF_A_TRAINING = re.compile(r"`(pretrain|sft|dpo)\.")
_ELSEWHERE = 3  # places that are suggested
_ALIKE, _SIMILAR = 0.75, 0.6  # of names, by difflib: enough to be sought in all places; worth a suggestion


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
    groups: dict[Path, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        groups.setdefault(written(details["loc"], raw), []).append(details)
    found: dict[tuple[str, ...], list[UserError]] = {}
    for path, group in groups.items():
        # A union reports once for each member: what is wrong within the value says more than what it is not. Entries
        # of a list with mistakes of their own are missing from its length.
        inside = any(len(other) > len(path) and other[: len(path)] == path for other in groups)
        if inside and all(_wanted(details) or details["type"] == "too_short" for details in group):
            continue
        for what, fix in _sentences(path, group, model, raw, within):
            mistake = UserError(what, where=locate(path), fix=fix)
            as_shared = tuple(_OF_A_TRAINING.sub("`training.", text) for text in (mistake.where, what, fix))
            found.setdefault(as_shared, []).append(mistake)
    # What `training` gives for several trainings is one mistake.
    mistakes = [
        same[0] if len(same) == 1 else UserError(what, where=where, fix=fix)
        for (where, what, fix), same in found.items()
    ]
    if len(mistakes) == 1:
        return mistakes[0]
    places = [mistake.where.rpartition(":") for mistake in mistakes]
    order = [(file, int(line) if line.isdigit() else 0) for file, _, line in places]
    lines = [str(mistake) for _, mistake in sorted(zip(order, mistakes), key=lambda pair: pair[0])]
    return UserError(f"the recipe has {len(mistakes)} mistakes\n" + "\n".join(lines))


def written(loc: Sequence[str | int], raw: Any) -> Path:
    """The part of pydantic's location that leads to something in the recipe; for unions it adds names of types."""
    value, path = raw, []
    for key in loc:
        try:
            value = value[key]
            path.append(key)
        except (KeyError, IndexError, TypeError):
            of_a_type = isinstance(key, str) and (key.endswith(Settings.__name__) or "[" in key)
            is_kind = isinstance(value, dict) and value.get("kind") == key
            if isinstance(value, dict | list) and not of_a_type and not is_kind:
                break
    return tuple(path)


def _wanted(details: ErrorDetails) -> str:
    """What is needed in place of the value; "" for other kinds of mistakes."""
    words = next((words for kind, words in _WANTED.items() if details["type"].startswith(kind)), "")
    context = {key: str(value).replace("'", "").replace(" or ", ", ") for key, value in details.get("ctx", {}).items()}
    return words.format(**context)


def _sentences(
    path: Path, group: list[ErrorDetails], model: type[Settings], raw: Any, within: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """What is wrong at one place, and what to do about it."""
    dotted, value = ".".join(map(str, path)) or "the recipe", group[0]["input"]
    shown = _shown(value)
    words = [word for details in group for word in _words(details)]
    wanted: list[str] = []
    for details in group:
        kind, loc, context = details["type"], details["loc"], details.get("ctx", {})
        if kind == "missing":
            yield f"`{'.'.join(map(str, (*path, loc[-1])))}` is missing", f"Add `{loc[-1]}:`."
        elif kind == "extra_forbidden" or loc[-1:] == ("[key]",):
            settings = settings_at(model, loc[:-1])
            known = words or list(settings.model_fields if settings else ())
            yield f"`{dotted}` is not a setting", _nearest(path, known, model, raw, within)
        elif kind.startswith("union_tag"):
            tag = str(context.get("tag", ""))
            given = f"`{tag}`" if tag else "missing"
            yield f"`{dotted}.kind` is {given}, and must be one of: {', '.join(words)}", did_you_mean(tag, words)
        elif kind in ("value_error", "assertion_error"):
            yield f"`{dotted}`: {context['error']}", ""
        elif kind == "too_short":
            yield f"`{dotted}` is empty, and needs at least {context['min_length']}", ""
        elif kind == "string_pattern_mismatch":
            yield f"`{dotted}` is {shown}, and must be {_FORMS.get(str(path[-1]), context['pattern'])}", ""
        elif needed := _wanted(details):
            wanted.append(needed)
        else:
            yield f"`{dotted}` is {shown}: {details['msg']}", ""
    if wanted:
        settings = settings_at(model, group[0]["loc"]) if group[0]["type"].startswith("model") else None
        fix = "Leave it out for the default." if value is None else did_you_mean(str(value), words)
        fix = f"Settings here: {', '.join(settings.model_fields)}." if settings and value is not None else fix
        yield f"`{dotted}` is {shown}, and must be {', or '.join(dict.fromkeys(wanted))}", fix


def _words(details: ErrorDetails) -> list[str]:
    """The words that are allowed in place of the value."""
    context = details.get("ctx", {})
    listed = str(context.get("expected") or context.get("expected_tags") or "").replace(" or ", ", ")
    return [word.strip(" '\"") for word in listed.split(",") if word]


def _shown(value: Any) -> str:
    if isinstance(value, dict | list | tuple) or value is None:
        return "a mapping" if isinstance(value, dict) else "a list" if value is not None else "empty"
    text = value if isinstance(value, str) else as_yaml(value)
    return f"`{text[:60]}`" + ("..." if len(text) > 60 else "")


def _nearest(path: Path, known: Sequence[str], model: type[Settings], raw: Any, within: Sequence[str]) -> str:
    """The setting that is meant by `path`, by its whole name: one beside it, else of that name in other places."""
    *around, word = map(str, path)
    places = list(_places(model))
    elsewhere = [place for place in places if place[-1] == word]
    here = difflib.get_close_matches(word, known, n=1, cutoff=_ALIKE if elsewhere else _SIMILAR)
    if not here and not elsewhere:
        alike = difflib.get_close_matches(word, {place[-1] for place in places}, n=1, cutoff=_ALIKE)
        elsewhere = [place for place in places if place[-1] in alike]
    # Of several places those in the sections around, and of these those that the recipe has.
    shared = {place: common(place, around) for place in elsewhere}
    likely = [place for place in elsewhere if shared[place] == max(shared.values())]
    likely = sorted([place for place in likely if len(place) == 1 or place[0] in raw] or likely, key=len)
    found = [(*around, here[0])] if here else likely[:_ELSEWHERE]
    return meant(".".join((*within, *place)) for place in found) or f"Settings here: {', '.join(known)}."


def _places(model: type[Settings], around: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The keys that lead to each setting, without those that stand in lists."""
    for name, field in model.model_fields.items():
        place = (*around, name)
        yield place
        if get_origin(field.annotation) is dict:
            key = get_args(field.annotation)[0]
            yield from ((*place, word) for word in get_args(key) if get_origin(key) is Literal)
        for suffix, inner in classes_in(field.annotation):
            if not suffix:
                yield from _places(inner, place)


def settings_at(model: type[Settings], loc: Sequence[str | int]) -> type[Settings] | None:
    """The settings class that stands at `loc` below `model`, or None where there is none."""
    members: list[type[Settings]] = [model]  # of a union
    for key in loc:
        if isinstance(key, int):
            continue  # an entry of a list is described by the list's annotation
        kinds = {
            each: get_args(each.model_fields["kind"].annotation) for each in members if "kind" in each.model_fields
        }
        chosen = [each for each in members if each.__name__ == key or key in kinds.get(each, ())]
        if chosen and len(members) > 1:
            members = chosen
            continue
        field = next((each.model_fields[key] for each in members if key in each.model_fields), None)
        members = [inner for suffix, inner in classes_in(field.annotation) if ".*" not in suffix] if field else []
    return members[0] if members else None
