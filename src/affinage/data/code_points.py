"""What each Unicode code point is to the text kernels, as tables that a kernel indexes by code point."""

import unicodedata
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa

from affinage.data.compiled import kernel

CODE_POINTS = 0x110000

# Bits of `cleaning_table`.
ALPHANUMERIC = 1  # a letter or a number, as str.isalnum has it
SPACE = 2  # as str.isspace has it
MARK = 4  # a combining mark: part of its letter, not counted for itself
DROPPED = 8  # control characters, zero-width and directional ones, noncharacters
NEWLINE = 16  # becomes a line feed
JOINER = 32  # zero-width joiner and non-joiner: kept where they join
UNSETTLED = 64  # a text with it may not be in NFC
REPLACED = 128  # U+2581, which SentencePiece writes for a space
MOJIBAKE_FIRST = 256  # the first ...
MOJIBAKE_NEXT = 512  # ... and a following byte of a UTF-8 character that was read as Windows-1252
C1 = 1024  # C1 controls: in practice Windows-1252 read as Latin-1

# Classes of `word_table`, in its upper 8 bits; the lower 24 hold the lower-case code point.
SEPARATOR, BLANK, WORD, SINGLE = 0, 1, 2, 3

_SCANNED = [*range(0x20000), *range(0x2F800, 0x2FA20), *range(0xE0000, 0xE01F0)]  # where marks and decompositions are
_UNSEEN = (0xAD, 0x200B, 0x200E, 0x200F, *range(0x202A, 0x202F), 0x2060, *range(0x2066, 0x206A), 0xFEFF)
_WINDOWS_1252 = "€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ"


def _characters() -> Any:
    """Every code point as a one-character string; surrogates, which no text holds, as U+0000."""
    points = np.arange(CODE_POINTS, dtype=np.uint32)
    points[0xD800:0xE000] = 0
    return points.view("U1")


@cache
def cleaning_table() -> np.ndarray:
    """Bits of every code point for the cleaning kernel, uint16 [CODE_POINTS]."""
    characters = _characters()
    table = np.zeros(CODE_POINTS, np.uint16)
    table[np.strings.isalnum(characters)] |= ALPHANUMERIC
    table[np.strings.isspace(characters)] |= SPACE
    seconds: set[int] = set()
    for point in _SCANNED:
        character = chr(point)
        if unicodedata.category(character)[0] == "M":
            table[point] |= MARK
        decomposition = unicodedata.decomposition(character)
        if decomposition and decomposition[0] != "<":
            seconds.update(int(part, 16) for part in decomposition.split()[1:])
            if not unicodedata.is_normalized("NFC", character):
                table[point] |= UNSETTLED
        if unicodedata.combining(character):
            table[point] |= UNSETTLED
    # Quick check of UAX 15: what may compose with the character before it, Hangul's vowels and finals among them.
    table[[*seconds, *range(0x1161, 0x1176), *range(0x11A8, 0x11C3)]] |= UNSETTLED
    table[[*range(0x20), *range(0x7F, 0xA0), *_UNSEEN, *range(0xFDD0, 0xFDF0), *range(0xFFF9, 0xFFFC)]] |= DROPPED
    table[[plane * 0x10000 + low for plane in range(17) for low in (0xFFFE, 0xFFFF)]] |= DROPPED
    table[[0x09, 0x0A]] &= 0xFFFF ^ DROPPED
    newlines = [0x0B, 0x0C, 0x0D, 0x2028, 0x2029]
    table[newlines] &= 0xFFFF ^ DROPPED
    table[newlines] |= NEWLINE
    table[[0x200C, 0x200D]] |= JOINER
    table[0x2581] |= REPLACED
    table[[ord(character) for character in "ÂÃâðÎÏÐÑ"]] |= MOJIBAKE_FIRST
    table[[*range(0x80, 0xC0), *map(ord, _WINDOWS_1252)]] |= MOJIBAKE_NEXT
    table[0x80:0xA0] |= C1
    return table


@cache
def word_table() -> np.ndarray:
    """Class and lower-case form of every code point for the kernels that split words, uint32 [CODE_POINTS].

    Letters, numbers and marks make words; an ideograph, a kana, a mathematical or currency sign is a word by itself;
    everything else separates.
    """
    characters = _characters()
    kinds = np.zeros(CODE_POINTS, np.uint32)
    kinds[np.strings.isspace(characters)] = BLANK
    kinds[np.strings.isalnum(characters)] = WORD
    for point in _SCANNED:
        category = unicodedata.category(chr(point))
        if category[0] == "M":
            kinds[point] = WORD
        elif category in ("Sm", "Sc"):
            kinds[point] = SINGLE
    for low, high in ((0x3041, 0x3100), (0x3400, 0x4DC0), (0x4E00, 0xA000), (0xF900, 0xFB00), (0x20000, 0x40000)):
        kinds[low:high][kinds[low:high] == WORD] = SINGLE
    lower = np.arange(CODE_POINTS, dtype=np.uint32)
    for point in range(0x20000):
        folded = chr(point).lower()
        if len(folded) == 1:
            lower[point] = ord(folded)
    return kinds << np.uint32(24) | lower


@cache
def letters_table() -> np.ndarray:
    """Which code points are letters, or numbers other than decimal digits, bool [CODE_POINTS]."""
    characters = _characters()
    return np.strings.isalnum(characters) & ~np.strings.isdecimal(characters)


@kernel
def decode(data: np.ndarray, i: np.int64) -> tuple[np.int64, int]:
    """The code point at byte `i` of valid UTF-8 and its length in bytes."""
    b = data[i]
    if b < 0x80:
        return np.int64(b), 1
    if b < 0xE0:
        return np.int64(b & 0x1F) << 6 | np.int64(data[i + 1] & 0x3F), 2
    if b < 0xF0:
        return np.int64(b & 0x0F) << 12 | np.int64(data[i + 1] & 0x3F) << 6 | np.int64(data[i + 2] & 0x3F), 3
    high = np.int64(b & 0x07) << 18 | np.int64(data[i + 1] & 0x3F) << 12
    return high | np.int64(data[i + 2] & 0x3F) << 6 | np.int64(data[i + 3] & 0x3F), 4


def text_buffers(text: Any) -> tuple[np.ndarray, np.ndarray]:
    """UTF-8 bytes (uint8) and offsets [N + 1] of a pyarrow string array without nulls; nothing is copied.

    Offsets are int32, or int64 of a large_string array.
    """
    _, offsets, data = text.buffers()
    width = np.int64 if pa.types.is_large_string(text.type) else np.int32
    bounds = np.frombuffer(offsets, width)[text.offset : text.offset + len(text) + 1]
    content = np.frombuffer(data, np.uint8) if data else np.zeros(0, np.uint8)
    for view in (content, bounds):
        view.flags.writeable = False  # Arrow's buffers differ in this, and a kernel is compiled for each kind
    return content, bounds
