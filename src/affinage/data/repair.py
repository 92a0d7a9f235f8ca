"""Unicode repair of whole batches: Arrow finds the few texts that need it, and Python repairs those."""

import re
import unicodedata

import ftfy
import pyarrow as pa
import pyarrow.compute as pc
from ftfy.fixes import fix_c1_controls

_UNSEEN = (0xAD, 0x200B, 0x200E, 0x200F, *range(0x202A, 0x202F), 0x2060, *range(0x2066, 0x206A), 0xFEFF)
_NO_CHARACTERS = [plane * 0x10000 + low for plane in range(17) for low in (0xFFFE, 0xFFFF)]
_REPLACED: dict[int, str | None] = {
    **dict.fromkeys(set(range(0x20)) - {0x09, 0x0A}),
    **dict.fromkeys((*range(0x7F, 0xA0), *_UNSEEN, *range(0xFDD0, 0xFDF0), *range(0xFFF9, 0xFFFC), *_NO_CHARACTERS)),
    **dict.fromkeys((0x0B, 0x0C, 0x0D, 0x2028, 0x2029), "\n"),
    0x2581: "_",  # SentencePiece writes it for a space
}
# Zero-width joiners stay where they join: Arabic, the Indic scripts and emoji; Latin, Greek and Cyrillic do not.
_LOOSE_JOINER = re.compile("(^|[\0-\u05ff])[\u200c\u200d]+")
# The first and a following byte of a UTF-8 character that was read as Windows-1252, or a C1 control, which is in
# practice Windows-1252 read as Latin-1.
_MISREAD = "[ÂÃâðÎÏÐÑ][\u0080-\u00bf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]|[\u0080-\u009f]"
_SPECIAL = _MISREAD + "|[" + "".join(rf"\x{{{point:x}}}" for point in (*_REPLACED, 0x200C, 0x200D)) + "]"


def repair(text: pa.Array) -> pa.Array:
    """Repair a batch of texts.

    Text that was decoded with the wrong encoding is decoded again (ftfy), control characters, zero-width characters
    and byte order marks go, line ends become \\n, U+2581 becomes _, and the result is in Unicode's normal form C.
    """
    special = pc.match_substring_regex(text, _SPECIAL).to_pylist()
    pairs = zip(text.to_pylist(), special)
    return pa.array([_repair(each) if odd else unicodedata.normalize("NFC", each) for each, odd in pairs], pa.string())


def _repair(text: str) -> str:
    if re.search(_MISREAD, text):
        text = fix_c1_controls(ftfy.fix_encoding(text))
    return _strip(unicodedata.normalize("NFC", _strip(text)))


def _strip(text: str) -> str:
    return _LOOSE_JOINER.sub(r"\1", text.replace("\r\n", "\n").translate(_REPLACED))
