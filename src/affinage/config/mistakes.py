"""What pydantic finds wrong with a recipe, in plain sentences: where, which key, the nearest known name."""

import contextlib
import difflib
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from affinage.config.settings import Settings, classes_in
from affinage.config.yaml import Path, as_yaml, brief
from affinage.errors import UserError, did_you_mean, meant

_EXPONENTS = {"k": 3, "K": 3, "M": 6, "B": 9, "G": 9, "T": 12, "%": -2}  # of 2M and 70%


def explain(error: ValidationError, model: type[Settings], raw: Any, locate: Callable[[Path], str]) -> UserError:
    """Turn all mistakes in `raw`, whose keys `locate` finds in the recipe, into one message, a line for each."""
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
        where, (what, fix) = locate(path), _sentence(path, group, model)
        # What `training` gives for several trainings is one mistake.
        mistakes.setdefault((where, path[-1:], group[0]["type"]), UserError(what, where=where, fix=fix))
    every = f"the recipe has {len(mistakes)} mistakes\n" + "\n".join(map(str, mistakes.values()))
    return UserError(every) if len(mistakes) > 1 else next(iter(mistakes.values()))


def written_path(loc: Sequence[str | int], raw: Any) -> Path:
    """Return the part of pydantic's location that leads to something in the recipe, without the types of unions."""
    value, path = raw, []
    for key in loc:
        with contextlib.suppress(KeyError, IndexError, TypeError):  # of a type's name, or a key that is missing
            value = value[key]
            path.append(key)
    return tuple(path)


def settings_at(model: type[Settings], path: Path) -> list[type[Settings]]:
    """Return the settings classes that may stand at `path` below `model`: none for a plain value."""
    classes = [model]
    for key in path:
        if isinstance(key, str):  # an entry of a list is described by the list's annotation
            types = [each.model_fields[key].annotation for each in classes if key in each.model_fields]
            classes = [inner for kind in types for place, inner in classes_in(kind) if ".*" not in place]
    return classes


def _sentence(path: Path, group: list[ErrorDetails], model: type[Settings]) -> tuple[str, str]:
    """Return what is wrong at one place, and what to do about it."""
    dotted = ".".join(map(str, path)) or "the recipe"
    details = next((each for each in group if each["type"] == "value_error"), group[0])
    kind, value = details["type"], details["input"]
    if kind == "missing":
        return f"`{dotted}` is missing", f"Add `{path[-1]}:`."
    if kind == "value_error":
        return f"`{dotted}`: {details['ctx']['error']}", ""
    expected = [str(each.get("ctx", {}).get(key, "")) for each in group for key in ("expected", "expected_tags")]
    words = [word.strip(" '\"") for word in re.split(r",| or ", ",".join(expected)) if word]  # in place of the value
    settings = settings_at(model, path[:-1] if kind == "extra_forbidden" else path)
    known = words or list(dict.fromkeys(name for each in settings for name in each.model_fields))
    there = f"Settings here: {', '.join(known) or 'none'}."
    if kind == "extra_forbidden" or details["loc"][-1:] == ("[key]",):
        nearest = difflib.get_close_matches(str(path[-1]), [name for name in known if name != path[-1]], n=1)
        fix = meant(".".join(map(str, (*path[:-1], name))) for name in nearest)
        return f"`{dotted}` is not a setting", fix or there
    wanted = ", or ".join(dict.fromkeys(each["msg"].partition(", unable")[0] for each in group))
    wanted = re.sub(r"a valid dictionary( or instance of \w+)?", "a mapping", wanted).replace("a valid tuple", "a list")
    wanted = re.sub(r"Tuple should have (.*) items? .*", r"the number of its entries must be \1", wanted)
    must = f", and must be {wanted.replace('Input should be ', '')}" if wanted.startswith("Input") else f": {wanted}"
    around = [(each, str(key)) for place, key in enumerate(path) for each in settings_at(model, path[:place])]
    fields = [each.model_fields[key] for each, key in around if key in each.model_fields]
    meaning = " ".join(((fields[-1].description if fields else "") or (settings and there) or "").split())
    if value is None:
        is_required = bool(fields) and fields[-1].is_required()
        fix = "It has no default." if is_required else 'Leave it out for the default; an empty text is `""`.'
        return f"`{dotted}` is empty{must}", f"{fix} {meaning}".strip()
    word = str(value)
    shown = "a mapping" if isinstance(value, dict) else "a list" if value and isinstance(value, list | tuple) else ""
    number = re.fullmatch(r"([\d.]+) ?([kKMBGT%])", word) if "a valid" in must else None
    listed = as_yaml(re.split(", *", word)) if "be a list" in must and word[:1].isalpha() else ""
    example = f"{number[1]}e{_EXPONENTS[number[2]]}" if number else listed
    fix = (f"Write {example}. " if example else "") + (there if settings else meaning)
    return f"`{dotted}` is {shown or f'`{brief(value)}`'}{must}", did_you_mean(word, words) or fix
