"""The settings of recipes: what each means, read from the classes that hold them, and which values are in effect."""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import ByteSize
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from affinage.config.load import LoadedRecipe, load_recipe
from affinage.config.recipe import TRAININGS, Recipe
from affinage.config.settings import Settings, classes_in
from affinage.config.training import TrainSettings
from affinage.config.yaml import Path, as_yaml

_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", ByteSize: "bytes", Any: "any value"}
_OF_A_NODE = {  # what every node of a graph may have besides the settings of its kind
    "in": {"description": "the node, or nodes, that it reads", "anyOf": [{"type": "string"}, {"type": "array"}]},
    "repeat": {"description": "times in a row, with parameters of its own each time", "type": "integer", "minimum": 1},
    "scan": {"description": "one compiled body for all repeats", "enum": [True, False, "auto"]},
}
_EMPTY: tuple[Any, ...] = (None, "", [], {})
_NOTHING = ("none", "left out", '""', "[]", "{}")  # defaults that leave nothing in effect
_WIDE = 60  # characters of a value, after which its origin stands further right


class Setting(NamedTuple):
    """One key of a recipe."""

    key: str
    """Dotted; `*` stands for a name of the user's, `[]` for a place in a list."""
    type: str
    """In words, with bounds."""
    default: str
    """As YAML, "" where the key must be given."""
    meaning: str
    """Empty where the name says it all."""


class Section(NamedTuple):
    """The settings of one class, as they stand in one place of the recipe; its key is "" for the recipe itself."""

    key: str
    meaning: str
    settings: tuple[Setting, ...]


def sections(model: type[Settings], key: str = "") -> Iterator[Section]:
    """The class's own settings, then those of the classes inside it, depth first.

    What all trainings share stands once, in the section `training`.
    """
    inside: list[tuple[str, type[Settings]]] = []
    found = []
    shared = TrainSettings.model_fields if issubclass(model, TrainSettings) and model is not TrainSettings else {}
    for name, field in model.model_fields.items():
        if name in shared:
            continue
        dotted = f"{key}.{name}" if key else name
        inner = [(dotted + place, child) for place, child in classes_in(field.annotation)]
        if name == TRAININGS[0]:
            found.append(Setting("training", "section", "left out", ""))
            inner.insert(0, ("training", TrainSettings))
        inside += inner
        found.append(Setting(dotted, _type(field), _default(field, bool(inner)), meaning(field)))
    yield Section(key, inspect.cleandoc(model.__doc__ or ""), tuple(found))
    for dotted, child in inside:
        yield from sections(child, dotted)


def settings_by_key() -> dict[str, Setting]:
    """Every setting of a recipe by its dotted key; those of `training` also under each training."""
    found = {setting.key: setting for section in sections(Recipe) for setting in section.settings}
    shared = {key: setting for key, setting in found.items() if key.startswith("training.")}
    return found | {name + key.removeprefix("training"): each for key, each in shared.items() for name in TRAININGS}


def meaning(field: FieldInfo) -> str:
    """The docstring of a setting in one line."""
    return " ".join((field.description or "").split())


def _type(field: FieldInfo) -> str:
    found = [
        f"{sign} {bound:g}"
        for constraint in field.metadata
        for name, sign in _BOUNDS.items()
        if (bound := getattr(constraint, name, None)) is not None
    ]
    return f"{_words(field.annotation)} {', '.join(found)}".rstrip()


def _words(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (tuple, list):
        return f"list of {_words(inner[0])}"
    if origin is dict:
        return f"mapping of {_words(inner[0])} to {_words(inner[1])}"
    if origin is Literal:
        return " | ".join(str(word) for word in inner)
    if origin is Annotated:
        return _words(inner[0])
    if origin is not None:
        return " | ".join(dict.fromkeys(_words(member) for member in inner if member is not type(None)))
    if annotation in _WORDS:
        return _WORDS[annotation]
    return "section" if issubclass(annotation, Settings) else str(getattr(annotation, "__name__", annotation))


def _default(field: FieldInfo, is_section: bool) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if field.is_required():
        return ""
    if value is PydanticUndefined or isinstance(value, Settings):
        return "its own defaults"
    if value is None:
        return "left out" if is_section else "none"
    return as_yaml(value)


def json_schema(kinds: Mapping[str, type[Settings]]) -> dict[str, Any]:
    """The schema of a recipe file (draft 2020-12), so that an editor completes keys and marks what is wrong.

    No key is required, since a base may give it. `affinage` itself checks more than a schema can say.

    Args:
        kinds: the kinds of nodes, by name. Nodes of other kinds, such as a plug-in's, are let pass.
    """
    schema = Recipe.model_json_schema()
    definitions = schema.setdefault("$defs", {})
    nodes = []
    for name, kind in kinds.items():
        own = _defined(kind, definitions)
        settings = own.setdefault("properties", {})
        if "vocab" in settings:
            settings["vocab"] = {"anyOf": [settings["vocab"], {"const": "auto"}]}
        own["properties"] = {"kind": {"const": name}, **_OF_A_NODE, **settings}
        definitions[f"node.{name}"] = own
        known = {"properties": {"kind": {"const": name}}, "required": ["kind"]}
        nodes.append({"if": known, "then": {"$ref": f"#/$defs/node.{name}"}})
    definitions["TrainSettings"] = _defined(TrainSettings, definitions)
    for definition in (schema, *definitions.values()):
        definition.pop("required", None)
    node = {"properties": {"kind": {"anyOf": [{"enum": list(kinds)}, {"type": "string"}]}, **_OF_A_NODE}}
    inputs = {"description": "what the graph reads", "type": ["array", "object"]}
    some = {"type": "object", "additionalProperties": {"type": ["object", "null"], "allOf": nodes, **node}}
    base = {"description": "the recipe that this one starts from: a path or a name", "type": "string"}
    model = schema["properties"]["model"] | {"properties": {"inputs": inputs, "nodes": some}}
    schema["properties"] |= {"base": base, "training": {"$ref": "#/$defs/TrainSettings"}, "model": model}
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, **schema, "title": "A recipe of affinage"}


def _defined(kind: type[Settings], definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a class; those of the classes inside it are added to `definitions`."""
    schema = kind.model_json_schema(ref_template="#/$defs/{model}")
    definitions |= schema.pop("$defs", {})
    return schema


class Value(NamedTuple):
    """One value in effect."""

    path: Path
    value: Any
    """A word, number or list of them."""
    origin: str = ""
    """`file:line`, `--set key` or `default`."""
    meaning: str = ""
    base: Any = None
    """What the recipe's base has there; `value` itself where it agrees, or where there is no base."""

    @property
    def key(self) -> str:
        """The key as `--set` takes it."""
        return ".".join(map(str, self.path))

    @property
    def differs(self) -> bool:
        """Whether the base says something else."""
        return bool(self.value != self.base)


def effective(loaded: LoadedRecipe) -> list[Value]:
    """All values in effect, in the order of the settings. What is empty by default is not among them.

    Raises:
        UserError: if the base cannot be read.
    """
    known = settings_by_key()
    base = None if loaded.base is None else dict(_leaves(load_recipe(loaded.base).recipe.model_dump(mode="json")))
    found = []
    for path, value in _leaves(loaded.recipe.model_dump(mode="json")):
        setting = known.get(re.sub(r"\.\d+(?=\.|$)", "[]", ".".join(map(str, path))))
        if value in _EMPTY and (setting is None or setting.default in _NOTHING):
            continue
        origin = loaded.locate(path) if _is_written(loaded.raw, path, value) else "default"
        if path == ("pretrain", "steps") and _is_written(loaded.raw, ("pretrain", "tokens")):
            origin = f"{loaded.locate(('pretrain', 'tokens'))}, from tokens"
        before = value if base is None else base.get(path)
        found.append(Value(path, value, origin, setting.meaning if setting else "", before))
    return found


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The words, numbers and lists of them in a value, each with its path."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        for at, inner in enumerate(value):
            yield from _leaves(inner, (*path, at))
    else:
        yield path, value


def _is_written(raw: Any, path: Path, value: Any = None) -> bool:
    """Whether a recipe sets a path; one value may stand for a mapping of it, as a source's path does."""
    for key in path:
        if isinstance(raw, str):
            return bool(raw == value)
        try:
            raw = raw[key]
        except (KeyError, IndexError, TypeError):
            return False
    return True


def as_text(values: Sequence[Value], meanings: bool = False) -> str:
    """The values as a recipe without a base; in comments where each is from, what the base says, and what it means."""
    lines: list[str] = []
    above: Path = ()
    for value in values:
        *around, last = value.path
        same = [one == other for one, other in zip(above, value.path)]
        for depth in range([*same, False].index(False), len(around)):
            lines.append("  " * depth + ("-" if isinstance(around[depth], int) else f"{around[depth]}:"))
        key = "- " if isinstance(last, int) else f"{last}: "
        note = value.origin
        if value.differs:
            note += ", not in the base" if value.base is None else f", was {as_yaml(value.base)}"
        if meanings and value.meaning:
            note += f": {value.meaning}"
        lines.append(f"{'  ' * len(around) + key + as_yaml(value.value):<{_WIDE}}  # {note}")
        above = value.path
    return "\n".join(lines) + "\n"
