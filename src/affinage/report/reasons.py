"""Why documents were left out and trainings ended, in the words of a page; the stages give their reasons in English."""

import re
from collections.abc import Callable

from affinage.report.strings import reasons

_OF_WHAT = {"characters": "caractères", "lines": "lignes", "paragraphs": "paragraphes"}
_Said = tuple[tuple[str, Callable[[re.Match[str]], str]], ...]
_DETAILS: _Said = (
    (r"Jaccard ([\d.]+) to (.+) of (.+)", lambda m: f"Jaccard {_comma(m[1])} avec {m[2]} de {m[3]}"),
    (r"([\d.]+) of its (characters|lines|paragraphs)", lambda m: f"{_comma(m[1])} de ses {_OF_WHAT[m[2]]}"),
    (r"(\d+) characters", lambda m: f"{m[1]} caractères"),
    (r"(\d+) characters on average", lambda m: f"{m[1]} caractères en moyenne"),
    (r"holds (.+)", lambda m: f"contient {m[1]}"),
    (r"(.+), as its source says", lambda m: f"{m[1]}, selon sa source"),
    (r"([a-z+]+) ([01]\.\d+)", lambda m: f"{m[1]} {_comma(m[2])}"),  # languages and their probability
)

_ENDINGS: _Said = (
    (
        r"its rows have been seen as often as (`num_epochs: .+`) allows",
        lambda m: f"ses lignes ont été vues aussi souvent que {m[1]} le permet",
    ),
    (
        r"the rows of (.+) have been seen as often as (`num_epochs: .+`) allows",
        lambda m: f"les lignes de {m[1]} ont été vues aussi souvent que {m[2]} le permet",
    ),
    (
        r"(.+) is worse than at step ([\d,]+) \(p = (.+)\)",
        lambda m: f"{m[1]} est moins bon qu’au pas {_spaced(m[2])} (p\u00a0=\u00a0{_comma(m[3])})",
    ),
)


def reason_name(reason: str, language: str) -> str:
    """A reason for removal in words; one that has no translation is shown as the stage called it."""
    if language != "fr":
        return reason
    return reasons(language).get(reason, reason)


def detail_in(detail: str, language: str) -> str:
    """What a stage adds to a reason about one document."""
    return _in_french(detail, _DETAILS) if language == "fr" else detail


def ending_in(reason: str, language: str) -> str:
    """Why a training ended before its last step."""
    if language != "fr":
        return reason
    return "\u00a0; ".join(_in_french(one, _ENDINGS) for one in reason.split("; "))


def _in_french(text: str, known: _Said) -> str:
    """The text as it stands where no form of it is known."""
    for pattern, said in known:
        if found := re.fullmatch(pattern, text, re.DOTALL):
            return said(found)
    return text


def _comma(number: str) -> str:
    return number.replace(".", ",")


def _spaced(number: str) -> str:
    return number.replace(",", "\u202f")
