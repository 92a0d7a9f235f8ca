"""JSON files that others wrote, whatever is in them."""

import json
from pathlib import Path
from typing import Any

from affinage.errors import UserError


def read_object(path: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
        UserError: it cannot be read, is not JSON, is nested too deep, or is no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"this is not readable JSON: {error}", where=str(path)) from error
    if not isinstance(value, dict):
        raise UserError(f"this is not a JSON object but a {type(value).__name__}", where=str(path))
    return value


def of_a_line(error: Exception) -> str:
    """What is wrong with one line of JSON, and where in it: the decoder would call any line the first."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos + 1}"
    return str(error)


def encodable(text: str) -> str:
    """The text with lone surrogates (JSON's \\ud800) replaced by U+FFFD: UTF-8 has no form for them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
