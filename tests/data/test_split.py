"""The validation split: the right share of every group, the same for any order, and never a document in both."""

from affinage.config.data import SplitSettings
from affinage.data.split import split
from source_forms import rows_of, write_documents

GROUPS = [("news", "en", 200), ("news", "fr", 40), ("books", "en", 25), ("books", "fr", 10)]


ALL = [
    {"id": f"{language}{i}", "source": source, "language": language, "text": f"text {i} of {source} in {language}"}
    for source, language, count in GROUPS
    for i in range(count)
]


def rows(source, count):
    return [{"id": f"{source}{i}", "source": source, "language": "en", "text": f"text {i}"} for i in range(count)]


def halves(tmp_path, documents, seed=1, files=1, name="out", **settings):
    """The summary, the training documents and those of validation."""
    if documents is not None:
        write_documents(tmp_path / "in", documents, files)
    summary = split(tmp_path / "in", tmp_path / name, SplitSettings(**settings), seed)
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


def test_sections_of_a_book_stay_together(tmp_path):
    sections = [row | {"id": f"book{i % 10}#{i // 10}"} for i, row in enumerate(rows("novels", 200))]
    _, *parts = halves(tmp_path, sections, files=3, validation_fraction=0.12, group_separator="#")
    books = [{row["id"].split("#")[0] for row in part} for part in parts]
    assert not books[0] & books[1]
    assert len(books[1]) == 2  # 24 documents of 200 are asked for: a whole book of 20 and the next one whole
