"""Every value of a recipe that is in effect, where it was written, and what the recipe's base says instead."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from affinage.cli.reference import meaning
from affinage.config.load import LoadedRecipe, load_recipe
from affinage.config.settings import Settings
from affinage.config.yaml import Path, as_yaml, common

_WIDE = 60  # characters of a value, after which its origin stands further right


class Value(NamedTuple):
    """One value in effect."""

    path: Path
    value: Any
    """A word, number, list or short mapping."""
    is_default: bool
    meaning: str
    origin: str = ""
    """`file:line`, `--set key` or `default`; for a short mapping also what was set within it."""
    base: Any = None
    """What the recipe's base has there; `value` itself where it agrees, or where there is no base."""

    @property
    def differs(self) -> bool:
        """Whether the base says something else."""
        return bool(self.value != self.base)


def effective(loaded: LoadedRecipe) -> list[Value]:
    """All values in effect, in the order of the settings. What is left out, and null by default, is not among them.

    Raises:
        UserError: if the base cannot be read.
    """
    base = (
        {} if loaded.base is None else {value.path: value.value for value in _leaves(load_recipe(loaded.base).recipe)}
    )
    found = []
    for each in _leaves(loaded.recipe):
        origin = "default" if each.is_default and not _is_written(loaded.raw, each.path) else loaded.locate(each.path)
        before = each.value if loaded.base is None else base.get(each.path)
        found.append(each._replace(origin=origin, base=before))
    return found


def as_text(values: Sequence[Value], meanings: bool = False) -> str:
    """The values as a recipe without a base; in comments where each is from, what the base says, and what it means."""
    lines: list[str] = []
    above: Path = ()
    for value in values:
        *around, last = value.path
        for depth in range(common(above, value.path), len(around)):
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


def _leaves(settings: Settings, path: Path = ()) -> Iterator[Value]:
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        default = field.get_default(call_default_factory=True, validated_data={})
        if value != default or not (value is None or value in ("", (), {})):  # else nothing is in effect there
            yield from _inside(Value((*path, name), value, value == default, meaning(field)))


def _inside(found: Value) -> Iterator[Value]:
    value, inner = found.value, []
    if isinstance(value, Settings):
        yield from _leaves(value, found.path)
        return
    if isinstance(value, Mapping):
        nested = any(isinstance(each, Mapping | tuple | list | Settings) for each in value.values())
        inner = list(value.items()) if nested or len(as_yaml(dict(value))) > _WIDE else []
    elif isinstance(value, tuple | list) and any(isinstance(each, Settings | Mapping) for each in value):
        inner = list(enumerate(value))
    for key, each in inner:
        yield from _inside(found._replace(path=(*found.path, key), value=each))
    if not inner:
        yield found


def _is_written(raw: Any, path: Path) -> bool:
    for key in path:
        try:
            raw = raw[key]
        except (KeyError, IndexError, TypeError):
            return False
    return True
