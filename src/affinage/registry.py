"""What recipes choose by name and may bring themselves: layers, activations, norms, optimizers, schedules."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import AfterValidator, ValidationError
from pydantic_core import PydanticCustomError

from affinage.config.mistakes import explain
from affinage.config.settings import Settings
from affinage.errors import UserError, did_you_mean

T = TypeVar("T")
S = TypeVar("S", bound=Settings)
E = TypeVar("E")

Locate = Callable[[Sequence[str | int]], str]  # where in the recipe a key was written

_loading: list[str] = []  # the plug-in that is being loaded
_from_plugin: dict[str, str] = {}  # a name that a plug-in registered -> that plug-in


@contextlib.contextmanager
def registering(plugin: str) -> Iterator[None]:
    """Inside, what is registered counts as the plug-in's."""
    _loading.append(plugin)
    try:
        yield
    finally:
        _loading.pop()


def plugins_used(settings: Any) -> set[str]:
    """Return the plug-ins that registered any of the words in some settings."""
    if isinstance(settings, Mapping):
        return plugins_used([*settings, *settings.values()])
    if isinstance(settings, list | tuple):
        return {plugin for entry in settings for plugin in plugins_used(entry)}
    return {_from_plugin[settings]} if isinstance(settings, str) and settings in _from_plugin else set()


class Registry(dict[str, T]):
    """Entries by name. A further one is registered in any file; nothing else changes for it."""

    def __init__(self, kind: str, entries: Mapping[str, T] | None = None):
        super().__init__(entries or {})
        self.kind = kind  # how messages call an entry

    def register(self, name: str) -> Callable[[E], E]:
        """Return a decorator of classes or functions; it raises ValueError where another one has the name."""

        def add(entry: E) -> E:
            taken, new = self.get(name), getattr(entry, "__qualname__", None)
            if taken is not None and getattr(taken, "__qualname__", taken) != new:
                raise ValueError(f"{self.kind} `{name}` is already registered by {taken}")
            if _loading and not str(getattr(entry, "__module__", "")).startswith("affinage."):  # which it may import
                _from_plugin[name] = _loading[-1]
            self[name] = entry  # type: ignore[assignment]  # the decorator does not know the entries' type
            return entry

        return add


def one_of(*registries: Mapping[str, Any]) -> AfterValidator:
    """For a setting that names an entry: another word is refused as one that is not in a Literal would be."""

    def check(name: str) -> str:
        names = [known for registry in registries for known in registry]
        if name not in names:
            expected = ", ".join(f"'{known}'" for known in names)
            raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
        return name

    return AfterValidator(check)


def build(registry: Registry[type[S]], name: str, settings: Mapping[str, Any], locate: Locate | None = None) -> S:
    """Return the entry called `name` with its own settings.

    `locate` maps the keys ("name",) or ("settings", key) to where they were written.

    Raises:
        UserError: for an unknown name or setting, and a value that does not fit.
    """
    where = locate or (lambda path: ".".join(map(str, (registry.kind, *path))))
    if name not in registry:
        fix = did_you_mean(name, registry) or f"There are {', '.join(registry)}."
        raise UserError(f"there is no {registry.kind} `{name}`", where=where(("name",)), fix=fix)
    entry, own = registry[name], dict(settings)
    try:
        return entry.model_validate(own)
    except ValidationError as error:
        raise explain(error, entry, own, lambda path: where(("settings", *path))) from None
