"""The validation split: the right share of every group, the same for any order, and never a document in both."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from affinage.data.documents import DocumentWriter, read_documents
from affinage.data.engine import LocalEngine
from affinage.data.split import cut_tail, split
from affinage.errors import UserError
from affinage.recipe.data import SplitSettings

GROUPS = [("news", "en", 200), ("news", "fr", 40), ("books", "en", 25), ("books", "fr", 10)]


def documents():
    for source, language, count in GROUPS:
        for i in range(count):
            yield {"id": f"{language}{i}", "source": source, "language": language, "text": f"text {i} of {source}"}


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
    assert counts == {"news.en": 6, "news.fr": 1, "books.en": 1}  # 0.03 of 25 rounds to 1; of 10, to none
    assert names(train) | names(validation) == names(documents()) and not names(train) & names(validation)
    assert summary["documents_in"] == 275 and summary["documents_out"] == len(train) == 267
    assert summary["validation_documents"] == len(validation) == 8


def test_large_groups_give_at_least_one(tmp_path):
    write(tmp_path / "in", list(documents()))
    summary = split(tmp_path / "in", tmp_path / "out", SplitSettings(validation=0.001), seed=1)
    assert {key: found["documents"] for key, found in summary["validation"].items()} == {
        "news.en": 1,
        "news.fr": 1,
        "books.en": 1,
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
