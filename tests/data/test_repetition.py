"""The rules of Gopher and C4 against their slow, obvious definitions."""

import random
from collections import Counter

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from planted_copies import lexicon, random_text, words_of, written

from affinage.data.repetition import RULES, broken_rules


def duplicated(elements: list[str]) -> tuple[float, float]:
    seen: set[str] = set()
    again = [element for element in elements if element in seen or seen.add(element)]
    characters = sum(map(len, elements))
    return len(again) / max(len(elements), 1), sum(map(len, again)) / max(characters, 1)


def top(words: list[str], n: int) -> float:
    counts = Counter(tuple(words[k : k + n]) for k in range(len(words) - n + 1))
    often = max(counts.values(), default=1)
    most = max((sum(map(len, ngram)) for ngram, count in counts.items() if count == often), default=0)
    return min(1, often * most / max(sum(map(len, words)), 1)) if often > 1 else 0.0


def repeated(words: list[str], n: int) -> float:
    seen, characters, k = set(), 0, 0
    while k < len(words) - n + 1:
        ngram = tuple(words[k : k + n])
        if ngram in seen:
            characters += sum(map(len, ngram))
            k += n
        else:
            seen.add(ngram)
            k += 1
    return characters / max(sum(map(len, words)), 1)


def broken_one(text: str) -> str | None:
    lines = [line.strip() for line in text.split("\n")]
    paragraphs = [part.strip("\n") for part in "\n".join(lines).split("\n\n") if part.strip("\n")]
    lines = [line for line in lines if line]
    by_line, by_line_characters = duplicated(lines)
    by_paragraph, _ = duplicated(paragraphs)
    by_paragraph_characters = duplicated([part.replace("\n", "") for part in paragraphs])[1]
    words = words_of(text)
    ellipses = [line.endswith(("...", "…")) for line in lines]
    ended = [line.endswith(tuple(".!?\"'”’»")) and not line.endswith("...") for line in lines]
    values = [by_line, by_paragraph, by_line_characters, by_paragraph_characters]
    values += [top(words, n) for n in (2, 3, 4)] + [repeated(words, n) for n in range(5, 11)]
    values += [sum(line.startswith(tuple("•‣◦⁃▪*-")) for line in lines) / max(len(lines), 1)]
    values += [sum(ellipses) / max(len(lines), 1), -sum(ended) / max(len(lines), 1)]
    limits = [0.3, 0.3, 0.2, 0.2, 0.2, 0.18, 0.16, 0.15, 0.14, 0.13, 0.12, 0.11, 0.1, 0.9, 0.3, -0.12]
    return next((rule for rule, value, limit in zip(RULES, values, limits, strict=True) if value > limit), None)


def broken(texts: list[str], gopher=True, c4=True) -> list[str | None]:
    found = broken_rules(pa.array(texts, pa.string()), np.arange(len(texts)), gopher, c4)
    return [found[row][0] if row in found else None for row in range(len(texts))]


PIECES = st.sampled_from(
    [*"ab é.\n-…{ 中=", "\n\n", " \n", "...", "le chat dort ", "a b c d e f ", "- x\n", "fin.\n", "Ça "]
)


@given(st.lists(st.lists(PIECES, max_size=40).map("".join), min_size=1, max_size=5))
def test_the_kernel_is_the_obvious_definition_on_odd_texts(texts):
    assert broken(texts) == [broken_one(text) or ("curly bracket" if "{" in text else None) for text in texts]


def test_the_kernel_is_the_obvious_definition_on_texts_with_repeated_passages():
    rng = random.Random(3)
    words = lexicon(300, rng)
    texts = []
    for _ in range(250):
        text = random_text(words, rng.randint(5, 150), rng)
        for _ in range(rng.randint(0, 4)):  # repeats a passage, so that each rule is met on both sides of its limit
            start, length = rng.randrange(len(text)), rng.randint(1, 12)
            text[start:start] = text[start : start + length] * rng.randint(1, 3)
        breaks = rng.randint(0, 4)
        texts.append(written(text).replace(". ", ["\n", "\n\n", ". ", ".\n", ".\n\n"][breaks]))
    expected = [broken_one(text) for text in texts]
    assert broken(texts) == expected
    assert len({*expected}) > 10 and expected.count(None) > 30


EXAMPLES = {
    "One line.\nOne line.\nOne line.\nAnother.": "duplicate lines",
    "Twice.\n\nTwice.\n\nA longer paragraph that differs from it.\n\nAnd a last one of some length.": None,
    "- one apple\n- two pears\n* three plums\n• four figs": "bullet lines",
    "Read more...\nThe sun was out.\nSee also…\nWe went home early.": "lines that end in an ellipsis",
    "No sentence here\nNor in this line": "few lines end a sentence",
    "Lorem Ipsum dolor sit amet.": "lorem ipsum",
    "function f() { return.": "curly bracket",
    "« Une phrase entre guillemets »": None,
}


def test_each_rule_by_an_example():
    assert dict(zip(EXAMPLES, broken([*EXAMPLES]))) == EXAMPLES
    assert not any(broken([*EXAMPLES], False, False)), "neither paper is the default"
