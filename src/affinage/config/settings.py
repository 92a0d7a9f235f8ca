"""The base of every settings class: frozen, and an unknown key, NaN, or true for a number is an error."""

import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

Bytes = Annotated[ByteSize, Field(gt=0)]  # a number of bytes: 5000, or "5kB", "40MB", "1.5GiB"
_MARKS = {Annotated: "", tuple: "[]", list: "[]", dict: ".*"}


class Settings(BaseModel):
    """Values that a recipe may set. The docstring below a field documents it."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `max_grad_norm: true`, which would be 1.0 to pydantic."""
        if isinstance(value, bool) and info.field_name is not None:
            kinds = {kind for place, kind in _members(cls.model_fields[info.field_name].annotation) if not place}
            if bool not in kinds and kinds & {int, float, ByteSize}:
                raise PydanticCustomError("float_type", "Input should be a number")
        return value


def _members(annotation: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the members of a union without `Annotated`, each with its place in the value.

    The place is `[]` for the entries of a list, and `.*` for the values of a mapping.
    """
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        for member in inner:
            yield from _members(member, place)
    elif origin in _MARKS:
        yield from _members(inner[origin is dict], place + _MARKS[origin])
    else:
        yield place, annotation


def classes_in(annotation: Any) -> Iterator[tuple[str, type[Settings]]]:
    """Yield the settings classes in a type, each with its place in a value of that type."""
    for place, kind in _members(annotation):
        if isinstance(kind, type) and issubclass(kind, Settings):
            yield place, kind
