"""Duplicates: found as planted, nothing else removed, whatever the order, the parts and the workers."""

import random
import re
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_copies import jaccard_of, lexicon, near_copy, random_text, shingles_of, written

from affinage.cluster.executor import Executor
from affinage.config.data import DedupSettings
from affinage.data.dedup import dedup, jaccard, shingle_sets, sign
from affinage.data.places import released_folder
from run_affinage import refused
from source_forms import rows_of, write_documents

SETTINGS = DedupSettings()


def run(rows: list[dict], files: int = 1, **options) -> tuple[dict, list[str], list[dict]]:
    """The summary, the ids that stay, and the table of the removed."""
    with tempfile.TemporaryDirectory() as folder:
        write_documents(Path(folder) / "in", rows, files)
        summary = dedup(Path(folder) / "in", Path(folder) / "out", SETTINGS, **options)
        kept = [row["id"] for row in rows_of(Path(folder) / "out")]
        assert not (Path(folder) / "out" / "scratch").exists()
        return summary, kept, pq.read_table(Path(folder) / "out" / "removed.parquet").to_pylist()


def find(texts: list[str], ids: list[str] | None = None, files: int = 1, **options) -> tuple[dict, dict[str, str]]:
    """The summary, and of every id the one that stays in its place."""
    ids = ids or [f"{i:06d}" for i in range(len(texts))]
    rows = [{"id": id, "text": text} for id, text in zip(ids, texts, strict=True)]
    summary, kept, removed = run(rows, files, **options)
    of = {id: id for id in kept} | {row["id"]: row["duplicate_of"] for row in removed}
    assert len(of) == len(texts) and all(of[keeper] == keeper for keeper in of.values())
    return summary, of


PIECES = ["le", "Le", "été", "ÉTÉ", "x", "the", "fin.", "l'eau", "漢字", "a+b", "3,5", "🙂", "$", "e\u0301", "\n", "–"]
SENTENCES = st.lists(st.sampled_from(PIECES), max_size=30).map(" ".join)


@given(SENTENCES, SENTENCES, st.integers(1, 6))
def test_shingle_sets_are_those_of_the_obvious_splitting(a, b, ngram):
    hashes, (sizes, *_) = shingle_sets(pa.array([a, b], pa.string()), ngram)
    one, other = np.split(hashes, sizes[:1])
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


def rank(text: str, id: str) -> tuple:
    """The smaller of two copies stays."""
    return len(re.findall(r"</?[a-zA-Z][^<>]*>|&#?\w{2,8};", text)), -len(shingles_of(text, 5)), len(text.encode()), id


def test_recall_and_precision_over_planted_pairs(planted):
    texts, pairs = planted
    summary, kept, removed = run([{"text": text} for text in texts])
    assert summary["documents_in"] == 600 and summary["documents_out"] == len(kept) == 600 - len(removed)
    assert sum(summary["removed"].values()) == len(removed)
    assert "Jaccard 0." in summary["samples"]["near duplicate"][0]["detail"]
    near = [(a, b) for a, b in pairs if jaccard_of(texts[a], texts[b]) >= 0.8]
    assert len(near) > 100
    assert np.mean([len({f"d{a}", f"d{b}"} & set(kept)) == 1 for a, b in near]) >= 0.99
    for row in removed:
        one, other = (texts[int(row[name][1:])] for name in ("id", "duplicate_of"))
        assert row["jaccard"] == pytest.approx(jaccard_of(one, other)) and row["jaccard"] >= 0.8
        assert row["duplicate_of"] in kept and rank(other, row["duplicate_of"]) < rank(one, row["id"])


def test_padding_and_markup_do_not_win_over_clean_text():
    clean = " ".join(f"word{i}" for i in range(60)) + " fin déjà."
    dirty = [clean + "\u3000" * 300, f"<p>{clean}</p>", clean.upper() + " "]
    dirty.append(clean.replace("déjà", "d&eacute;j&agrave;"))
    for position in range(5):
        assert set(find([*dirty[:position], clean, *dirty[position:]])[1].values()) == {f"{position:06d}"}


def test_copies_of_what_was_released_before_are_removed(tmp_path, planted):
    texts = planted[0][:60]
    write_documents(tmp_path / "released", [{"id": f"old{k}", "text": text} for k, text in enumerate(texts[:40:2])])
    another = pa.array([f"{texts[50][:2]}\xad{texts[50][2:]}"]).dictionary_encode()  # unlike a filtered text
    pq.write_table(pa.table({"text": another}), tmp_path / "released" / "others.parquet")
    refused(released_folder, str(Path(__file__).parent), tmp_path, match="no run or folder with documents")
    summary, kept, removed = run([{"text": text} for text in texts], files=2, against=tmp_path / "released")
    assert not {f"d{k}" for k in [*range(0, 40, 2), 50]} & set(kept) and summary["documents_in"] == 60
    assert {row["duplicate_of"] for row in removed if row["id"] in ("d0", "d2")} == {"old0", "old1"}


def kept_by_the_rule(texts: list[str], ids: list[str]) -> set[str]:
    """From the best text to the worst, every one is compared with every kept one that it shares a band with."""
    keys = sign(pa.array(texts, pa.string()), 5, SETTINGS.num_buckets, SETTINGS.hashes_per_bucket)
    kept: list[int] = []
    for i in sorted(range(len(texts)), key=lambda i: rank(texts[i], ids[i])):
        rivals = [k for k in kept if (keys[:, i] == keys[:, k]).any()]
        if not any(jaccard_of(texts[i], texts[k]) >= SETTINGS.threshold for k in rivals):
            kept.append(i)
    return {ids[k] for k in kept}


COPIES = st.tuples(st.integers(0, 3), st.integers(0, 30), st.sampled_from(["", " ", "!", "x"]))


@settings(max_examples=20)
@given(st.lists(COPIES, min_size=1, max_size=30), st.integers(1, 4), st.randoms(use_true_random=False))
def test_what_stays_is_what_the_rule_says(corpus, files, rng):
    # Few originals, each often: chains of alike texts, exact copies, and copies that differ in case or an ending.
    stories = [[f"w{story}x{position}" for position in range(60)] for story in range(4)]
    texts = []
    for story, cut, ending in corpus:
        text = " ".join(stories[story][cut // 2 :]) + ending
        texts.append(text.upper() if ending == "x" else text)
    ids = [f"{i:03d}" for i in range(len(texts))]
    rng.shuffle(ids)
    _, of = find(texts, ids, files=files, executor=Executor(rng.randint(1, 3)))
    assert set(of.values()) == kept_by_the_rule(texts, ids)


def test_exact_copies_differ_in_case_and_white_space_only():
    texts = ["Some words, here", "some words,\n here", "some words here!", "other words there"]
    _, _, removed = run([{"text": text} for text in texts])
    found = [(row["id"], row["duplicate_of"], row["exact"], row["jaccard"]) for row in removed]
    assert found == [("d1", "d0", True, 1.0), ("d2", "d0", False, 1.0)]
    wordless = ["two words", "Two words!", "two", "...", "!!!", "", " ", "🙂🙂", "🙂"]
    assert [int(k) for k in find(wordless)[1].values()] and len(set(find(wordless)[1].values())) == 7


def test_neither_order_nor_files_change_the_table_of_the_removed(planted):
    rows = [{"id": f"d{k}", "text": text} for k, text in enumerate(planted[0][:200] + planted[0][:20])]
    (summary, kept, removed), again = run(rows), run(random.Random(1).sample(rows, 220), files=4)
    assert summary["removed"]["exact duplicate"] >= 20 and summary["removed"] == again[0]["removed"]
    assert set(kept) == set(again[1]) and removed == again[2]
    assert run([])[1:] == ([], [])
