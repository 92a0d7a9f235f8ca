"""What recipes choose by name and may bring themselves: optimizers and schedules."""

import difflib
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from affinage.errors import UserError
from affinage.recipe.settings import Settings

S = TypeVar("S", bound=Settings)


class Registry(Generic[S]):
    """Settings classes by name. A new one is a class in any file; nothing here changes for it."""

    def __init__(self, what: str):
        self.what = what  # how messages call it, and the section of a recipe that chooses it
        self._classes: dict[str, type[S]] = {}

    def register(self, name: str) -> Callable[[Any], Any]:
        """A class decorator; raises ValueError where another class has the name."""

        def add(cls: type[S]) -> type[S]:
            taken = self._classes.get(name)
            if taken is not None and taken.__qualname__ != cls.__qualname__:
                raise ValueError(
                    f"{self.what} {name!r} is already registered by {taken.__module__}.{taken.__qualname__}"
                )
            self._classes[name] = cls
            return cls

        return add

    def build(self, name: str, settings: Mapping[str, Any]) -> S:
        """The one called `name`, with its own settings.

        Raises:
            UserError: for a name or a setting that nobody knows, and a value that does not fit.
        """
        if name not in self._classes:
            fix = _close(name, self._classes) or f"There are {', '.join(self._classes)}."
            raise UserError(f"there is no {self.what} `{name}`", where=f"{self.what}.name", fix=fix)
        chosen = self._classes[name]
        try:
            return chosen.model_validate(dict(settings))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(map(str, first["loc"]))
            where = f"{self.what}.settings"
            if first["type"] == "extra_forbidden":
                known = list(chosen.model_fields)
                fix = _close(key, known) or (f"It has {', '.join(known)}." if known else "It has none of its own.")
                raise UserError(f"`{key}` is not a setting of {self.what} {name}", where=where, fix=fix) from None
            raise UserError(f"`{key}` of {self.what} {name}: {first['msg']}", where=where) from None


def _close(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"Did you mean `{close[0]}`?" if close else ""
