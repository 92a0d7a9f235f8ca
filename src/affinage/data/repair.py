"""Unicode repair of whole batches: a kernel over the UTF-8 bytes, and Python for the few texts that need more."""

import unicodedata
from dataclasses import dataclass
from functools import cache

import ftfy
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from ftfy.fixes import fix_c1_controls

from affinage.data.code_points import (
    ALPHANUMERIC,
    C1,
    DROPPED,
    JOINER,
    MARK,
    MOJIBAKE_FIRST,
    MOJIBAKE_NEXT,
    NEWLINE,
    REPLACED,
    SPACE,
    UNSETTLED,
    cleaning_table,
    decode,
    text_buffers,
)
from affinage.data.compiled import kernel

CHARACTERS, COUNTED, LETTERS, SUSPECT, LOOSE = range(5)  # columns of the kernel's facts about a text
_SPECIAL = DROPPED | NEWLINE | JOINER | REPLACED
_JOINING_SCRIPTS = (
    0x600  # Arabic, the Indic scripts and emoji join with U+200C and U+200D; Latin, Greek, Cyrillic do not
)


@dataclass(frozen=True)
class Repaired:
    """Repaired texts and int64 [N] each: characters, those that count (no spaces, no marks), letters and digits."""

    text: pa.Array
    characters: np.ndarray
    counted: np.ndarray
    alphanumeric: np.ndarray


@kernel
def _strip(
    data: np.ndarray,
    offsets: np.ndarray,
    table: np.ndarray,
    ascii: np.ndarray,
    out: np.ndarray,
    out_offsets: np.ndarray,
    facts: np.ndarray,
) -> None:
    """Copy every text without what is dropped or replaced, and count. `out` is no smaller than the texts."""
    o = 0
    for text in range(offsets.size - 1):
        i, end = np.int64(offsets[text]), np.int64(offsets[text + 1])
        characters, spaces, letters, marks, suspect, loose = 0, 0, 0, 0, 0, 0
        before = np.uint16(0)  # bits of the code point before, as it stands in the raw text
        kept = np.int64(0)  # the last code point that was kept
        while i < end:
            start, counts = i, np.int64(0)
            while i < end and ascii[data[i]] >= 0:
                out[o] = data[i]
                counts += ascii[data[i]]
                i += 1
                o += 1
            if i > start:
                characters += int(i - start)
                letters += int(counts & 0xFFFFFFFF)
                spaces += int(counts >> 32)
                before, kept = np.uint16(0), np.int64(data[i - 1])
                if i == end:
                    break
            point, size = decode(data, i)
            bits = table[point]
            suspect |= (before & MOJIBAKE_FIRST != 0) & (bits & MOJIBAKE_NEXT != 0) | (bits & C1 != 0)
            before = bits
            i += size
            if bits & _SPECIAL:
                crlf = point == 0x0D and i < end and data[i] == 0x0A
                if bits & DROPPED or crlf or (bits & JOINER and kept < _JOINING_SCRIPTS):
                    continue
                if bits & (NEWLINE | REPLACED):
                    point = np.int64(0x0A) if bits & NEWLINE else np.int64(0x5F)
                    bits = table[point]
                    out[o] = point
                    size = 0
                    o += 1
            for k in range(i - size, i):
                out[o] = data[k]
                o += 1
            kept = point
            characters += 1
            spaces += bits & SPACE != 0
            letters += bits & ALPHANUMERIC != 0
            marks += bits & MARK != 0
            loose |= bits & UNSETTLED != 0
        out_offsets[text + 1] = o
        facts[text, CHARACTERS] = characters
        facts[text, COUNTED] = characters - spaces - marks
        facts[text, LETTERS] = letters
        facts[text, SUSPECT] = suspect
        facts[text, LOOSE] = loose


@cache
def _ascii_counts() -> np.ndarray:
    """What a byte adds to the counts: 1 for a letter or digit, 2^32 for a space; -1 if the fast loop must stop."""
    table = cleaning_table()[:128]
    counts = np.full(256, -1, np.int64)
    counts[:128] = (table & ALPHANUMERIC != 0) + (table & SPACE != 0) * 2**32
    counts[:128][table & _SPECIAL != 0] = -1
    return counts


def strip(text: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """The texts without control and invisible characters, line ends as \\n, and facts about each, int64 [N, 5]."""
    data, offsets = text_buffers(text)
    out = np.empty(int(offsets[-1] - offsets[0]), np.uint8)
    out_offsets = np.zeros(len(text) + 1, np.int32)
    facts = np.zeros((len(text), 5), np.int64)
    _strip(data, offsets, cleaning_table(), _ascii_counts(), out, out_offsets, facts)
    buffers = [None, pa.py_buffer(out_offsets), pa.py_buffer(out)]
    return pa.Array.from_buffers(pa.string(), len(text), buffers), facts


def repair(text: pa.Array) -> Repaired:
    """Repair a batch of texts.

    Text that was decoded with the wrong encoding is decoded again (ftfy), control characters, zero-width characters
    and byte order marks go, line ends become \\n, U+2581 becomes _, and the result is in Unicode's normal form C.
    """
    stripped, facts = strip(text)
    for column, mend in ((SUSPECT, _decode_again), (LOOSE, _compose)):
        rows = np.flatnonzero(facts[:, column])
        if rows.size:
            # What was decoded wrongly is seen in the raw text only: its C1 controls are gone from the stripped one.
            before = text if column == SUSPECT else stripped
            mended = pa.array([mend(value) for value in before.take(rows).to_pylist()], pa.string())
            again, facts[rows] = strip(mended)
            mask = np.zeros(len(text), bool)
            mask[rows] = True
            stripped = pc.replace_with_mask(stripped, mask, again)
    return Repaired(stripped, facts[:, CHARACTERS], facts[:, COUNTED], facts[:, LETTERS])


def _decode_again(text: str) -> str:
    return fix_c1_controls(ftfy.fix_encoding(text))


def _compose(text: str) -> str:
    return unicodedata.normalize("NFC", text)
