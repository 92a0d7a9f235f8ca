"""Functions that recipes choose by name. A further one is registered in any file; nothing else changes for it."""

from collections.abc import Mapping
from typing import Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError


def add(registry: dict[str, Any], name: str, entry: Any) -> None:
    """Register under a name; a name that another has taken is refused."""
    taken = registry.get(name)
    if taken is not None and getattr(taken, "__qualname__", taken) != getattr(entry, "__qualname__", entry):
        raise ValueError(f"`{name}` is already registered")
    registry[name] = entry


def one_of(*registries: Mapping[str, Any]) -> AfterValidator:
    """For a setting that names an entry: another word is refused as one that is not in a Literal would be."""

    def known(name: str) -> str:
        names = [known for registry in registries for known in registry]
        if name not in names:
            expected = ", ".join(f"'{known}'" for known in names)
            raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
        return name

    return AfterValidator(known)
