"""The clean stage: each rule removes what it should, counts it, and leaves the rest repaired and identified."""

import pytest

from affinage.data.clean import clean, split_text
from affinage.data.documents import DocumentWriter, read_documents
from affinage.data.engine import LocalEngine
from affinage.errors import UserError
from affinage.recipe.cleaning import CleanSettings

ENGLISH = "The committee met on Thursday to discuss how the harbour should be rebuilt before the winter storms arrive."
FRENCH = "Le comité s'est réuni jeudi pour décider comment reconstruire le port avant les tempêtes de l'hiver."
SPANISH = "El comité se reunió el jueves para decidir cómo reconstruir el puerto antes de las tormentas del invierno."


def run(tmp_path, documents, settings=None, languages=("en", "fr"), workers=None):
    with DocumentWriter(tmp_path / "in") as writer:
        for i, document in enumerate(documents):
            fields = {"text": document} if isinstance(document, str) else document
            writer.add(**({"id": f"d{i}", "source": "s"} | fields))
    engine = LocalEngine(workers)
    summary = clean(tmp_path / "in", tmp_path / "out", settings or CleanSettings(), languages, engine=engine)
    return summary, [row for batch in read_documents(tmp_path / "out") for row in batch.to_pylist()]


def test_every_rule_counts_what_it_removes(tmp_path):
    documents = [
        ENGLISH,
        FRENCH,
        SPANISH,
        "Too short.",
        "%$# @!~ ^&* " * 20 + ENGLISH,
        ENGLISH * 50,
        "x1 y2 z3 qq ww kk " * 10,
    ]
    summary, rows = run(tmp_path, documents, CleanSettings(max_characters=3_000))
    assert [(row["id"], row["language"]) for row in rows] == [("d0", "en"), ("d1", "fr")]
    removed = summary["removed"]
    assert removed["too short"] == removed["too long"] == removed["not enough letters"] == 1
    assert removed["other language"] + removed.get("language unclear", 0) == 2
    assert summary["samples"]["too short"] == [
        {"id": "d3", "source": "s", "text": "Too short.", "detail": "10 characters"}
    ]
    assert summary["samples"]["other language"][0]["detail"].startswith("es 0.9")
    assert summary["documents_in"] == 7 and summary["documents_out"] == 2
    assert summary["bytes_out"] == sum(len(row["text"].encode()) for row in rows)
    assert summary["by_language"]["fr"] == {"documents": 1, "bytes": len(FRENCH.encode())}
    assert summary["by_source"]["s"]["documents"] == 2


def test_lengths_are_counted_after_repair_in_characters(tmp_path):
    exactly = "é" * 99 + "."
    settings = CleanSettings(min_language_probability=0)
    summary, rows = run(tmp_path, ["\u200b" * 60 + "a" * 99, "e\u0301" * 99 + ".\0"], settings)
    assert [row["text"] for row in rows] == [exactly]
    assert summary["removed"] == {"too short": 1} and summary["repaired"] == 2


def test_the_ratio_of_letters_ignores_space(tmp_path):
    settings = CleanSettings(min_characters=1, min_language_probability=0)
    _, rows = run(tmp_path, ["abcdefg...", "abcdef....", "a b c d e f g . . .", " \n "], settings)
    assert [row["id"] for row in rows] == ["d0", "d2"]


def test_languages_that_are_known_or_claimed(tmp_path):
    documents = [
        {"text": SPANISH, "language": "en?"},  # a claim is verified
        {"text": SPANISH, "language": "fr"},  # what the user declares is not
        {"text": ENGLISH, "language": "de"},
    ]
    summary, rows = run(tmp_path, documents)
    assert [(row["id"], row["language"]) for row in rows] == [("d1", "fr")]
    assert summary["removed"] == {"other language": 2}


def test_a_recipe_without_languages_keeps_all(tmp_path):
    documents = [{"text": SPANISH}, {"text": ENGLISH, "language": "en?"}, {"text": FRENCH, "language": "xx"}]
    summary, rows = run(tmp_path, documents, languages=())
    assert [row["language"] for row in rows] == ["", "en", "xx"] and summary["removed"] == {}


def test_without_language_id_claims_are_believed(tmp_path):
    documents = [
        {"text": SPANISH, "language": "en?"},
        {"text": SPANISH, "language": "es?"},
        {"text": SPANISH},
    ]
    _, rows = run(tmp_path, documents, CleanSettings(min_language_probability=0))
    assert [(row["id"], row["language"]) for row in rows] == [("d0", "en"), ("d2", "")]


def test_long_documents_can_be_split_at_paragraphs(tmp_path):
    text = "\n\n".join([FRENCH] * 40)
    settings = CleanSettings(max_characters=1_000, long_documents="split")
    summary, rows = run(tmp_path, [ENGLISH, text], settings)
    assert [row["id"] for row in rows] == ["d0"] + [f"d1~{k}" for k in range(len(rows) - 1)]
    assert "".join(row["text"] for row in rows[1:]) == text
    assert all(row["text"].startswith("Le comité") for row in rows[1:])
    assert summary["split"] == {"documents": 1, "parts": len(rows) - 1}


@pytest.mark.parametrize("text", ["word " * 50, "x" * 250, "line\n" * 50, "a b\n\nc" * 40, "short"])
def test_split_parts_join_to_the_text(text):
    parts = split_text(text, 60)
    assert "".join(parts) == text and max(map(len, parts)) <= 60 and all(parts)


def test_nothing_left_is_one_message(tmp_path):
    with pytest.raises(UserError, match="none of 2 documents; 2 are too short") as error:
        run(tmp_path, ["short", "tiny"])
    assert "such as d0 of s: 5 characters" in error.value.what


def test_an_unknown_language_is_refused(tmp_path):
    with pytest.raises(UserError, match="does not know xx"):
        run(tmp_path, [ENGLISH], languages=("en", "xx"))


def test_workers_do_not_change_the_result(tmp_path):
    for part in range(3):
        with DocumentWriter(tmp_path / "in", f"part-{part}") as writer:
            for i in range(20):
                text = (ENGLISH, FRENCH, SPANISH, "no")[i % 4] + f" {i}"
                writer.add(id=f"{part}.{i}", source="s", text=text)
    results = []
    for workers in (1, 2):
        engine = LocalEngine(workers)
        summary = clean(tmp_path / "in", tmp_path / f"out{workers}", CleanSettings(), ("en", "fr"), engine=engine)
        rows = [row for batch in read_documents(tmp_path / f"out{workers}") for row in batch.to_pylist()]
        results.append((rows, summary | {"seconds": 0}))
    assert results[0] == results[1] and len(results[0][0]) == 30


def test_rules_of_gopher_and_c4_are_off_until_asked_for(tmp_path):
    documents = [ENGLISH, "\n".join([ENGLISH] * 5), FRENCH + " {}."]
    summary, _ = run(tmp_path / "off", documents)
    assert summary["removed"] == {}
    summary, rows = run(tmp_path / "on", documents, CleanSettings(gopher={}, c4={}))
    assert summary["removed"] == {"curly bracket": 1, "duplicate lines": 1}
    assert summary["samples"]["duplicate lines"][0]["detail"] == "0.80 of its lines"
    assert [row["id"] for row in rows] == ["d0"]


def test_addresses_are_masked_before_anything_else_sees_them(tmp_path):
    documents = [f"{ENGLISH} Write to jane@harbour.org or 8.8.8.8.", "jane@harbour.org"]
    summary, rows = run(tmp_path, documents, CleanSettings(mask={}))
    assert rows[0]["text"] == f"{ENGLISH} Write to email@example.com or 192.0.2.1."
    assert summary["masked"] == {"IPv4": 1, "e-mail": 2}
    assert summary["samples"]["too short"][0]["text"] == "email@example.com"


def test_sources_have_thresholds_of_their_own(tmp_path):
    unclear = f"{ENGLISH} {FRENCH}"  # French at 0.91, French or English at 0.94
    documents = [{"text": unclear, "source": "a"}, {"text": unclear, "source": "b"}, {"text": SPANISH, "source": "b"}]
    summary, rows = run(
        tmp_path, documents, CleanSettings(min_language_probability=0.93, min_language_probability_of={"b": 0.9})
    )
    assert [row["source"] for row in rows] == ["b"]
    assert summary["removed"] == {"language unclear": 1, "other language": 1}
    with pytest.raises(UserError, match="no document is of the source c"):
        run(tmp_path / "again", documents, CleanSettings(min_language_probability_of={"c": 0.1}))


def test_mixed_documents_can_be_accepted(tmp_path):
    half = f"{ENGLISH} {FRENCH}"
    summary, _ = run(tmp_path / "off", [FRENCH, half, SPANISH], CleanSettings(min_language_probability=0.93))
    assert summary["removed"] == {"language unclear": 1, "other language": 1}
    settings = CleanSettings(min_language_probability=0.93, mixed_languages=True)
    summary, rows = run(tmp_path / "on", [FRENCH, half, SPANISH], settings)
    assert summary["removed"] == {"other language": 1} and rows[1]["language"] in ("en", "fr")


def test_the_cost_of_a_threshold_is_what_another_threshold_keeps(tmp_path):
    texts = [
        ENGLISH,
        FRENCH,
        ENGLISH[:70] + FRENCH[:40],
        ENGLISH[:40] + FRENCH[:70],
        ENGLISH[:55] + SPANISH[:60],
        SPANISH,
    ]
    documents = [{"text": text + f" {i}", "source": f"s{i % 2}"} for i, text in enumerate(texts * 3)]
    settings = CleanSettings(min_characters=10)
    found = run(tmp_path / "all", documents, settings)[0]["thresholds"]
    assert sum(row["documents"] for row in found["costs"]) < len(documents)  # Spanish is no question of a threshold
    for k, threshold in enumerate(found["grid"]):
        settings = CleanSettings(min_characters=10, min_language_probability=threshold)
        _, rows = run(tmp_path / str(threshold), documents, settings)
        for row in found["costs"]:
            mine = [r["text"] for r in rows if (r["source"], r["language"]) == (row["source"], row["language"])]
            assert row["documents_kept"][k] == len(mine)
            assert row["bytes_kept"][k] == sum(len(text.encode()) for text in mine)


def test_hostile_texts(tmp_path):
    documents = ["\0" * 500, "\ufeff\u200b" * 200, f"{ENGLISH}\0\0", "word " * 400_000]
    summary, rows = run(tmp_path, documents, CleanSettings(gopher={}, c4={}, mask={}))
    assert [row["text"] for row in rows] == [ENGLISH]
    assert summary["removed"] == {"too short": 2, "too long": 1}
