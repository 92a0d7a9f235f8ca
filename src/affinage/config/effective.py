"""Every value of a recipe that is in effect, where it was written, and what the recipe's base says instead."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from affinage.config.load import LoadedRecipe, load_recipe
from affinage.config.reference import comments
from affinage.config.settings import Settings
from affinage.config.yaml_text import as_yaml

Path = tuple[str | int, ...]
_WIDE = 60  # characters of a value, after which its origin goes on a line of its own


class Value(NamedTuple):
    """One value in effect."""

    path: Path
    value: Any  # a word, number, list or empty mapping
    origin: str  # `file:line`, `--set key` or `default`; of a short mapping also what was set within it
    base: Any  # what the recipe's base has there; `value` itself where it agrees, or where there is no base
    meaning: str  # the comment beside the setting

    @property
    def differs(self) -> bool:
        """Whether the base says something else."""
        return bool(self.value != self.base)


def effective(loaded: LoadedRecipe) -> list[Value]:
    """All values in effect, in the order of the settings. What is left out, and null by default, is not among them.

    Raises:
        UserError: if the base cannot be read.
    """
    base = {} if loaded.base is None else {path: value for path, value, *_ in _leaves(load_recipe(loaded.base).recipe)}
    found = []
    for path, value, is_default, meaning in _leaves(loaded.recipe):
        origin = "default" if is_default and not _written(loaded.raw, path) else loaded.locate(path)
        before = value if loaded.base is None else base.get(path)
        found.append(Value(path, value, origin, before, meaning))
    return found


def as_text(values: Sequence[Value], meanings: bool = False) -> str:
    """The values as a recipe without a base; in comments where each is from, what the base says, and what it means."""
    lines: list[str] = []
    above: Path = ()
    for value in values:
        shared = next(
            (n for n, (a, b) in enumerate(zip(above, value.path)) if a != b), min(len(above), len(value.path))
        )
        lines += _opening(value.path, shared)
        last = value.path[-1]
        indent = "  " * (len(value.path) - 1)
        text = (
            f"{indent}- {as_yaml(value.value)}" if isinstance(last, int) else f"{indent}{last}: {as_yaml(value.value)}"
        )
        note = value.origin + _change(value)
        note += f": {value.meaning}" if meanings and value.meaning else ""
        lines.append(f"{text:<{_WIDE}}  # {note}")
        above = value.path
    return "\n".join(lines) + "\n"


def _change(value: Value) -> str:
    if not value.differs:
        return ""
    return ", not in the base" if value.base is None else f", was {as_yaml(value.base)}"


def _opening(path: Path, shared: int) -> list[str]:
    """The lines of the mappings and list entries that begin above a value."""
    return [
        "  " * depth + ("-" if isinstance(key, int) else f"{key}:")
        for depth, key in enumerate(path[:-1])
        if depth >= shared
    ]


class _Leaf(NamedTuple):
    path: Path
    value: Any
    is_default: bool
    meaning: str


def _leaves(settings: Settings, path: Path = ()) -> Iterator[_Leaf]:
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        default = field.get_default(call_default_factory=True, validated_data={})
        if value == default and (value is None or value in ("", (), {})):
            continue  # nothing is in effect there
        yield from _inside(value, (*path, name), value == default, comments(type(settings)).get(name, ""))


def _inside(value: Any, path: Path, is_default: bool, meaning: str) -> Iterator[_Leaf]:
    if isinstance(value, Settings):
        yield from _leaves(value, path)
    elif isinstance(value, Mapping) and value and not _flat(value):
        for key, inner in value.items():
            yield from _inside(inner, (*path, key), is_default, meaning)
    elif isinstance(value, tuple | list) and any(isinstance(inner, Settings | Mapping) for inner in value):
        for index, inner in enumerate(value):
            yield from _inside(inner, (*path, index), is_default, meaning)
    else:
        yield _Leaf(path, value, is_default, meaning)


def _flat(value: Any) -> bool:
    """Whether a mapping is short enough for one line: words and numbers, a few."""
    simple = all(not isinstance(inner, Mapping | tuple | list | Settings) for inner in value.values())
    return simple and len(as_yaml(dict(value))) <= _WIDE


def _written(raw: Any, path: Path) -> bool:
    for key in path:
        try:
            raw = raw[key]
        except (KeyError, IndexError, TypeError):
            return False
    return True
