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

_plugin: list[str] = []  # the plug-in that is being loaded
_from_plugin: dict[str, str] = {}  # a name that a plug-in registered -> that plug-in


@contextlib.contextmanager
def registering(plugin: str) -> Iterator[None]:
    """Inside, what is registered counts as the plug-in's."""
    _plugin.append(plugin)
    try:
        yield
    finally:
        _plugin.pop()


def plugins_used(settings: Any) -> set[str]:
    """The plug-ins that registered any of the words in some settings."""
    if isinstance(settings, Mapping):
        return {plugin for entry in settings.items() for plugin in plugins_used(entry)}
    if isinstance(settings, list | tuple):
        return {plugin for entry in settings for plugin in plugins_used(entry)}
    return {_from_plugin[settings]} if isinstance(settings, str) and settings in _from_plugin else set()


class Registry(dict[str, T]):
    """Entries by name. A further one is registered in any file; nothing else changes for it."""

    def __init__(self, what: str, entries: Mapping[str, T] | None = None):
        super().__init__(entries or {})
        self.what = what  # how messages call an entry

    def register(self, name: str) -> Callable[[E], E]:
        """A decorator of classes or functions; raises ValueError where another one has the name."""

        def add(entry: E) -> E:
            taken, new = self.get(name), getattr(entry, "__qualname__", None)
            if taken is not None and getattr(taken, "__qualname__", taken) != new:
                by = f"{getattr(taken, '__module__', '?')}.{getattr(taken, '__qualname__', taken)}"
                raise ValueError(f"{self.what} `{name}` is already registered by {by}")
            if _plugin and not str(getattr(entry, "__module__", "")).startswith("affinage."):  # which it may import
                _from_plugin[name] = _plugin[-1]
            self[name] = entry  # type: ignore[assignment]  # the entries' type is not told by the decorator's
            return entry

        return add


def one_of(*registries: Mapping[str, Any]) -> AfterValidator:
    """For a setting that names an entry: another word is refused as one that is not in a Literal would be."""

    def known(name: str) -> str:
        names = [known for registry in registries for known in registry]
        if name not in names:
            expected = ", ".join(f"'{known}'" for known in names)
            raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
        return name

    return AfterValidator(known)


def build(registry: Registry[type[S]], name: str, settings: Mapping[str, Any], locate: Locate | None = None) -> S:
    """The entry called `name`, with its own settings.

    Args:
        registry: of classes of settings.
        name: what the recipe says under `name`.
        settings: what it says under `settings`.
        locate: from the keys ("name",) or ("settings", key) to where they were written.

    Raises:
        UserError: for a name or a setting that nobody knows, and a value that does not fit.
    """
    where = locate or (lambda path: ".".join(map(str, (registry.what, *path))))
    if name not in registry:
        fix = did_you_mean(name, registry) or f"There are {', '.join(registry)}."
        raise UserError(f"there is no {registry.what} `{name}`", where=where(("name",)), fix=fix)
    chosen, given = registry[name], dict(settings)
    try:
        return chosen.model_validate(given)
    except ValidationError as error:
        raise explain(error, chosen, given, lambda path: where(("settings", *path))) from None
