"""Duplicates: found as planted, nothing else removed, whatever the order, the parts and the workers."""

import random
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_copies import jaccard_of, lexicon, near_copy, random_text, shingles_of, written

from affinage.config.data import DedupSettings
from affinage.data.deduplicate import deduplicate
from affinage.data.duplicates import Duplicates, find_duplicates
from affinage.data.executor import Executor
from affinage.data.minhash import jaccard, sign, write_shingle_sets
from source_forms import rows_of, write_documents

SETTINGS = DedupSettings()


class InMemory:
    """Texts with their names, some 100 read at a time."""

    def __init__(self, texts: list[str], ids: list[str]) -> None:
        self.texts, self.ids, self.rows = texts, ids, len(texts)

    def read(self, columns):
        for start in range(0, self.rows, 100):
            here = slice(start, start + 100)
            every = {"id": self.ids[here], "source": ["s"] * len(self.ids[here]), "text": self.texts[here]}
            yield pa.record_batch({name: pa.array(every[name], pa.string()) for name in columns})


def find(texts: list[str], ids: list[str] | None = None, part: int = 10_000, **options) -> Duplicates:
    ids = ids or [f"{i:06d}" for i in range(len(texts))]
    shards = [InMemory(texts[i : i + part], ids[i : i + part]) for i in range(0, len(texts), part)]
    with tempfile.TemporaryDirectory() as scratch:
        return find_duplicates(shards, SETTINGS, Path(scratch), **options)


def sets(texts: list[str], ngram: int = 5) -> list[np.ndarray]:
    column = pa.array(texts, pa.string())
    room = sign(column, ngram=ngram, bands=1, rows=1).shingles
    starts = np.concatenate([[0], np.cumsum(room)])[:-1]
    out, sizes = np.zeros(int(room.sum()), np.uint64), np.zeros(len(texts), np.int64)
    rows = np.arange(len(texts))
    write_shingle_sets(column, rows, ngram=ngram, out=out, starts=starts, sizes=sizes)
    return [out[start : start + size] for start, size in zip(starts, sizes)]


PIECES = ["le", "Le", "été", "ÉTÉ", "x", "the", "fin.", "l'eau", "漢字", "a+b", "3,5", "🙂", "$", "e\u0301", "\n", "–"]
SENTENCES = st.lists(st.sampled_from(PIECES), max_size=30).map(" ".join)


@given(SENTENCES, SENTENCES, st.integers(1, 6))
def test_shingle_sets_are_those_of_the_obvious_splitting(a, b, ngram):
    one, other = sets([a, b], ngram)
    empty = (not shingles_of(a, ngram) - {()}) + (not shingles_of(b, ngram) - {()})
    if not empty:
        assert (one.size, other.size) == (len(shingles_of(a, ngram)), len(shingles_of(b, ngram)))
        assert jaccard(one, other, 0.0) == pytest.approx(jaccard_of(a, b, ngram))


@pytest.fixture(scope="module")
def planted() -> tuple[list[str], list[tuple[int, int]]]:
    rng = random.Random(5)
    words = lexicon(5_000, rng)
    texts, pairs = [], []
    for _ in range(300):
        original = random_text(words, rng.randint(60, 260), rng)
        pairs.append((len(texts), len(texts) + 1))
        texts += [written(original), written(near_copy(original, rng.uniform(0.6, 1.0), words, rng))]
    return texts, pairs


def test_recall_and_precision_over_planted_pairs(planted):
    texts, pairs = planted
    found = find(texts)
    near = [(a, b) for a, b in pairs if jaccard_of(texts[a], texts[b]) >= 0.8]
    assert len(near) > 100
    assert np.mean([found.kept[a] == found.kept[b] for a, b in near]) >= 0.99
    removed = np.flatnonzero(found.kept != np.arange(len(texts)))
    for i in removed:
        assert found.similarity[i] == pytest.approx(jaccard_of(texts[i], texts[found.kept[i]]))
        assert found.similarity[i] >= 0.8
        kept = found.kept[i]  # the longer copy stays, then the smaller id
        assert found.kept[kept] == kept
        assert (-len(texts[kept].encode()), kept) < (-len(texts[i].encode()), i)


def kept_by_the_rule(texts: list[str], ids: list[str]) -> set[str]:
    """From the best text to the worst, every one is compared with every kept one that it shares a band with."""
    keys = sign(pa.array(texts, pa.string()), ngram=5, bands=SETTINGS.num_buckets, rows=SETTINGS.hashes_per_bucket).keys
    kept: list[int] = []
    contents: set[str] = set()
    for i in sorted(range(len(texts)), key=lambda i: (-len(texts[i].encode()), ids[i])):
        content = " ".join(texts[i].lower().split())
        if content in contents:
            continue
        contents.add(content)
        rivals = [k for k in kept if (keys[:, i] == keys[:, k]).any()]
        if not any(jaccard_of(texts[i], texts[k]) >= SETTINGS.threshold for k in rivals):
            kept.append(i)
    return {ids[k] for k in kept}


CORPORA = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 30), st.sampled_from(["", " ", "!", "x"])), min_size=1, max_size=30
)


@settings(max_examples=20)
@given(CORPORA, st.integers(1, 9), st.sampled_from([1_000, 30_000, 10**8]), st.randoms(use_true_random=False))
def test_what_stays_is_what_the_rule_says(corpus, part, memory, rng):
    # Few originals, each often: chains of alike texts, exact copies, and copies that differ in case or an ending.
    stories = [[f"w{story}x{position}" for position in range(60)] for story in range(4)]
    texts = []
    for story, cut, ending in corpus:
        text = " ".join(stories[story][cut // 2 :]) + ending
        texts.append(text.upper() if ending == "x" else text)
    ids = [f"{i:03d}" for i in range(len(texts))]
    rng.shuffle(ids)
    found = find(texts, ids, part=part, memory=memory, executor=Executor(rng.randint(1, 3)))
    assert {ids[k] for k in found.kept} == kept_by_the_rule(texts, ids)


def test_exact_copies_differ_in_case_and_white_space_only():
    found = find(["Some words,  here", "some words,\nhere", "some words here!", "other words there"])
    assert found.kept.tolist() == [0, 0, 0, 3] and found.exact.tolist() == [False, True, False, False]
    assert found.similarity.tolist() == [1, 1, 1, 1]
    wordless = ["two words", "Two words!", "two", "...", "!!!", "", " ", "🙂🙂", "🙂"]
    assert find(wordless).kept.tolist() == [1, 1, 2, 3, 4, 6, 6, 7, 8]


def test_many_copies_of_one_page_are_not_quadratic():
    rng = random.Random(4)
    words = lexicon(3_000, rng)
    template = random_text(words, 100, rng)
    same = [written(template)] * 2_000
    alike = [written([*template, words[i]]) for i in range(2_000)]
    frame = [written(template + random_text(words, 45, rng)) for _ in range(600)]  # J of about 0.5 to each other
    found = find(same + alike + frame)
    assert len(set(found.kept[:4_000].tolist())) == 1
    assert found.compared < 300_000, "of 10 million pairs"


def clusters_of(folder):
    return pq.read_table(folder / "clusters" / "clusters.parquet").to_pylist()


def test_the_stage_keeps_counts_and_shows_the_clusters_whatever_the_order(tmp_path, planted):
    texts = planted[0][:200] + planted[0][:20]
    rows = [{"text": text} for text in texts]
    write_documents(tmp_path / "in", rows)
    summary = deduplicate(tmp_path / "in", tmp_path / "out", SETTINGS)
    kept = {row["id"] for row in rows_of(tmp_path / "out")}
    assert summary["documents_in"] == 220 and summary["documents_out"] == len(kept)
    assert summary["removed"]["exact duplicate"] >= 20 and summary["removed"]["near duplicate"] > 20
    removed = sum(summary["removed"].values())
    assert len(kept) + removed == 220 and "Jaccard 0." in summary["samples"]["near duplicate"][0]["detail"]
    clusters = clusters_of(tmp_path / "out")
    assert sum(row["kept"] for row in clusters) == summary["clusters"]["count"] == len(clusters) - removed
    assert all(row["kept"] == (row["id"] in kept) == (row["id"] == row["cluster"]) for row in clusters)
    assert summary["clusters"]["largest"][0]["documents"] >= 3
    named = [row | {"id": f"d{k}"} for k, row in enumerate(rows)]
    write_documents(tmp_path / "shuffled", random.Random(1).sample(named, 220), files=4)
    again = deduplicate(tmp_path / "shuffled", tmp_path / "again", SETTINGS, memory=20_000)
    assert {row["id"] for row in rows_of(tmp_path / "again")} == kept and clusters_of(tmp_path / "again") == clusters
    assert all(again[key] == summary[key] for key in ("removed", "clusters"))
    write_documents(tmp_path / "empty", [])
    assert deduplicate(tmp_path / "empty", tmp_path / "none", SETTINGS)["clusters"] == {"count": 0, "largest": []}
    assert rows_of(tmp_path / "none") == []
