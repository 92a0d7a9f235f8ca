"""What pydantic finds wrong with a recipe, in plain sentences: where, which key, the nearest known name."""

import difflib
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from affinage.config.settings import Settings, classes_in
from affinage.config.yaml import Path, brief
from affinage.errors import UserError, did_you_mean, meant


def explain(
    error: ValidationError,
    model: type[Settings],
    raw: Any,
    locate: Callable[[Sequence[str | int]], str],
    within: Sequence[str] = (),
) -> UserError:
    """Turn all mistakes in `raw`, which stands `within` a section of the recipe, into one message, a line for each."""
    groups: dict[Path, list[ErrorDetails]] = defaultdict(list)
    for details in error.errors(include_url=False):
        path = written_path(details["loc"], raw)
        groups[(*path, details["loc"][-1]) if details["type"] == "missing" else path].append(details)
    mistakes: dict[tuple[Any, ...], UserError] = {}
    for path, group in groups.items():
        # A union reports once for each member: what is wrong within the value says more than what the value is not.
        inside = any(len(other) > len(path) and other[: len(path)] == path for other in groups)
        if inside and not any(details["type"] in ("value_error", "extra_forbidden") for details in group):
            continue
        what, fix = _sentence(path, group, model, within)
        where = locate(path)
        # What `training` gives for several trainings is one mistake.
        mistakes.setdefault((where, path[-1:], group[0]["type"]), UserError(what, where=where, fix=fix))
    if len(mistakes) == 1:
        return next(iter(mistakes.values()))
    return UserError(f"the recipe has {len(mistakes)} mistakes\n" + "\n".join(map(str, mistakes.values())))


def written_path(loc: Sequence[str | int], raw: Any) -> Path:
    """Return the part of pydantic's location that leads to something in the recipe, without the types of unions."""
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


def settings_at(model: type[Settings], loc: Sequence[str | int]) -> type[Settings] | None:
    """Return the settings class that stands at `loc` below `model`, or None where there is none."""
    members: list[type[Settings]] = [model]  # of a union
    for key in loc:
        if isinstance(key, int):
            continue  # an entry of a list is described by the list's annotation
        if [member.__name__ for member in members] == [key]:
            continue  # pydantic's name of the only class in a union
        if len(members) > 1:
            kinds = {each: [each.__name__, *get_args(each.model_fields["kind"].annotation)] for each in members}
            if any(key in names for names in kinds.values()):
                members = [each for each, names in kinds.items() if key in names]
                continue
        field = next((each.model_fields[key] for each in members if key in each.model_fields), None)
        members = [inner for suffix, inner in classes_in(field.annotation) if ".*" not in suffix] if field else []
    return members[0] if members else None


def _sentence(path: Path, group: list[ErrorDetails], model: type[Settings], within: Sequence[str]) -> tuple[str, str]:
    """Return what is wrong at one place, and what to do about it."""
    dotted, details = ".".join(map(str, path)) or "the recipe", group[0]
    kind, loc, value = details["type"], details["loc"], details["input"]
    contexts = [each.get("ctx", {}) for each in group]
    listed = [str(context.get("expected") or context.get("expected_tags") or "") for context in contexts]
    words = [word.strip(" '\"") for word in re.split(r",| or ", ",".join(listed)) if word]  # in place of the value
    settings = settings_at(model, loc[:-1] if kind == "extra_forbidden" else loc)
    known = words or list(settings.model_fields if settings else ())
    if kind == "missing":
        return f"`{dotted}` is missing", f"Add `{loc[-1]}:`."
    if kind == "extra_forbidden" or loc[-1:] == ("[key]",):
        nearest = difflib.get_close_matches(str(path[-1]), known, n=1)
        meaning = meant(".".join(map(str, (*within, *path[:-1], name))) for name in nearest)
        return f"`{dotted}` is not a setting", meaning or f"Settings here: {', '.join(known)}."
    if kind == "value_error":
        return f"`{dotted}`: {details['ctx']['error']}", ""
    wanted = ", or ".join(dict.fromkeys(each["msg"].partition(", unable")[0] for each in group))
    wanted = re.sub(r"a valid dictionary( or instance of \w+)?", "a mapping", wanted)
    wanted = wanted.replace("a valid tuple", "a list").replace("Tuple should", "it should")
    must = f", and must be {wanted.replace('Input should be ', '')}" if wanted.startswith("Input") else f": {wanted}"
    if value is None:
        return f"`{dotted}` is empty{must}", "Leave it out for the default."
    shown = "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list | tuple) else ""
    what = f"`{dotted}` is {shown or f'`{brief(value)}`'}{must}"
    around = [(settings_at(model, path[:place]), str(key)) for place, key in enumerate(path)]
    fields = [each.model_fields[key] for each, key in around if each is not None and key in each.model_fields]
    meaning = " ".join((fields[-1].description or "").split()) if fields else ""
    return what, did_you_mean(str(value), words) or (f"Settings here: {', '.join(known)}." if settings else meaning)
