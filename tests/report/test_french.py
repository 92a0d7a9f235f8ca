"""Every message has its French, and no English of ours is left on the French page."""

import re
import string
from pathlib import Path

from babel.messages.extract import extract_from_dir
from babel.messages.pofile import read_po
from html_page import Page

from affinage.data import readers
from affinage.report import language
from affinage.report.language import Language
from affinage.report.page import summary

PACKAGE = Path(language.__file__).parent
ENGLISH = r"\b(the|of|and|with|is|are|was|were|from|that|this|which|per|by|for|in)\b"


def catalogue(context: str | None) -> dict[str, str]:
    """The French messages of the report."""
    with (PACKAGE / "locale" / "fr.po").open("rb") as file:
        return {str(one.id): str(one.string) for one in read_po(file) if one.id and one.context == context}


def extracted() -> set[str]:
    """All messages in the templates and the code."""
    methods = [("**.py", "python"), ("**.j2", "jinja2")]
    found = extract_from_dir(PACKAGE, method_map=methods, keywords={"t": None, "N_": None})
    return {message for _, _, message, _, _ in found}


def test_no_english_is_left_on_the_page_and_numbers_are_french(pages: dict[str, str], facts):
    ours = Page(pages["fr"]).own
    assert len(ours) > 200, "the page was read"
    assert [text for text in ours if re.search(ENGLISH, text)] == []
    whole = {text for text in extracted() if " " in text and "{" not in text} - set(catalogue(None).values())
    assert whole.isdisjoint(ours) and '<html lang="fr">' in pages["fr"]
    shown = " ".join(ours)
    assert not re.search(r"(?<![\w-])\d+\.\d", shown), "a decimal point that is not of a name"
    assert not re.search(r"\d%", shown), "no space before a percent sign"
    assert summary(facts, "fr").startswith("Un modèle de 1,44\u202fM paramètres, préentraîné sur")


def test_every_message_has_its_french_with_the_same_blanks_and_no_french_is_left_over():
    french = catalogue(None)
    assert extracted() == set(french)
    # Words that are the same in both languages, looked at one by one.
    assert {text for text in french if text == french[text]} <= {
        "Sources", "Source", "Documents", "Tokens", "Total", "Scores", "pts", "base", "Part", "Versions", "tokens",
        "{count} tokens", "validation", "compilation",
    }  # fmt: skip
    for english, text in french.items():
        assert {f[1] for f in string.Formatter().parse(english)} == {f[1] for f in string.Formatter().parse(text)}
        assert not re.search(" [:;?!»]", text), text


def test_every_reason_of_the_steps_has_its_french():
    reasons = {"no text key", "too large", readers.UNKNOWN_KIND, "empty", "not UTF-8", "not JSON", "in a benchmark"}
    assert not reasons - set(catalogue("reason"))
    assert Language("fr").reason("too short") == "trop court"
    assert Language("fr").reason("whatever a plug-in writes") == "whatever a plug-in writes"
