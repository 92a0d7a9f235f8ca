"""The validation split: the right share of every group, the same for any order, and never a document in both."""

import random

from hypothesis import given
from hypothesis import strategies as st

from affinage.config.data import SplitSettings
from affinage.data.split import cut_tail, split
from run_affinage import refused
from source_forms import rows_of, write_documents


def rows(source, count, language="en"):
    facts = {"source": source, "language": language}
    return [facts | {"id": f"{source}{language}{i}", "text": f"text {i} of {source}, {language}"} for i in range(count)]


ALL = [*rows("news", 200), *rows("news", 40, "fr"), *rows("books", 25), *rows("books", 10, "fr")]


def halves(tmp_path, documents, files=1, name="out", **settings):
    """The summary, the training documents and those of validation."""
    if documents is not None:
        write_documents(tmp_path / "in", documents, files)
    summary = split(tmp_path / "in", tmp_path / name, SplitSettings(**settings))
    return summary, *(rows_of(tmp_path / name / part) for part in ("train", "validation"))


def names(rows):
    return {(row["source"], row["language"], row["id"]) for row in rows}


def counts(summary):
    return {key: found["documents"] for key, found in summary["validation"].items()}


def test_every_group_gives_its_share(tmp_path):
    summary, train, validation = halves(tmp_path, ALL, validation_fraction=0.03)
    assert counts(summary) == {"news.en": 6, "news.fr": 1, "books.en": 1, "books.fr": 1}  # 0.03 of 10 rounds to none
    assert names(train) | names(validation) == names(ALL) and not names(train) & names(validation)
    assert summary["documents_in"] == 275 and summary["documents_out"] == len(train) == 266
    assert summary["validation_documents"] == len(validation) == 9
    more = halves(tmp_path, None, validation_fraction=0.2, name="more")[2]
    assert names(validation) < names(more), "a growing share only adds"
    least = halves(tmp_path, None, validation_fraction=0.001, name="least")[0]
    assert counts(least) == {"news.en": 1, "news.fr": 1, "books.en": 1, "books.fr": 1}
    summary, train, validation = halves(tmp_path, None, validation_fraction=0, name="none")
    assert summary["validation"] == {} and summary["documents_out"] == 275 and validation == []


def test_the_order_does_not_matter(tmp_path):
    shuffled = random.Random(1).sample(ALL, len(ALL))
    chosen = names(halves(tmp_path / "one", ALL, validation_fraction=0.1)[2])
    assert names(halves(tmp_path / "two", shuffled, files=3, validation_fraction=0.1)[2]) == chosen


def test_by_tail_every_document_gives_its_end(tmp_path):
    text = "".join(f"line number {i}\n" for i in range(100))
    book = {"id": "book", "source": "s", "language": "en", "text": text}
    summary, (head,), (tail,) = halves(tmp_path, [book], validation_fraction=0.1, by="tail")
    assert head["text"] + tail["text"] == text and tail["text"].startswith("line number 9")
    assert (head["id"], tail["id"], tail["source"]) == ("book", "book", "s")
    assert summary["validation"]["s.en"] == {"documents": 1, "bytes": len(tail["text"])}


@given(st.text(st.sampled_from("ab \n"), max_size=60), st.floats(0, 0.99))
def test_a_tail_begins_a_line_or_a_word(text, share):
    head, tail = cut_tail(text, share)
    assert head + tail == text and len(tail) <= share * len(text)
    assert not tail or head[-1] in " \n"


def test_groups_that_are_small(tmp_path):
    refused(halves, tmp_path / "one", rows("only", 1), validation_fraction=0.9, match="none is left to train on")
    summary = halves(tmp_path / "few", [*rows("four", 4), *rows("three", 3)])[0]
    assert summary["without_validation"] == ["three.en"] and counts(summary) == {"four.en": 1}
    summary = halves(tmp_path / "book", rows("book#", 100), group_separator="#")[0]
    assert summary["documents_out"] == 100 and summary["without_validation"] == ["book#.en"], "the only book stays"


def test_sections_of_a_book_stay_together(tmp_path):
    sections = [row | {"id": f"book{i % 10}#{i // 10}"} for i, row in enumerate(rows("novels", 200))]
    _, *parts = halves(tmp_path, sections, files=3, validation_fraction=0.12, group_separator="#")
    books = [{row["id"].split("#")[0] for row in part} for part in parts]
    assert not books[0] & books[1]
    assert len(books[1]) == 2  # 24 documents of 200 are asked for: a whole book of 20 and the next one whole
