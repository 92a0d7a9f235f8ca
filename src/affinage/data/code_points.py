"""Unicode: the compilation of text kernels, what each code point is to them, and the repair of texts."""

import re
import unicodedata
from collections.abc import Callable
from functools import cache
from typing import Any

import ftfy
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from ftfy.fixes import fix_c1_controls
from numba import njit

Array = np.ndarray
CODE_POINTS = 0x110000
SEPARATOR, BLANK, WORD, SINGLE = 0, 1, 2, 3  # classes of `word_table`, in its upper 8 bits
_SCANNED = [*range(0x20000), *range(0x2F800, 0x2FA20), *range(0xE0000, 0xE01F0)]  # where marks and signs are


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function with numba, without the GIL; the machine code is cached where a cache can be written."""
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache folder is writable
        return njit(nogil=True)(function)


@cache
def characters() -> Any:
    """Every code point as a one-character string; surrogates, which no text holds, as U+0000."""
    points = np.arange(CODE_POINTS, dtype=np.uint32)
    points[0xD800:0xE000] = 0
    return points.view("U1")


@cache
def _points_of(*categories: str) -> list[int]:
    return [point for point in _SCANNED if unicodedata.category(chr(point)).startswith(categories)]


@cache
def _counted() -> np.ndarray:
    """Which code points are neither space nor mark, and which are letters or numbers (str.isalnum), bool [2, ...]."""
    counted = ~np.strings.isspace(characters())
    counted[_points_of("M")] = False
    return np.stack([counted, np.strings.isalnum(characters())])


@cache
def word_table(*, folded: bool = False) -> np.ndarray:
    """Class and lower-case form (the lower 24 bits) of every code point for the kernels that split words, uint32.

    Letters, numbers and marks make words; an ideograph, a kana, a mathematical or currency sign is one by itself. With
    `folded`, case is folded where that is one code point in normal form (as for ς, ſ), and signs separate.
    """
    kinds = np.zeros(CODE_POINTS, np.uint32)
    kinds[np.strings.isspace(characters())] = BLANK
    kinds[np.strings.isalnum(characters())] = WORD
    kinds[_points_of("M")] = WORD
    kinds[_points_of("Sm", "Sc")] = SEPARATOR if folded else SINGLE
    for low, high in ((0x3041, 0x3100), (0x3400, 0x4DC0), (0x4E00, 0xA000), (0xF900, 0xFB00), (0x20000, 0x40000)):
        kinds[low:high][kinds[low:high] == WORD] = SINGLE
    lower = np.arange(CODE_POINTS, dtype=np.uint32)
    for point, letter in enumerate(map(chr, range(0x20000))):
        forms = (unicodedata.normalize("NFC", letter.casefold()) if folded else "", letter.lower(), letter)
        lower[point] = ord(next(form for form in forms if len(form) == 1))
    return kinds << np.uint32(24) | lower


@kernel
def decode(data: Array, i: np.int64) -> tuple[np.int64, int]:
    """The code point at byte `i` of valid UTF-8 and its length in bytes."""
    at, one = np.uint64(i), np.uint64(1)  # an index without a sign, which does not count from the end
    b = data[at]
    if b < 0x80:
        return np.int64(b), 1
    if b < 0xE0:
        return np.int64(b & 0x1F) << 6 | np.int64(data[at + one] & 0x3F), 2
    low = np.int64(data[at + one] & 0x3F) << 6 | np.int64(data[at + one + one] & 0x3F)
    if b < 0xF0:
        return np.int64(b & 0x0F) << 12 | low, 3
    return np.int64(b & 0x07) << 18 | low << 6 | np.int64(data[at + one + one + one] & 0x3F), 4


def count_characters(text: pa.Array) -> np.ndarray:
    """Of N texts the characters, those that are neither space nor mark, and letters and numbers, int64 [3, N]."""
    texts = text.to_pylist()
    ends = np.cumsum([0, *map(len, texts)])
    points = np.frombuffer("".join(["\0", *texts]).encode("utf-32-le"), np.uint32)  # so that sums begin before a text
    return np.diff([ends, *(np.cumsum(counted[points], dtype=np.uint32)[ends] for counted in _counted())])


def text_buffers(text: Any) -> tuple[np.ndarray, np.ndarray]:
    """UTF-8 bytes (uint8) and offsets [N + 1] (int32, or int64 of large strings) of a string array without nulls."""
    width = np.int64 if pa.types.is_large_string(text.type) else np.int32
    # Read only, in which Arrow's buffers differ: a kernel is compiled for each kind.
    offsets, data = (memoryview(part or b"").toreadonly() for part in text.buffers()[1:])
    return np.frombuffer(data, np.uint8), np.frombuffer(offsets, width)[text.offset : text.offset + len(text) + 1]


# ---- repair ----

_UNSEEN = (0xAD, 0x200B, 0x200E, 0x200F, *range(0x202A, 0x202F), 0x2060, *range(0x2066, 0x206A), 0xFEFF)
_REPLACED: dict[int, str | None] = {
    **dict.fromkeys(set(range(0x20)) - {0x09, 0x0A}),
    **dict.fromkeys((*range(0x7F, 0xA0), *_UNSEEN, *range(0xFDD0, 0xFDF0), *range(0xFFF9, 0xFFFC), 0xFFFE, 0xFFFF)),
    **dict.fromkeys((0x0B, 0x0C, 0x0D, 0x2028, 0x2029), "\n"),
    0x2581: "_",  # SentencePiece writes it for a space
}
# The first and a following byte of a UTF-8 character that was read as Windows-1252, or a C1 control, which is in
# practice Windows-1252 read as Latin-1.
_MISREAD = "[ÂÃâðÎÏÐÑ][\u0080-\u00bf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]|[\u0080-\u009f]"
_SPECIAL = _MISREAD + "|[" + "".join(rf"\x{{{point:x}}}" for point in _REPLACED) + "]"


def repair(text: pa.Array) -> pa.Array:
    """Repair a batch of texts.

    Text that was decoded with the wrong encoding is decoded again (ftfy), control characters, zero-width spaces
    and byte order marks go, line ends become \\n, U+2581 becomes _, and the result is in Unicode's normal form C.
    """
    repaired = []
    for each, special in zip(text.to_pylist(), pc.match_substring_regex(text, _SPECIAL).to_pylist()):
        if special:  # few texts are
            if re.search(_MISREAD, each):
                each = fix_c1_controls(ftfy.fix_encoding(each))
            each = each.replace("\r\n", "\n").translate(_REPLACED)
        repaired.append(unicodedata.normalize("NFC", each))
    return pa.array(repaired, pa.string())
