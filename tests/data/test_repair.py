"""The repair of texts on ordinary and hostile Unicode, and the kernel that counts characters against Python's own."""

import unicodedata

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from affinage.data.code_points import count_characters, repair

ODD = st.sampled_from(
    [
        *"\r\n\t\x00\x0b\x0c\x7f\x85\x92\u00ad\u200b\u200d\u2028\u2581\ufeff\ufffe\u202e éÃ©â€™ÂÅx9-",
        *"\u0301\u0327\u1100\u1161\u11a8\u2126\U0001fffe",
        *("\r\n", "Ã©", "â€™", "👩\u200d💻", "e\u0301", "क\u093c", "نا\u200cمه"),
    ]
)
TEXTS = st.lists(st.one_of(ODD, st.characters(exclude_categories=["Cs"])), max_size=30).map("".join)
REPAIRED = {
    "line\r\nline\rline\n": "line\nline\nline\n",
    "\ufeffzero\u200bwidth and soft\u00adhyphen": "zerowidth and softhyphen",
    "nul\0 bell\a tab\t": "nul bell tab\t",
    "e\u0301te\u0301 and e\u200b\u0301": "été and é",
    "l\x92homme": "l’homme",
    "l’Ã©tÃ© dernier, donâ€™t": "l’été dernier, don’t",
    "▁piece": "_piece",
    "« Où ? » 12\u202f345,67\u00a0€": "« Où ? » 12\u202f345,67\u00a0€",
    "👩\u200d💻": "👩\u200d💻",
    "page\x0cpage": "page\npage",
}


def test_repairs_a_reader_would_ask_for():
    assert repair(pa.array(REPAIRED)).to_pylist() == [*REPAIRED.values()]
    column = pa.array(["first", "second\r\n", "third\0"])[1:]  # of which slices are read at their offset
    assert repair(column).to_pylist() == ["second\n", "third"]


@given(st.lists(TEXTS, min_size=1, max_size=8))
def test_what_is_repaired_stays_so_and_is_counted_as_python_counts_it(texts):
    repaired = repair(pa.array(texts, pa.string()))
    for text, counts in zip(repaired.to_pylist(), count_characters(repaired).T.tolist()):
        assert unicodedata.is_normalized("NFC", text) and not set(text) & set("\r\0\x7f\u00ad\u200b\u2028\u2581\ufeff")
        counted = [c for c in text if not c.isspace() and unicodedata.category(c)[0] != "M"]
        assert counts == [len(text), len(counted), sum(c.isalnum() for c in text)]
