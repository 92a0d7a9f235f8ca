"""The filter step: each rule removes what it should, counts it, and leaves the rest repaired and identified."""

import pytest

from affinage.config.data import FilterSettings
from affinage.data.filters import filter_documents
from affinage.data.language import identify_language, known_languages, language_probabilities
from source_forms import rows_of, write_documents

ENGLISH = "The committee met on Thursday to discuss how the harbour should be rebuilt before the winter storms arrive."
FRENCH = "Le comité s'est réuni jeudi pour décider comment reconstruire le port avant les tempêtes de l'hiver."
GERMAN = "Der Ausschuss traf sich am Donnerstag, um zu besprechen, wie der Hafen wieder aufgebaut werden soll."
SPANISH = "El comité se reunió el jueves para decidir cómo reconstruir el puerto antes de las tormentas del invierno."


def run(tmp_path, documents, settings=None, languages=("en", "fr")):
    rows = [{"text": document} if isinstance(document, str) else document for document in documents]
    write_documents(tmp_path / "in", rows)
    summary = filter_documents(tmp_path / "in", tmp_path / "out", settings or FilterSettings(), languages)
    return summary, rows_of(tmp_path / "out")


def test_every_rule_counts_what_it_removes(tmp_path):
    signs = "%$# @!~ ^&* " * 20 + ENGLISH
    documents = [ENGLISH, FRENCH, SPANISH, "Too short.", signs, ENGLISH * 50, "x1 y2 z3 qq ww kk " * 10]
    summary, rows = run(tmp_path, documents, FilterSettings(max_characters=3_000))
    assert [(row["id"], row["language"]) for row in rows] == [("d0", "en"), ("d1", "fr")]
    removed = summary["removed"]
    assert removed["too short"] == removed["too long"] == removed["not enough letters"] == 1
    assert removed["other language"] + removed.get("language unclear", 0) == 2
    (sample,) = summary["samples"]["too short"]
    assert sample == {"id": "d3", "source": "s", "text": "Too short.", "detail": "10 characters"}
    assert summary["samples"]["other language"][0]["detail"].startswith("es 0.9")
    assert summary["documents_in"] == 7 and summary["documents_out"] == 2
    assert summary["bytes_out"] == sum(len(row["text"].encode()) for row in rows)
    assert summary["by_language"]["fr"] == {"documents": 1, "bytes": len(FRENCH.encode())}
    assert summary["by_source"]["s"]["documents"] == 2


def test_what_a_source_declares_must_be_found_and_what_a_record_claims_is_not_believed(tmp_path):
    documents = [
        {"text": SPANISH, "language": "en?"},
        {"text": ENGLISH, "language": "fr?"},
        {"text": GERMAN, "language": "fr"},
        {"text": ENGLISH, "language": "fr"},
        {"text": FRENCH, "language": "fr"},
        {"text": ENGLISH, "language": "de"},
        {"text": SPANISH, "language": "fr", "language_score": 1.0},  # of a source that is trusted
    ]
    summary, rows = run(tmp_path / "id", documents)
    assert [(row["id"], row["language"]) for row in rows] == [("d1", "en"), ("d4", "fr"), ("d6", "fr")]
    assert all(row["language_score"] >= 0.8 for row in rows)
    assert summary["removed"] == {"other language": 4}
    details = [sample["detail"] for sample in summary["samples"]["other language"]]
    assert details[1].startswith("de ") and details[3] == "de, as its source says"
    documents = [{"text": SPANISH}, {"text": ENGLISH, "language": "en?"}, {"text": FRENCH, "language": "xx"}]
    summary, rows = run(tmp_path / "all", documents, languages=())
    assert [row["language"] for row in sorted(rows, key=lambda row: row["id"])] == ["", "en", "xx"]
    assert summary["removed"] == {} and {row["language_score"] for row in rows} == {None}


def test_addresses_are_replaced_before_anything_else_sees_them(tmp_path):
    pytest.importorskip("datatrove")
    documents = [f"{ENGLISH} Write to jane@harbour.org or 8.8.8.8.", "jane@harbour.org"]
    addresses = {"email_replacement": "email@example.com", "ip_replacement": "192.0.2.1"}
    summary, rows = run(tmp_path, documents, FilterSettings(datatrove={"PIIFormatter": addresses}))
    assert rows[0]["text"] == f"{ENGLISH} Write to email@example.com or 192.0.2.1."
    assert summary["formatted"] == 2 and summary["samples"]["too short"][0]["text"] == "email@example.com"


@pytest.mark.parametrize(("text", "language"), [(ENGLISH, "en"), (FRENCH, "fr"), (GERMAN, "de")])
def test_languages_are_told_from_each_other_by_all_of_a_text(text, language):
    for written in (text, f"{text} " * 100, text.replace(" ", "\n"), f"{SPANISH} " * 3 + f"{text} " * 60):
        found, probability = identify_language(written)
        assert found == language and 0.7 <= probability <= 1
    assert identify_language(text.upper()) == identify_language(text.lower())
    assert identify_language(text.title())[0] == language and identify_language(text.title())[1] > 0.7
    assert identify_language("") == identify_language(" \n\t") == identify_language("12 345 | 6,789 " * 30) == ("", 0.0)
    both = language_probabilities(f"{text} {text} {SPANISH} {SPANISH}", 3)
    assert {language, "es"} <= set(both) <= known_languages() and sum(both.values()) <= 1.01
