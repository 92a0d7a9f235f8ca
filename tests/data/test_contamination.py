"""Items found in the text of rows and documents, against looking for them word by word."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from affinage.data.benchmark_items import BenchmarkItem
from affinage.data.contamination import contamination, look_through, runs_of, texts_of_documents, texts_of_rows
from affinage.data.documents import DocumentWriter
from affinage.data.special_tokens import BOS, EOS, PAD
from affinage.recipe.cleaning import DecontaminateSettings
from tiny_models import tokenizer

WORDS = "the capital of France is Paris and its river the Seine runs through nineteen bridges to the sea".split()
SETTINGS = DecontaminateSettings(ngram=6, min_words=4, boilerplate=2)


def item(number: int, *texts: str) -> BenchmarkItem:
    return BenchmarkItem("quiz", str(number), texts)


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def slow(items: list[BenchmarkItem], texts: list[str], many: range = range(1, 3)) -> set[tuple[str, str]]:
    """Every run of six words of an item, or a shorter item whole, looked for in every text: those that so many have."""
    found = set()
    for one in items:
        for text in map(words, one.texts):
            size = min(6, len(text))
            runs = [text[k : k + size] for k in range(len(text) - size + 1)] if size >= 4 else []
            for run in runs:
                holders = [t for t in map(words, texts) if any(t[k : k + size] == run for k in range(len(t)))]
                if len(holders) in many:
                    found.add((one.benchmark, one.id))
    return found


def test_it_finds_what_looking_word_by_word_finds():
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(WORDS, 30)) for _ in range(40)]
    items = [item(n, " ".join(draw.choice(WORDS, 9)), "too short") for n in range(20)]
    items += [item(20 + n, text.upper().replace(" ", ", ", 3)[5:60]) for n, text in enumerate(texts[:6])]
    items += [item(30, "a run of words that is in many texts")]
    texts += ["Here is A Run of words: that is in many texts."] * 3  # more than `boilerplate`: it tells nothing
    runs = runs_of(items, SETTINGS)
    parts = [[pa.array(texts[:7])], [pa.array(texts[7:20]), pa.array(texts[20:])]]
    found = contamination(runs, [look_through(part, runs) for part in parts], SETTINGS)
    assert found.found == slow(items, texts) and len(found.found) >= 6
    assert ("quiz", "30") not in found.found and ("quiz", "30") in found.common
    assert found.common == slow(items, texts, range(3, 44)) - found.found and found.boilerplate == 2
    assert found.texts == 43 and found.benchmarks == {"quiz"} and found.too_short == {}
    assert found.items == {"quiz": 27}


def test_documents_give_their_texts(tmp_path: Path):
    texts = ["One document.", "Un autre, d'été."]
    with DocumentWriter(tmp_path, "part") as writer:
        for text in texts:
            writer.add(id="", source="", text=text)
    assert [text for some in texts_of_documents(tmp_path) for text in some.to_pylist()] == texts


@pytest.mark.parametrize("context", [8, 64])
def test_a_text_that_goes_on_in_the_next_row_is_one(tmp_path: Path, context: int):
    texts = ["The capital of France is Paris.", "é", "Twelve plus seven makes nineteen; douze plus sept."]
    stream = [token for text in texts for token in (BOS, *tokenizer().encode(text), EOS)]
    rows = -(-len(stream) // context)
    tokens = np.full(rows * context, PAD, np.uint16)
    tokens[: len(stream)] = stream
    folder = tmp_path / "train" / "books.en"
    folder.mkdir(parents=True)
    np.save(folder / "rows-00000-of-00001.npy", tokens.reshape(rows, context))
    facts = {"rows": rows, "context": context, "files": {"rows-00000-of-00001.npy": {}}}
    (folder / "rows.json").write_text(json.dumps(facts))
    said = [text for some in texts_of_rows(tmp_path / "train", tokenizer()) for text in some.to_pylist()]
    assert said == texts
