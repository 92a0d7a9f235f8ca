"""Texts with planted near-copies, and the plain definition of their Jaccard similarity."""

import random
from collections.abc import Iterable

import regex

SYLLABLES = "ba ce di fo gu la mé ni où pa que ré so tâ vi ço lê ma na ju th er in the and ing st ch ou ss".split()


def lexicon(size: int, rng: random.Random) -> list[str]:
    """Made-up words in the manner of English and French."""
    return ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 3))) + rng.choice(["", "s", "e", "t"]) for _ in range(size)]


def random_text(words: list[str], length: int, rng: random.Random) -> list[str]:
    """`length` words, the first ones of the lexicon more often than the last."""
    return [words[int(len(words) * rng.random() ** 2)] for _ in range(length)]


def near_copy(text: list[str], similarity: float, words: list[str], rng: random.Random) -> list[str]:
    """The text with one run of words replaced so that the Jaccard similarity of 5-grams comes near `similarity`.

    Of n 5-grams m change: J = (n - m) / (n + m), and a run of r words inside changes r + 4.
    """
    n = len(text) - 4
    changed = round(n * (1 - similarity) / (1 + similarity))
    if changed == 0:
        return list(text)
    run = max(1, changed - 4)
    start = rng.randrange(4, max(5, len(text) - run - 4))
    return text[:start] + random_text(words, run, rng) + text[start + run :]


def written(words: Iterable[str]) -> str:
    """The words as a text of sentences."""
    text = []
    for position, word in enumerate(words):
        text.append(word.capitalize() if position % 12 == 0 else word + ("." if position % 12 == 11 else ""))
    return " ".join(text)


# Ideographs and kana stand alone, as do mathematical and currency signs.
LETTER = r"[\p{L}\p{N}\p{M}--[\p{Han}\p{Hiragana}\p{Katakana}]]"
WORD = regex.compile(r"[\p{Sm}\p{Sc}\p{Han}\p{Hiragana}\p{Katakana}]|" + f"{LETTER}+", regex.V1)


def shingles_of(text: str, ngram: int = 5) -> set[tuple[str, ...]]:
    """All runs of `ngram` words, or the one run of a shorter text."""
    words = WORD.findall(text.lower())
    return {tuple(words[i : i + ngram]) for i in range(max(1, len(words) - ngram + 1))}


def jaccard_of(a: str, b: str, ngram: int = 5) -> float:
    """|A and B| / |A or B| of the sets of shingles."""
    first, second = shingles_of(a, ngram), shingles_of(b, ngram)
    return len(first & second) / len(first | second)
