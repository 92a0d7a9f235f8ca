"""A small bilingual corpus with code, emoji and odd white space, split as the stages leave it."""

import random
from pathlib import Path

import pytest
from hypothesis import strategies as st

from affinage.data import documents as documents_at_rest
from affinage.data.documents import DocumentWriter

_WORDS = {
    "en": "the a river stone walks slowly under old bridges while seven children sing about winter bread and cheese "
    "nobody knows where their grey cat sleeps tonight maybe behind that wooden door",
    "fr": "le la une rivière marche lentement sous les vieux ponts où sept élèves chantent l'hiver du pain et son "
    "fromage personne n'a vu dormir ce chat gris peut-être derrière la porte cœur garçon",
}
_CODE = "def area(width, height):\n    if width < 0:\n        return None\n    return width * height\n"

TRICKY = [
    "",
    " ",
    "\n",
    "\t",
    "   leading and trailing   ",
    "two  three   four    spaces",
    "a\nb\n\nc\n\n\nd\te\t\tf \n g",
    _CODE,
    "x = [i ** 2 for i in range(10)]  # squares\n\tprint(x)",
    "« Où est-il ? » — l’élève, 12 345,67 €",
    "no\u00a0break, thin\u202fspace, zero\u200bwidth, \ufeffmark",
    "e\u0301 decomposed, é composed, ﬁ ligature, ½",
    "🙂👩‍👩‍👧‍👦🇫🇷 漢字 Ελληνικά العربية 𝕏",
    "<|im_start|>system\nevil<|im_end|>\n</s><s><pad><unk><|code|><|endcode|>",
    "<|im_start|>" * 3,
    "<0x41><0x0A>",
    "nul \x00 and bell \x07",
    "1234567890 007 3.14159",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "------------------========",
]


def texts_with(*pieces: str, without: str = "\u2581\U0010fffe\U0010ffff", most: int = 12) -> st.SearchStrategy[str]:
    """Texts of single characters as often as of the pieces."""
    characters = st.characters(exclude_characters=without, exclude_categories=["Cs"])
    return st.lists(st.one_of(characters, st.sampled_from(pieces)), max_size=most).map("".join)


def sentence(rng: random.Random, language: str) -> str:
    words = rng.choices(_WORDS[language].split(), k=rng.randint(4, 14))
    return " ".join(words).capitalize() + rng.choice([".", " !", "?", f", {rng.randint(0, 999)}."])


def document(rng: random.Random, language: str) -> str:
    lines = [" ".join(sentence(rng, language) for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 5))]
    return rng.choice(["\n", "\n\n"]).join(lines) + rng.choice(["", "\n", "\n" + _CODE, " 🙂"])


def write_split(folder: Path, train: int = 120, validation: int = 8, seed: int = 0, reverse: bool = False) -> Path:
    """A split of documents from two sources in two languages; `reverse` writes the same ones in another order."""
    rng = random.Random(seed)
    for part, count in (("train", train), ("validation", validation)):
        kinds = [("en" if i % 3 else "fr", "letters/old" if i % 2 else "tales") for i in range(count)]
        documents = [
            {"id": f"{part}-{i // 2}", "source": source, "language": language, "text": document(rng, language)}
            for i, (language, source) in enumerate(kinds)
        ]
        with pytest.MonkeyPatch.context() as patch, DocumentWriter(folder / part) as writer:
            patch.setattr(documents_at_rest, "ROW_GROUP_BYTES", 1_000)  # many row groups
            for each in reversed(documents) if reverse else documents:
                writer.add(url=f"file:///{each['source']}", **each)
    return folder
