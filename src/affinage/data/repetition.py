"""Repetition rules of Gopher and line rules of C4, as kernels over UTF-8 bytes: which rule a text breaks first.

Gopher: Rae et al. 2021 (arXiv 2112.11446), table A1 and appendix A1.1. C4: Raffel et al. 2020 (arXiv 1910.10683),
section 2.2. A word is a run of letters, numbers and marks in lower case, as in deduplication; a line is what stands
between line ends, if anything does; a paragraph is a run of lines without an empty one between. Shares of n-grams are
of the characters of words, so that a text that says one thing only reaches 1.
"""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from affinage.data.code_points import BLANK, SINGLE, WORD, decode, text_buffers, word_table
from affinage.data.compiled import kernel
from affinage.data.minhash import mix

TOP, DUPLICATE = (2, 3, 4), (5, 6, 7, 8, 9, 10)  # words of the n-grams of table A1
RULES = (
    "duplicate lines",
    "duplicate paragraphs",
    "characters in duplicate lines",
    "characters in duplicate paragraphs",
    *(f"top {n}-gram" for n in TOP),
    *(f"duplicate {n}-grams" for n in DUPLICATE),
    "bullet lines",
    "lines that end in an ellipsis",
    "few lines end a sentence",
)
# Shares above which a document is removed (Rae et al. 2021, table A1 and appendix A1.1).
GOPHER = dict(
    zip(RULES, [0.3, 0.3, 0.2, 0.2, 0.2, 0.18, 0.16, 0.15, 0.14, 0.13, 0.12, 0.11, 0.1, 0.9, 0.3], strict=False)
)
# C4 drops the lines that end no sentence, a third of the text. FineWeb (arXiv 2406.17557, 3.6) found this share of
# lines that end one to gain nearly as much and lose a third of that.
_MIN_SENTENCE_ENDS = 0.12
_NO_RULE = 2.0
NO_SENTENCE_ENDS, LOREM_IPSUM, CURLY_BRACKET = RULES[-1], "lorem ipsum", "curly bracket"
_BULLETS = np.array([ord(sign) for sign in "•‣◦⁃▪*-"], np.int64)
_ENDS = np.array([ord(sign) for sign in ".!?\"'”’»…"], np.int64)  # C4's, and the closing quotation marks of French
_PRIME = np.uint64(0x9E3779B97F4A7C15)
_MASK = np.uint32(0xFFFFFF)
_LINES, _PARAGRAPHS, _WORDS, _BULLETED, _ELLIPSES, _ENDED = range(6)  # what `_scan` counts


@kernel
def _scan(
    data: np.ndarray,
    i: np.int64,
    end: np.int64,
    table: np.ndarray,
    words: np.ndarray,
    word_sizes: np.ndarray,
    lines: np.ndarray,
    line_sizes: np.ndarray,
    paragraphs: np.ndarray,
    paragraph_sizes: np.ndarray,
    counts: np.ndarray,
) -> None:
    """Hashes and characters of the words, lines and paragraphs of one text, and how many of which kind there are."""
    counts[:] = 0
    word, size = np.uint64(0), 0
    line, line_size, settled, settled_size = np.uint64(0), 0, np.uint64(0), 0
    first, last, dots = np.int64(0), np.int64(0), 0
    paragraph, paragraph_size = np.uint64(0), 0
    while i <= end:
        code, length = (np.int64(10), 1) if i == end else decode(data, i)
        i += length
        kind, point = table[code] >> np.uint32(24), np.uint64(table[code] & _MASK)
        if size and kind != WORD:
            words[counts[_WORDS]], word_sizes[counts[_WORDS]] = mix(word), size
            counts[_WORDS] += 1
            word, size = np.uint64(0), 0
        if code == 10:
            if settled_size:
                lines[counts[_LINES]], line_sizes[counts[_LINES]] = mix(settled), settled_size
                counts[_LINES] += 1
                counts[_BULLETED] += (first == _BULLETS).any()
                ellipsis = last == 0x2026 or dots >= 3
                counts[_ELLIPSES] += ellipsis
                counts[_ENDED] += (last == _ENDS).any() and not ellipsis
                paragraph, paragraph_size = (paragraph ^ mix(settled)) * _PRIME, paragraph_size + settled_size
            if paragraph_size and (settled_size == 0 or i > end):
                paragraphs[counts[_PARAGRAPHS]], paragraph_sizes[counts[_PARAGRAPHS]] = mix(paragraph), paragraph_size
                counts[_PARAGRAPHS] += 1
                paragraph, paragraph_size = np.uint64(0), 0
            line, line_size, settled, settled_size, dots = np.uint64(0), 0, np.uint64(0), 0, 0
        elif kind == BLANK:
            if settled_size:
                line, line_size = (line ^ np.uint64(code + 1)) * _PRIME, line_size + 1
        else:
            if settled_size == 0:
                first = code
            line, line_size = (line ^ np.uint64(code + 1)) * _PRIME, line_size + 1
            settled, settled_size, last = line, line_size, code
            dots = dots + 1 if code == 46 else 0
            if kind == SINGLE:
                words[counts[_WORDS]], word_sizes[counts[_WORDS]] = mix(point * _PRIME), 1
                counts[_WORDS] += 1
            elif kind == WORD:
                word, size = (word ^ (point + np.uint64(1))) * _PRIME, size + 1


@kernel
def _place(keys: np.ndarray, mask: np.int64, key: np.uint64) -> np.int64:
    """Where a key is in an open-addressing table of `mask` + 1 places, or the free place (0) where it belongs."""
    place = np.int64(key >> np.uint64(20)) & mask
    while keys[place] != 0 and keys[place] != key:
        place = (place + 1) & mask
    return place


@kernel
def _duplicates(hashes: np.ndarray, sizes: np.ndarray, count: int, keys: np.ndarray) -> tuple[float, float]:
    """Share of the elements, and of their characters, that were there before."""
    mask = np.int64(1)
    while mask < 2 * count:
        mask *= 2
    keys[:mask] = 0
    again, characters, total = 0, 0, 0
    for k in range(count):
        key = hashes[k] | np.uint64(1)
        place = _place(keys, mask - 1, key)
        total += sizes[k]
        if keys[place] == key:
            again += 1
            characters += sizes[k]
        keys[place] = key
    return again / max(count, 1), characters / max(total, 1)


@kernel
def _ngram(words: np.ndarray, start: int, n: int) -> np.uint64:
    rolling = np.uint64(n)
    for k in range(start, start + n):
        rolling = (rolling ^ words[k]) * _PRIME
    return mix(rolling) | np.uint64(1)


@kernel
def _top(
    words: np.ndarray, ends: np.ndarray, count: int, n: int, keys: np.ndarray, seen: np.ndarray
) -> tuple[int, int]:
    """Characters of the most frequent n-gram, the longest of several, and the most that any repeated one has.

    `ends[k]` are the characters of the words before word k. An n-gram that occurs once has no characters.
    """
    mask = np.int64(1)
    while mask < 2 * count:
        mask *= 2
    keys[:mask] = 0
    seen[:mask] = 0
    most, characters, largest = 1, 0, 0
    for k in range(count - n + 1):
        key = _ngram(words, k, n)
        place = _place(keys, mask - 1, key)
        keys[place] = key
        seen[place] += 1
        times = seen[place]
        if times > 1:
            here = times * (ends[k + n] - ends[k])
            largest = max(largest, here)
            if times > most or (times == most and here > characters):
                most, characters = times, here
    return characters, largest


@kernel
def _repeated(words: np.ndarray, ends: np.ndarray, count: int, n: int, keys: np.ndarray, skip: bool) -> int:
    """Characters in n-grams that occurred before; no word counts twice.

    With `skip` an n-gram begins after the repeated one before it, as the rule has it; without, every word in any
    repeated n-gram counts, which is no less for this and for every longer n-gram.
    """
    mask = np.int64(1)
    while mask < 2 * count:
        mask *= 2
    keys[:mask] = 0
    characters, k, covered = 0, 0, 0
    while k < count - n + 1:
        key = _ngram(words, k, n)
        place = _place(keys, mask - 1, key)
        if keys[place] == key:
            characters += ends[k + n] - ends[max(k, covered)]
            covered = k + n
            k += n if skip else 1
        else:
            keys[place] = key
            k += 1
    return characters


@kernel
def _first_broken(
    data: np.ndarray,
    offsets: np.ndarray,
    rows: np.ndarray,
    table: np.ndarray,
    limits: np.ndarray,
    broken: np.ndarray,
    values: np.ndarray,
) -> None:
    longest = 0
    for row in rows:
        longest = max(longest, offsets[row + 1] - offsets[row])
    words, word_sizes = np.empty(longest + 1, np.uint64), np.empty(longest + 1, np.int64)
    lines, line_sizes = np.empty(longest + 1, np.uint64), np.empty(longest + 1, np.int64)
    paragraphs, paragraph_sizes = np.empty(longest + 1, np.uint64), np.empty(longest + 1, np.int64)
    keys, seen = np.empty(4 * longest + 4, np.uint64), np.empty(4 * longest + 4, np.int64)
    ends = np.zeros(longest + 2, np.int64)
    counts, found = np.zeros(6, np.int64), np.zeros(limits.size)
    for r in range(rows.size):
        start, end = np.int64(offsets[rows[r]]), np.int64(offsets[rows[r] + 1])
        _scan(data, start, end, table, words, word_sizes, lines, line_sizes, paragraphs, paragraph_sizes, counts)
        count = counts[_WORDS]
        for k in range(count):
            ends[k + 1] = ends[k] + word_sizes[k]
        total = max(ends[count], 1)
        found[0], found[2] = _duplicates(lines, line_sizes, counts[_LINES], keys)
        found[1], found[3] = _duplicates(paragraphs, paragraph_sizes, counts[_PARAGRAPHS], keys)
        # A repeated 3- or 4-gram is covered by two 2-grams that occur as often: it has no more characters than both.
        two, largest = _top(words, ends, count, 2, keys, seen)
        found[4:7] = min(two / total, 1.0), 0.0, 0.0  # an n-gram may overlap itself
        if 2 * largest > total * limits[5:7].min():
            for k in range(2):
                found[5 + k] = min(_top(words, ends, count, 3 + k, keys, seen)[0] / total, 1.0)
        found[7:13] = 0.0
        if _repeated(words, ends, count, 5, keys, False) > total * limits[7:13].min():
            for k in range(6):
                found[7 + k] = _repeated(words, ends, count, 5 + k, keys, True) / total
        in_lines = max(counts[_LINES], 1)
        found[13], found[14] = counts[_BULLETED] / in_lines, counts[_ELLIPSES] / in_lines
        found[15] = -counts[_ENDED] / in_lines  # the one share that must not be too small
        broken[r] = -1
        for rule in range(limits.size):
            if found[rule] > limits[rule]:
                broken[r], values[r] = rule, abs(found[rule])
                break


def broken_rules(
    text: pa.Array, rows: np.ndarray, gopher: bool | Mapping[str, float], c4: bool
) -> dict[int, tuple[str, str]]:
    """The first rule that each of the texts `rows` (int64 [K]) breaks, and by what value; nothing for the others.

    `gopher` may be shares by the names of rules, in place of the published ones.
    """
    if gopher is False and not c4:
        return {}
    limits = np.full(len(RULES), _NO_RULE)
    if gopher is not False:
        limits[:-1] = [share if gopher is True else gopher.get(name, share) for name, share in GOPHER.items()]
    if c4:
        limits[-1] = -_MIN_SENTENCE_ENDS
    data, offsets = text_buffers(text)
    broken, values = np.full(rows.size, -1, np.int64), np.zeros(rows.size)
    _first_broken(data, offsets, rows, word_table(), limits, broken, values)
    verdicts = {
        int(rows[k]): (RULES[broken[k]], f"{values[k]:.2f} of {_of_what(RULES[broken[k]])}")
        for k in np.flatnonzero(broken >= 0)
    }
    for phrase, reason in (("lorem ipsum", LOREM_IPSUM), ("{", CURLY_BRACKET)) if c4 else ():
        found = pc.match_substring(text.take(pa.array(rows)), phrase, ignore_case=True)
        for k in np.flatnonzero(found).tolist():
            verdicts.setdefault(int(rows[k]), (reason, f"holds {phrase}"))
    return verdicts


def _of_what(rule: str) -> str:
    if "gram" in rule or "characters" in rule:
        return "its characters"
    return "its paragraphs" if "paragraphs" in rule else "its lines"
