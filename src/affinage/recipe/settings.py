"""The base of every settings class: frozen, and a key nobody knows is an error."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Values that a recipe may set. Immutable once parsed; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
