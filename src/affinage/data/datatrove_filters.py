"""datatrove's filters and its formatter of personal data, by name: `data.filters.datatrove`."""

import csv
import importlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from affinage.config.data import DatatroveName
from affinage.errors import UserError, first_line

WHERE = "data.filters.datatrove"


class DatatroveFilters:
    """The filters of a recipe. Each has the tokenizer of a document's language, for it reads words and sentences.

    Raises UserError if datatrove is not installed, or a filter does not take its arguments.
    """

    def __init__(self, settings: Mapping[DatatroveName, Mapping[str, Any]]) -> None:
        self._filters = {name: own for name, own in settings.items() if name.endswith("Filter")}
        self._formatters = [_make(name, "en", own) for name, own in settings.items() if name.endswith("Formatter")]
        self.has_formatters = bool(self._formatters)
        self._by_language: dict[str, list[tuple[str, Any]]] = {}
        self._of("en")  # a mistake in the arguments is reported before the work

    def format(self, text: str) -> str:
        """The text as the formatters among them leave it."""
        for step in self._formatters:
            text = step.format(text)
        return text

    def removes(self, text: str, language: str) -> tuple[str, str] | None:
        """The first filter that a text does not pass, as (reason, detail); None if it passes all."""
        from datatrove.data import Document

        for name, step in self._of(language):
            result = step.filter(Document(text=text, id=""))
            passes, reason = result if isinstance(result, tuple) else (result, "removed")
            if not passes:
                return f"{name}: {reason}", ""
        return None

    def _of(self, language: str) -> list[tuple[str, Any]]:
        if language not in self._by_language:
            self._by_language[language] = [(name, _make(name, language, own)) for name, own in self._filters.items()]
        return self._by_language[language]


def _make(name: str, language: str, arguments: Mapping[str, Any]) -> Any:
    package = "formatters" if name.endswith("Formatter") else "filters"
    try:
        step = getattr(importlib.import_module(f"datatrove.pipeline.{package}"), name)
        reads_words = "language" in step.__init__.__code__.co_varnames
        return step(**({"language": _three_letters().get(language, "eng")} if reads_words else {}) | dict(arguments))
    except ImportError as error:
        fix = "Install them: pip install 'affinage[filters]'."
        raise UserError(f"datatrove's filters are not installed: {first_line(error)}", where=WHERE, fix=fix) from None
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} does not take these arguments: {first_line(error)}", where=WHERE) from None


@cache
def _three_letters() -> dict[str, str]:
    """ISO 639-3 codes, by which datatrove knows languages, of those with a code of two letters."""
    import datatrove

    table = Path(datatrove.__file__).parent / "assets" / "tokenizer_assignment.csv"
    with table.open(encoding="utf-8", newline="") as file:
        return {row[1]: row[0] for row in csv.reader(file) if len(row) > 1 and len(row[1]) == 2}
