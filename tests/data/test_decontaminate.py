"""Decontamination against the slow, obvious search, and what happens to what it finds."""

import random
import unicodedata

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted_copies import lexicon, random_text, written

from affinage.data.benchmark_items import BenchmarkItem, read_items
from affinage.data.decontaminate import decontaminate
from affinage.data.documents import DocumentWriter
from affinage.data.overlap import Scanner, index_items
from affinage.errors import UserError
from affinage.recipe.cleaning import DecontaminateSettings
from source_forms import rows_of

QUESTION = "Which of the five harbours on the northern coast was rebuilt after the storm of 1953, and by whom?"
FRENCH = "Lequel des cinq ports de la côte nord fut reconstruit après la tempête de 1953, et par qui ?"


def folded_words(text: str) -> list[str]:
    words, word = [], ""
    for character in unicodedata.normalize("NFC", text).casefold():
        if character.isalnum() or unicodedata.category(character)[0] == "M":
            word += character
            continue
        words.append(word)
        word = ""
        if unicodedata.category(character) in ("Sm", "Sc"):
            words.append(character)
    return [word for word in [*words, word] if word]


def runs(text: str, length: int) -> set[tuple[str, ...]]:
    words = folded_words(text)
    return {tuple(words[k : k + length]) for k in range(len(words) - length + 1)}


def expected(texts: list[str], items: list[BenchmarkItem], ngram: int, least: int) -> set[tuple[int, str]]:
    """(text, item) for which a run of the item is in the text."""
    found = set()
    for item in items:
        for one in item.texts:
            length = min(ngram, len(folded_words(one)))
            if length >= min(least, ngram):
                found |= {(k, item.id) for k, text in enumerate(texts) if runs(text, length) & runs(one, length)}
    return found


def scanned(texts, items, ngram, least):
    index = index_items(items, ngram=ngram, min_words=least, boilerplate=10**6)
    hits = Scanner(index).scan(pa.array(texts, pa.string()))
    return {(int(t), items[i].id) for t, k in zip(hits.text, hits.key) for i in index.of(k)}, hits


WORDS = st.lists(st.sampled_from(["le", "Chat", "été", "ÉTÉ", "noir", "a", "=", "x2", "dort,", "ς", "Σ"]), max_size=12)


@given(st.lists(WORDS, min_size=1, max_size=4), st.lists(WORDS, min_size=1, max_size=4), st.integers(1, 5))
def test_the_scan_is_the_obvious_search(texts, items, ngram):
    texts = [" ".join(words) for words in texts]
    items = [BenchmarkItem("b", str(k), (" ".join(words),)) for k, words in enumerate(items)]
    for least in (1, 3):
        assert scanned(texts, items, ngram, least)[0] == expected(texts, items, ngram, least)


def test_the_scan_is_the_obvious_search_on_many_items():
    rng = random.Random(5)
    words = lexicon(400, rng)
    items = [BenchmarkItem("b", str(k), (written(random_text(words, rng.randint(3, 40), rng)),)) for k in range(200)]
    texts = []
    for _ in range(100):
        text = random_text(words, rng.randint(5, 300), rng)
        of = rng.choice(items).texts[0].split()
        start = rng.randrange(len(of))
        text[rng.randrange(len(text))] = " ".join(of[start : start + rng.randint(5, 20)]).upper()
        texts.append(written(text))
    found, hits = scanned(texts, items, 8, 5)
    assert found == expected(texts, items, 8, 5) and len(found) > 30
    for text, start, stop, key in zip(hits.text, hits.start, hits.stop, hits.key):
        cut = texts[text].encode()[start:stop].decode()
        assert any(runs(cut, n) & runs(item.texts[0], n) for item in items for n in range(5, 9)), key


def run(tmp_path, texts, items, **settings):
    with DocumentWriter(tmp_path / "in") as writer:
        for k, text in enumerate(texts):
            writer.add(id=f"d{k}", source="s", language="en", url=f"http://x/{k}", text=text)
    summary = decontaminate(tmp_path / "in", tmp_path / "out", DecontaminateSettings(**settings), items)
    return summary, rows_of(tmp_path / "out")


def filler(seed: int, count: int = 120) -> str:
    rng = random.Random(seed)
    return written(random_text(lexicon(3000, rng), count, rng))


def test_documents_with_an_item_are_removed_and_every_match_is_told(tmp_path):
    items = [BenchmarkItem("quiz", "7", (QUESTION,)), BenchmarkItem("qui", "8", (FRENCH, "Un autre texte"))]
    quoted = QUESTION.upper().replace(",", " –").replace(" ", "\n")
    both = f"{FRENCH} {filler(4)} {QUESTION}"
    summary, rows = run(
        tmp_path, [filler(0), f"{filler(1)} {quoted} {filler(2)}", filler(3), both, QUESTION[:60]], items
    )
    assert [row["id"] for row in rows] == ["d0", "d2", "d4"]
    assert summary["removed"] == {"in a benchmark": 2} and summary["documents_out"] == 3
    matches = pq.read_table(tmp_path / "out" / "matches" / "matches.parquet").to_pylist()
    found = [(m["document"], m["benchmark"], m["item"]) for m in matches]
    assert found == [("d1", "quiz", "7"), ("d3", "quiz", "7"), ("d3", "qui", "8")]
    assert matches[0]["text"] == quoted[: len(quoted) - 1] and matches[0]["url"] == "http://x/1"
    assert matches[2]["text"] == FRENCH[:-2] and matches[2]["words"] == 18
    assert summary["matches"] == matches
    assert summary["benchmarks"]["quiz"] == {"items": 1, "too_short": 0, "found": 1, "documents": 2}
    assert summary["samples"]["in a benchmark"][0]["detail"].startswith("quiz 7: WHICH\nOF")


def test_short_items_are_looked_for_whole_but_not_the_shortest(tmp_path):
    nine = ("Nine words that are an item of a benchmark.",)
    items = [BenchmarkItem("b", "1", nine), BenchmarkItem("b", "2", ("Paris",))]
    texts = ["Nine words, that are an item of a benchmark, and more", "Nine words that are an item of Paris"]
    summary, rows = run(tmp_path, texts, items)
    assert [row["id"] for row in rows] == ["d1"]
    assert summary["benchmarks"]["b"] == {"items": 2, "too_short": 1, "found": 1, "documents": 1}


def test_what_many_items_or_many_documents_share_is_no_match(tmp_path):
    template = "Choose the one answer of those that follow which best completes the sentence that you have read: "
    items = [BenchmarkItem("b", str(k), (template + filler(k, 20),)) for k in range(12)]
    famous = "Four score and seven years ago our fathers brought forth on this continent a new nation"
    items.append(BenchmarkItem("b", "famous", (famous,)))
    texts = [f"{filler(100)} {template}", *(f"{filler(200 + k)} {famous}" for k in range(12)), filler(3, 20)]
    summary, rows = run(tmp_path, texts, items)
    assert [row["id"] for row in rows] == [f"d{k}" for k in range(13)]  # only the item's own words count
    assert summary["boilerplate"]["in_items"] > 0 and summary["boilerplate"]["in_documents"] > 0
    assert run(tmp_path / "all", texts, items, boilerplate=100)[1] == []


def test_matches_can_be_cut_out(tmp_path):
    items = [BenchmarkItem("b", "1", (QUESTION,))]
    head, tail = filler(1, 200), filler(2, 200)
    often = " ".join([filler(k, 120) + QUESTION for k in range(12)])
    texts = [f"{head} {QUESTION} {tail}", f"short {QUESTION} short", often]
    summary, rows = run(tmp_path, texts, items, action="cut")
    assert [row["id"] for row in rows] == ["d0"] and summary["cut"] == 1
    before, after = rows[0]["text"].split("\n\n")
    assert head.startswith(before) and tail.endswith(after)
    assert len(head) - len(before) in (199, 200) and 198 <= len(tail) - len(after) <= 201
    assert summary["removed"] == {"in a benchmark": 2}


def test_items_from_files(tmp_path):
    lines = '{"id": "q1", "question": "Qui ?", "choices": {"text": ["a", "b"], "n": 3}}\n\n{"x": "y"}\n'
    (tmp_path / "quiz.jsonl").write_text(lines)
    (tmp_path / "quiz.txt").write_text("one\n\ntwo\n")
    assert list(read_items(str(tmp_path / "quiz.jsonl"))) == [
        BenchmarkItem("quiz.jsonl", "q1", ("q1", "Qui ?", "a", "b")),
        BenchmarkItem("quiz.jsonl", "2", ("y",)),
    ]
    assert [item.texts for item in read_items(str(tmp_path / "quiz.txt"))] == [("one",), ("two",)]
    (tmp_path / "bad.jsonl").write_text("{}\nno json\n")
    for name in ("bad.jsonl", "none.txt", "x.csv"):
        with pytest.raises(UserError, match=name):
            list(read_items(str(tmp_path / name)))


def test_nothing_to_look_for_changes_nothing(tmp_path):
    for items in ([], [BenchmarkItem("b", "1", ("too short",)), BenchmarkItem("b", "2", ())]):
        summary, rows = run(tmp_path / str(len(items)), [filler(0), QUESTION], items)
        assert len(rows) == 2 and summary["removed"] == {} and summary["matches"] == []
