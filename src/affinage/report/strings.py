"""The messages of the pages, by key, from the catalogues in `locale/`."""

from functools import cache
from importlib import resources

from babel.messages.pofile import read_po

LANGUAGES = ("en", "fr")


@cache
def strings(language: str) -> dict[str, str]:
    """The messages in `language`; English for a language that has no catalogue."""
    return _messages(spoken(language), context=None)


@cache
def reasons(language: str) -> dict[str, str]:
    """Translations of the reasons for which documents are removed; none for English, in which they are written."""
    return _messages(spoken(language), context="reason")


def spoken(language: str) -> str:
    """The language of a page for readers of `language`: English where there is no catalogue."""
    return language if language in LANGUAGES else LANGUAGES[0]


def _messages(language: str, context: str | None) -> dict[str, str]:
    with (resources.files("affinage.report") / "locale" / f"{language}.po").open("rb") as file:
        catalogue = read_po(file, locale=language)
    return {str(each.id): str(each.string) for each in catalogue if each.id and each.context == context}
