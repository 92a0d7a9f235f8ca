"""datatrove's filters and its formatter of personal data, by name: `data.filters.datatrove`."""

import csv
import importlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from affinage.config.data import DatatroveName
from affinage.errors import UserError, first_line

WHERE = "data.filters.datatrove"
_PACKAGES = {"Filter": "datatrove.pipeline.filters", "Formatter": "datatrove.pipeline.formatters"}


class DatatroveFilters:
    """The filters of a recipe. Each has the tokenizer of a document's language, for it reads words and sentences.

    Raises UserError if datatrove is not installed, or a filter does not take its arguments.
    """

    def __init__(self, settings: Mapping[DatatroveName, Mapping[str, Any]]) -> None:
        self._settings = settings
        self._made: dict[str, list[tuple[str, Any]]] = {}  # by language
        if settings:
            self._filters("en")  # a mistake in the arguments is reported before the work

    def format(self, text: str) -> str:
        """The text as the formatters among them leave it."""
        for name, step in self._filters("en"):
            if name.endswith("Formatter"):
                text = step.format(text)
        return text

    @property
    def has_formatters(self) -> bool:
        """Whether any of them changes texts."""
        return any(name.endswith("Formatter") for name in self._settings)

    def removes(self, text: str, language: str) -> tuple[str, str] | None:
        """The first filter that a text does not pass, as (reason, detail); None if it passes all."""
        from datatrove.data import Document

        for name, step in self._filters(language):
            if name.endswith("Filter"):
                with _imports_reported():
                    found = step.filter(Document(text=text, id=""))
                if not (found[0] if isinstance(found, tuple) else found):
                    return f"{name}: {found[1] if isinstance(found, tuple) else 'removed'}", ""
        return None

    def _filters(self, language: str) -> list[tuple[str, Any]]:
        if language not in self._made:
            with _imports_reported():
                self._made[language] = [(name, _make(name, language, own)) for name, own in self._settings.items()]
        return self._made[language]


def _make(name: str, language: str, arguments: Mapping[str, Any]) -> Any:
    module = importlib.import_module(next(module for end, module in _PACKAGES.items() if name.endswith(end)))
    step: Callable[..., Any] = getattr(module, name)
    reads_words = "language" in step.__init__.__code__.co_varnames
    own = {"language": _three_letters().get(language, "eng")} if reads_words else {}
    try:
        return step(**own | dict(arguments))
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} does not take these arguments: {first_line(error)}", where=WHERE) from None


@cache
def _three_letters() -> dict[str, str]:
    """ISO 639-3 codes, by which datatrove knows languages, of those with a code of two letters."""
    import datatrove

    table = Path(datatrove.__file__).parent / "assets" / "tokenizer_assignment.csv"
    with table.open(encoding="utf-8", newline="") as file:
        return {row[1]: row[0] for row in csv.reader(file) if len(row) > 1 and len(row[1]) == 2}


class _imports_reported:
    """Turns a missing package into a message with the extra that has it."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ImportError):
            fix = "Install them: pip install 'affinage[filters]'."
            raise UserError(f"datatrove's filters are not installed: {first_line(error)}", where=WHERE, fix=fix)
