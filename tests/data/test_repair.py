"""The repair kernel against the slow, obvious definition, on ordinary and hostile Unicode."""

import unicodedata
from itertools import pairwise

import ftfy
import pyarrow as pa
from ftfy.fixes import fix_c1_controls
from hypothesis import example, given
from hypothesis import strategies as st

from affinage.data.code_points import count_characters, repair

UNSEEN = "\u00ad\u200b\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060\u2066\u2067\u2068\u2069\ufeff\ufff9\ufffa\ufffb"
MISREAD_FIRST = "ÂÃâðÎÏÐÑ"
MISREAD_NEXT = "".join(map(chr, range(0x80, 0xC0))) + "€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ"


def strip_one(text: str) -> str:
    """What the kernel's table and its few special cases mean."""
    kept: list[str] = []
    for character in text.replace("\r\n", "\n"):
        point = ord(character)
        if character in "\r\x0b\x0c\u2028\u2029":
            kept.append("\n")
        elif character == "\u2581":
            kept.append("_")
        elif character in "\u200c\u200d":
            kept += [character] if kept and ord(kept[-1]) >= 0x600 else []
        elif character in "\t\n" or not (
            unicodedata.category(character) == "Cc"
            or character in UNSEEN
            or 0xFDD0 <= point < 0xFDF0
            or point & 0xFFFE == 0xFFFE
        ):
            kept.append(character)
    return "".join(kept)


def repair_one(text: str) -> tuple[str, int, int, int]:
    misread = any(a in MISREAD_FIRST and b in MISREAD_NEXT for a, b in pairwise(text))
    if misread or any(0x80 <= ord(character) < 0xA0 for character in text):
        text = fix_c1_controls(ftfy.fix_encoding(text))
    text = strip_one(unicodedata.normalize("NFC", strip_one(text)))
    counted = [c for c in text if not c.isspace() and unicodedata.category(c)[0] != "M"]
    return text, len(text), len(counted), sum(c.isalnum() for c in text)


def repair_all(texts: list[str]) -> list[tuple[str, int, int, int]]:
    repaired = repair(pa.array(texts, pa.string()))
    return [(text, *counts) for text, counts in zip(repaired.to_pylist(), count_characters(repaired).T.tolist())]


ODD = st.sampled_from(
    [
        *"\r\n\t\x00\x0b\x0c\x7f\x85\x92\u00ad\u200b\u200c\u200d\u2028\u2581\ufeff\ufffe\u202e éÃ©â€™ÂÅx9-",
        *"\u0301\u0327\u1100\u1161\u11a8\u2126\U0001fffe",
        *("\r\n", "Ã©", "â€™", "👩\u200d💻", "e\u0301", "क\u093c", "نا\u200cمه"),
    ]
)
TEXTS = st.lists(st.one_of(ODD, st.characters(exclude_categories=["Cs"])), max_size=30).map("".join)


@given(st.lists(TEXTS, min_size=1, max_size=8))
@example(["ASCII only.\r\n", "", "déjà vu"])
@example(["\x92\x93 l\x92homme", "Ã©tÃ©", "schÃ¶n"])
def test_kernel_is_the_obvious_definition(texts):
    assert repair_all(texts) == [repair_one(text) for text in texts]


REPAIRED = {
    "line\r\nline\rline\n": "line\nline\nline\n",
    "\ufeffzero\u200bwidth and soft\u00adhyphen": "zerowidth and softhyphen",
    "nul\0 bell\a tab\t": "nul bell tab\t",
    "e\u0301te\u0301 and e\u200b\u0301": "été and é",
    "l\x92homme": "l’homme",
    "l’Ã©tÃ© dernier, donâ€™t": "l’été dernier, don’t",
    "▁piece": "_piece",
    "« Où ? » 12\u202f345,67\u00a0€": "« Où ? » 12\u202f345,67\u00a0€",
    "👩\u200d💻 and h\u200de": "👩\u200d💻 and he",
    "page\x0cpage": "page\npage",
}


def test_repairs_a_reader_would_ask_for():
    assert [found[0] for found in repair_all([*REPAIRED])] == [*REPAIRED.values()]
    column = pa.array(["first", "second\r\n", "third\0"])[1:]  # of which slices are read at their offset
    assert repair(column).to_pylist() == ["second\n", "third"]


def test_marks_belong_to_their_letter():
    (text, characters, counted, letters) = repair_all(["हिन्दी"])[0]
    assert characters == len(text) and counted == letters == 3
