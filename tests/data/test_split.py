"""The validation split: the right share of every group, the same for any order, and never a document in both."""

import random
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted_copies import lexicon, near_copy, random_text, shingles_of, written

from affinage.data.clean import clean
from affinage.data.deduplicate import deduplicate
from affinage.data.documents import DocumentWriter, read_documents
from affinage.data.engine import LocalEngine
from affinage.data.split import cut_tail, split
from affinage.errors import UserError
from affinage.recipe.cleaning import CleanSettings
from affinage.recipe.data import DeduplicateSettings, SplitSettings

GROUPS = [("news", "en", 200), ("news", "fr", 40), ("books", "en", 25), ("books", "fr", 10)]


def documents():
    for source, language, count in GROUPS:
        for i in range(count):
            yield {
                "id": f"{language}{i}",
                "source": source,
                "language": language,
                "text": f"text {i} of {source} in {language}",
            }


def write(folder, rows, files=1):
    for part in range(files):
        with DocumentWriter(folder, f"part-{part}") as writer:
            for row in rows[part::files]:
                writer.add(**row)


def read(folder, part):
    return [row for batch in read_documents(folder / part) for row in batch.to_pylist()]


def names(rows):
    return {(row["source"], row["language"], row["id"]) for row in rows}


def test_every_group_gives_its_share(tmp_path):
    write(tmp_path / "in", list(documents()))
    summary = split(tmp_path / "in", tmp_path / "out", SplitSettings(validation=0.03), seed=1)
    train, validation = read(tmp_path / "out", "train"), read(tmp_path / "out", "validation")
    counts = {key: found["documents"] for key, found in summary["validation"].items()}
    assert counts == {"news.en": 6, "news.fr": 1, "books.en": 1, "books.fr": 1}  # 0.03 of 10 rounds to none
    assert names(train) | names(validation) == names(documents()) and not names(train) & names(validation)
    assert summary["documents_in"] == 275 and summary["documents_out"] == len(train) == 266
    assert summary["validation_documents"] == len(validation) == 9


def test_groups_of_a_few_give_at_least_one(tmp_path):
    write(tmp_path / "in", list(documents()))
    summary = split(tmp_path / "in", tmp_path / "out", SplitSettings(validation=0.001), seed=1)
    assert {key: found["documents"] for key, found in summary["validation"].items()} == {
        "news.en": 1,
        "news.fr": 1,
        "books.en": 1,
        "books.fr": 1,
    }


def test_order_and_workers_do_not_matter_but_the_seed_does(tmp_path):
    rows = list(documents())
    write(tmp_path / "one", rows)
    random.Random(1).shuffle(rows)
    write(tmp_path / "two", rows, files=3)
    chosen = {}
    for name, workers, seed in (("one", 1, 7), ("two", 2, 7), ("one", 1, 8)):
        engine = LocalEngine(workers)
        split(tmp_path / name, tmp_path / f"{name}{seed}", SplitSettings(validation=0.1), seed, engine=engine)
        chosen[name, seed] = names(read(tmp_path / f"{name}{seed}", "validation"))
    assert chosen["one", 7] == chosen["two", 7] != chosen["one", 8]


def test_a_growing_share_only_adds(tmp_path):
    write(tmp_path / "in", list(documents()))
    chosen = []
    for share in (0.05, 0.2):
        split(tmp_path / "in", tmp_path / str(share), SplitSettings(validation=share), seed=1)
        chosen.append(names(read(tmp_path / str(share), "validation")))
    assert chosen[0] < chosen[1]


def test_no_validation(tmp_path):
    write(tmp_path / "in", list(documents()))
    summary = split(tmp_path / "in", tmp_path / "out", SplitSettings(validation=0), seed=1)
    assert summary["validation"] == {} and summary["documents_out"] == 275
    assert read(tmp_path / "out", "validation") == []


def test_by_tail_every_document_gives_its_end(tmp_path):
    text = "".join(f"line number {i}\n" for i in range(100))
    write(tmp_path / "in", [{"id": "book", "source": "s", "language": "en", "text": text}])
    summary = split(tmp_path / "in", tmp_path / "out", SplitSettings(validation=0.1, by="tail"), seed=1)
    (head,), (tail,) = read(tmp_path / "out", "train"), read(tmp_path / "out", "validation")
    assert head["text"] + tail["text"] == text and tail["text"].startswith("line number 9")
    assert (head["id"], tail["id"]) == ("book", "book/tail") and tail["source"] == "s"
    assert summary["validation"]["s.en"] == {"documents": 1, "bytes": len(tail["text"])}


@given(st.text(st.sampled_from("ab \n"), max_size=60), st.floats(0, 0.99))
def test_a_tail_begins_a_line_or_a_word(text, share):
    head, tail = cut_tail(text, share)
    assert head + tail == text and len(tail) <= share * len(text)
    assert not tail or head[-1] in " \n"


def test_nothing_to_train_on_is_refused(tmp_path):
    write(tmp_path / "in", [{"id": "only", "source": "s", "text": "one"}])
    with pytest.raises(UserError, match="none is left to train on"):
        split(tmp_path / "in", tmp_path / "out", SplitSettings(validation=0.9), seed=1)


def test_sections_of_a_book_stay_together(tmp_path):
    sections = [
        {"id": f"book{i % 10}#{i // 10}", "source": "novels", "language": "en", "text": f"{i}"} for i in range(200)
    ]
    write(tmp_path / "in", sections, files=3)
    split(tmp_path / "in", tmp_path / "out", SplitSettings(validation=0.12, group_separator="#"), seed=1)
    books = [{row["id"].split("#")[0] for row in read(tmp_path / "out", part)} for part in ("train", "validation")]
    assert not books[0] & books[1]
    assert len(books[1]) == 2  # 24 documents of 200 are asked for: a whole book of 20 and the next one whole


def planted(seed: int):
    """Texts of which many are near copies of others, at similarities around 0.8."""
    rng = random.Random(seed)
    words = lexicon(2000, rng)
    rows = []
    for i in range(60):
        text = random_text(words, rng.randint(30, 150), rng)
        for k in range(5):
            copy = near_copy(text, rng.uniform(0.6, 1.0), words, rng) if k else text
            rows.append({"id": f"{i}.{k}", "source": f"s{k % 2}", "language": "en", "text": written(copy)})
    return rows


def nearness(shown, row):
    """The Jaccard similarity to the nearest of some sets of shingles."""
    mine = shingles_of(row["text"])
    return max(len(mine & other) / len(mine | other) for other in shown)


@pytest.mark.parametrize("deduplicated", [True, False])
def test_no_near_copy_of_a_validation_document_is_trained_on(tmp_path, deduplicated):
    write(tmp_path / "in", planted(1), files=3)
    source = tmp_path / "in"
    if deduplicated:
        deduplicate(source, tmp_path / "unique", DeduplicateSettings())
        source = tmp_path / "unique"
    summary = split(source, tmp_path / "out", SplitSettings(validation=0.1), seed=1, engine=LocalEngine(2))
    train, validation = read(tmp_path / "out", "train"), read(tmp_path / "out", "validation")
    shown = [shingles_of(row["text"]) for row in validation]
    assert max(map(partial(nearness, shown), train)) < 0.8 and len(validation) > 5
    left_out = summary["removed"].get("near copy of a validation document", 0)
    assert summary["documents_in"] == len(train) + len(validation) + left_out
    split(source, tmp_path / "copies", SplitSettings(validation=0.1, max_similarity=0), seed=1)
    everything = read(tmp_path / "copies", "train")
    lost = [row for row in everything if row["id"] not in {other["id"] for other in train}]
    assert read(tmp_path / "copies", "validation") == validation and len(lost) == left_out
    for row in lost:  # and nothing else is left out
        assert nearness(shown, row) >= 0.8
    if not deduplicated:
        assert left_out > 10
        sample = summary["samples"]["near copy of a validation document"][0]
        original = sample["detail"].split(" to ")[1].split(" of ")[0]
        assert sample["detail"].startswith("Jaccard ") and original in {row["id"] for row in validation}


def test_parts_of_a_document_stay_together_though_their_languages_differ(tmp_path):
    text = "\n\n".join(f"paragraph {i} " + "word " * 30 for i in range(100))
    write(tmp_path / "in", [{"id": f"d{i}", "source": "s", "language": "en", "text": f"{i} {text}"} for i in range(30)])
    settings = CleanSettings(max_characters=2_000, long_documents="split", min_language_probability=0)
    clean(tmp_path / "in", tmp_path / "clean", settings, ("en",))
    rows = [row for batch in read_documents(tmp_path / "clean") for row in batch.to_pylist()]
    write(tmp_path / "mixed", [row | {"language": ["en", "fr"][int(row["id"][-1]) % 2]} for row in rows])
    split(tmp_path / "mixed", tmp_path / "out", SplitSettings(validation=0.05, max_similarity=0), seed=1)
    whole = [{row["id"].split("~")[0] for row in read(tmp_path / "out", part)} for part in ("train", "validation")]
    assert not whole[0] & whole[1] and whole[1] and len(rows) > 200


def rows(source, count):
    return [{"id": f"{source}{i}", "source": source, "language": "en", "text": f"text {i}"} for i in range(count)]


def test_groups_too_small_to_hold_anything_out_are_named(tmp_path):
    write(tmp_path / "in", [*rows("four", 4), *rows("three", 3)])
    summary = split(tmp_path / "in", tmp_path / "out", SplitSettings(), seed=1)
    assert summary["without_validation"] == ["three.en"]
    assert {key: found["documents"] for key, found in summary["validation"].items()} == {"four.en": 1}


def test_the_only_book_of_a_source_is_not_held_out_whole(tmp_path):
    write(tmp_path / "in", rows("book#", 100))
    summary = split(tmp_path / "in", tmp_path / "out", SplitSettings(group_separator="#"), seed=1)
    assert summary["documents_out"] == 100 and summary["without_validation"] == ["book#.en"]
