"""Items of benchmarks found in documents and in packed rows, against looking for them word by word."""

import random
import unicodedata
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import regex
from hypothesis import given
from hypothesis import strategies as st
from planted_copies import lexicon, random_text, written

from affinage.config.data import DecontaminateSettings
from affinage.data import decontaminate as step
from affinage.data.decontaminate import BenchmarkItem, ItemIndex, contaminated, read_items, write_items
from affinage.data.special_tokens import BOS, EOS, PAD
from run_affinage import refused
from source_forms import rows_of, write_documents, write_files
from tiny_models import tokenizer
from token_rows import write_tokens

QUESTION = "Which of the five harbours on the northern coast was rebuilt after the storm of 1953, and by whom?"
FRENCH = "Lequel des cinq ports de la côte nord fut reconstruit après la tempête de 1953, et par qui ?"


def folded_words(text: str) -> list[str]:
    return regex.findall(r"[\p{L}\p{N}\p{M}]+", unicodedata.normalize("NFC", text).casefold())


@lru_cache(maxsize=1000)
def runs(text: str, length: int) -> set[tuple[str, ...]]:
    words = folded_words(text)
    return {tuple(words[k : k + length]) for k in range(len(words) - length + 1)}


def holders(texts: list[str], item: BenchmarkItem, ngram: int, least: int) -> list[set[int]]:
    """For every run of the item, or the whole of a shorter one, which texts have it."""
    found = []
    for one in item.texts:
        length = min(ngram, len(folded_words(one)))
        if length >= min(least, ngram):
            found += [{k for k, text in enumerate(texts) if run in runs(text, length)} for run in runs(one, length)]
    return found


WORDS = st.lists(st.sampled_from(["le", "Chat", "été", "ÉTÉ", "noir", "a", "=", "x2", "dort,", "ς", "Σ"]), max_size=12)


@given(st.lists(WORDS, min_size=1, max_size=4), st.lists(WORDS, min_size=1, max_size=4), st.integers(1, 5))
def test_the_scan_is_the_obvious_search(texts, items, ngram):
    texts = [" ".join(words) for words in texts]
    items = [BenchmarkItem("b", str(k), (" ".join(words),)) for k, words in enumerate(items)]
    for least in (1, 3):
        index = ItemIndex(items, ngram, min_words=least, boilerplate=10**6)
        hits = index.scan(pa.array(texts, pa.string()))
        found = {(t, items[i].id) for t, k in hits[:, :2].tolist() for i in index.of(k)}
        assert found == {(k, item.id) for item in items for some in holders(texts, item, ngram, least) for k in some}


def run(tmp_path, texts, items, **settings):
    write_documents(tmp_path / "in", [{"text": text, "url": f"http://x/{k}"} for k, text in enumerate(texts)])
    summary = step.decontaminate(tmp_path / "in", tmp_path / "out", DecontaminateSettings(**settings), items)
    return summary, rows_of(tmp_path / "out")


def filler(seed: int, count: int = 120) -> str:
    rng = random.Random(seed)
    return written(random_text(lexicon(3000, rng), count, rng))


def test_documents_with_an_item_are_removed_and_every_match_is_told(tmp_path):
    items = [BenchmarkItem("quiz", "7", (QUESTION,)), BenchmarkItem("qui", "8", (FRENCH, "Un autre texte"))]
    quoted = QUESTION.upper().replace(",", " –").replace(" ", "\n")
    both = f"{FRENCH} {filler(4)} {QUESTION}"
    texts = [filler(0), f"{filler(1)} {quoted} {filler(2)}", filler(3), both, QUESTION[:60]]
    summary, rows = run(tmp_path, texts, items)
    assert [row["id"] for row in rows] == ["d0", "d2", "d4"]
    assert summary["removed"] == {"in a benchmark": 2} and summary["documents_out"] == 3
    matches = pq.read_table(tmp_path / "out" / "matches.parquet").to_pylist()
    found = [(m["document"], m["benchmark"], m["item"]) for m in matches]
    assert found == [("d1", "quiz", "7"), ("d3", "quiz", "7"), ("d3", "qui", "8")]
    assert matches[0]["text"] == quoted[: len(quoted) - 1] and matches[0]["url"] == "http://x/1"
    assert matches[2]["text"] == FRENCH[:-2] and matches[2]["words"] == 18
    assert summary["matches"] == matches
    assert summary["benchmarks"]["quiz"] == {"items": 1, "too_short": 0, "found": 1, "documents": 2, "common": 0}
    assert summary["samples"]["in a benchmark"][0]["detail"].startswith("quiz 7: WHICH\nOF")


def test_what_many_items_or_many_documents_share_is_no_match(tmp_path):
    template = "Choose the one answer of those that follow which best completes the sentence that you have read: "
    items = [BenchmarkItem("b", str(k), (template + filler(k, 20),)) for k in range(12)]
    famous = "Four score and seven years ago our fathers brought forth on this continent a new nation"
    items.append(BenchmarkItem("b", "famous", (famous,)))
    texts = [f"{filler(100)} {template}", *(f"{filler(200 + k)} {famous}" for k in range(12)), filler(3, 20)]
    summary, rows = run(tmp_path, texts, items)
    assert [row["id"] for row in rows] == [f"d{k}" for k in range(13)]  # only the item's own words count
    assert summary["benchmarks"]["b"]["common"] == 1, "the famous one is named"


def test_items_from_files(tmp_path):
    lines = '{"id": "q1", "question": "Qui ?", "choices": {"text": ["a", "b"], "n": 3}}\n\n{"x": "y"}\n'
    bad = {"bad.jsonl": "{}\nno json\n", "deep.jsonl": "[" * 100_000 + "\n"}
    write_files(tmp_path, {"quiz.jsonl": lines, "quiz.txt": "one\n\ntwo\n"} | bad)
    expected = [BenchmarkItem("quiz.jsonl", *item) for item in (("q1", ("q1", "Qui ?", "a", "b")), ("2", ("y",)))]
    assert list(read_items(str(tmp_path / "quiz.jsonl"))) == expected
    assert [item.texts for item in read_items(str(tmp_path / "quiz.txt"))] == [("one",), ("two",)]
    for name in (*bad, "none.txt", "x.csv"):
        refused(list, read_items(str(tmp_path / name)), match=name)


def test_items_in_trained_text_are_those_that_looking_word_by_word_finds():
    words = "the capital of France is Paris and its river the Seine runs through nineteen bridges to the sea".split()
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(words, 30)) for _ in range(40)]
    told = [(" ".join(draw.choice(words, 9)), "too short") for _ in range(20)]
    told += [(text.upper().replace(" ", ", ", 3)[5:60],) for text in texts[:6]]
    items = [BenchmarkItem("quiz", str(n), one) for n, one in enumerate([*told, ("a run of words in many texts",)])]
    texts += ["Here is A Run of words: in many texts."] * 3  # more than `boilerplate`: it tells nothing
    index = ItemIndex(items, 6, min_words=4, boilerplate=2)
    found = step.contamination(index, [pa.array(texts[:7]), pa.array(texts[7:20]), pa.array(texts[20:])])
    numbers = {item.id: [len(having) for having in holders(texts, item, 6, 4)] for item in items}
    assert found.found == {("quiz", id) for id, many in numbers.items() if {1, 2} & set(many)} and len(found.found) >= 6
    assert found.common == {("quiz", id) for id, many in numbers.items() if max(many) > 2} - found.found
    assert ("quiz", "26") in found.common and (found.texts, found.benchmarks) == (43, {"quiz"})


def test_texts_of_rows_are_those_of_their_conversations(tmp_path: Path):
    texts = ["The capital of France is Paris.", "é", "Its river is the Seine."]
    tokens = np.full((2, 64), PAD, np.uint16)
    for row, members in zip(tokens, (texts[:2], texts[2:]), strict=True):
        ids = [token for text in members for token in (BOS, *tokenizer().encode(text), EOS)]
        row[: len(ids)] = ids
    write_tokens(tmp_path / "train" / "chats", tokens)
    assert [text for some in step.texts_of_rows(tmp_path / "train", tokenizer()) for text in some.to_pylist()] == texts


HARBOUR = "The committee decided on Thursday that the old harbour would be rebuilt before the winter storms."

WRITTEN = [
    "> The committee decided on Thursday that\n> the old harbour would be rebuilt\n> before the winter storms.",
    "The committee decided | on Thursday | that the old harbour | would be rebuilt before the winter storms.",
    "The committee <b>decided</b> on Thursday<br>that the <a href='x'>old</a>&nbsp;harbour&quot; would be rebuilt "
    "before the winter storms.",
    "The committee + decided = on $ Thursday that the old harbour would be rebuilt before the winter storms.",
]


def test_signs_and_tags_between_words_hide_nothing(tmp_path):
    texts = [*(f"Before. {text} After." for text in WRITTEN), "a < b and c > d " * 20]
    items = [BenchmarkItem("quiz", "0", (HARBOUR,))]
    summary, rows = run(tmp_path, texts, items)
    assert summary["removed"] == {"in a benchmark": 4} and [row["id"] for row in rows] == ["d4"]
    searched = write_items(tmp_path / "items.json", items, DecontaminateSettings())
    assert contaminated([*texts, f"Tell me. {HARBOUR} \ud800", ""], searched) == {0, 1, 2, 3, 5}


def test_items_are_found_as_they_are_published(tmp_path):
    blank = "The ship could not enter the harbour because the _ was too shallow in that season."
    prompt = "Question: Who built the bridge?\nAnswer: A clever engineer from the north"
    items = [
        BenchmarkItem("wino", "0", (blank, "ship", "harbour")),
        BenchmarkItem("arc", "0", ("Who built the bridge?", "A clever engineer from the north", prompt)),
        BenchmarkItem("arc", "1", ("Why?", "Because.", "Question: Why?\nAnswer: Because. So it is then, is it not?")),
        BenchmarkItem("tiny", "0", ("One two three?", "No.", "Question: One two three?\nAnswer: No. Now answer:")),
        BenchmarkItem("nine", "0", ("Nine words that are an item of a benchmark.",)),  # looked for whole
        BenchmarkItem("read", "0", (f"Who were they? {HARBOUR}", "the old harbour")),  # a passage has its answer
    ]
    texts = [blank.replace("_", "harbour"), "Who built the bridge? A clever engineer from the north.", "nothing of it"]
    texts += ["Nine words, that are an item of a benchmark, and more", "Nine words that are an item of Paris"]
    summary, rows = run(tmp_path, texts, items)
    assert [row["id"] for row in rows] == ["d2", "d4"]
    assert summary["benchmarks"]["read"]["too_short"] == 0
    assert summary["benchmarks"]["tiny"]["too_short"] == 1 and summary["benchmarks"]["arc"]["found"] == 1
