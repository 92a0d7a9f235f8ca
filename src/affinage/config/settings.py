"""The base of every settings class: frozen, and a key nobody knows is an error."""

import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

Bytes = typing.Annotated[ByteSize, Field(gt=0)]  # a number of bytes: 5000, or "5kB", "40MB", "1.5GiB"


class Settings(BaseModel):
    """Values that a recipe may set. Immutable once parsed; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """`max_grad_norm: true` would be 1.0 to pydantic."""
        if isinstance(value, bool) and info.field_name is not None:
            number = _number_asked_for(cls.model_fields[info.field_name].annotation)
            if number:
                raise PydanticCustomError(number, "Input should be a valid number")
        return value


def _number_asked_for(annotation: Any) -> Literal["int_type", "float_type", ""]:
    """Pydantic's name of the mistake to give true or false where this is asked for; "" where it is none."""
    members = list(_members(annotation))
    if bool in members or not (int in members or float in members):
        return ""
    return "float_type" if float in members else "int_type"


def _members(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) in (typing.Union, types.UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    elif get_origin(annotation) is typing.Annotated:
        yield from _members(get_args(annotation)[0])
    else:
        yield annotation
