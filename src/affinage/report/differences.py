"""Where two near-duplicate texts differ, word by word."""

import difflib
import re

Piece = tuple[str, bool]  # text, whether the other side lacks it

BEFORE, LENGTH = 140, 460  # characters shown before the first difference, and in all


def excerpts(left: str, right: str) -> tuple[str, str]:
    """Of both texts the part around their first difference."""
    differ = (i for i, (one, other) in enumerate(zip(left, right)) if one != other)
    start = max(0, next(differ, min(len(left), len(right))) - BEFORE)
    if start:
        start = left.rfind(" ", 0, start) + 1 or start
    return _cut(left, start), _cut(right, start)


def _cut(text: str, start: int) -> str:
    return ("… " if start else "") + text[start : start + LENGTH] + (" …" if len(text) > start + LENGTH else "")


def differences(left: str, right: str) -> tuple[list[Piece], list[Piece]]:
    """Both texts cut into pieces, each marked as shared or as only on its side."""
    words_left, words_right = (re.findall(r"\s+|\w+|[^\w\s]", text) for text in (left, right))
    pieces: tuple[list[Piece], list[Piece]] = ([], [])
    matcher = difflib.SequenceMatcher(None, words_left, words_right, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        for side, words in zip(pieces, (words_left[i1:i2], words_right[j1:j2])):
            if words:
                side.append(("".join(words), tag != "equal"))
    return pieces
