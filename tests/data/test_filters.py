"""The filter step: each rule removes what it should, counts it, and leaves the rest repaired and identified."""

import sys
import unicodedata

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from affinage.config.data import FilterSettings, PackingSettings
from affinage.data.code_points import count_characters, repair
from affinage.data.filters import filter_documents, identify_language, known_languages
from affinage.data.special_tokens import BOS, CODE, ENDCODE, EOS, PAD
from affinage.data.tokenize import tokenize
from run_affinage import refused
from source_forms import prose, rows_of, write_documents

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
    error = refused(run, tmp_path / "nothing", ["short", "tiny"])
    assert "2 are too short" in error.what and "d0 of s: 5 characters" in error.what


def test_lengths_are_counted_after_repair_and_letters_without_space(tmp_path):
    settings = FilterSettings(language_threshold=0)
    summary, rows = run(tmp_path / "a", ["\u200b" * 60 + "a" * 99, "e\u0301" * 99 + ".\0"], settings)
    assert [row["text"] for row in rows] == ["é" * 99 + "."] and summary["removed"] == {"too short": 1}
    settings = FilterSettings(min_characters=1, language_threshold=0)
    _, rows = run(tmp_path / "b", ["abcdefg...", "abcdef....", "a b c d e f g . . .", " \n "], settings)
    assert [row["id"] for row in rows] == ["d0", "d2"]


def test_what_a_source_declares_must_be_found_and_what_a_record_claims_is_not_believed(tmp_path):
    declared = ((SPANISH, "en?"), (ENGLISH, "fr?"), (GERMAN, "fr"), (ENGLISH, "fr"), (FRENCH, "fr"), (ENGLISH, "de"))
    documents = [{"text": text, "language": language} for text, language in declared]
    documents.append({"text": SPANISH, "language": "fr", "language_score": 1.0})  # of a source that is trusted
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


def test_filters_of_datatrove_are_off_until_they_are_named(tmp_path, monkeypatch):
    pytest.importorskip("datatrove")
    documents = [ENGLISH, "\n".join([ENGLISH] * 5), FRENCH + " {}."]
    summary, _ = run(tmp_path / "off", documents)
    assert summary["removed"] == {}
    few = {"top_n_grams": [], "dup_n_grams": []}
    filters = {"GopherRepetitionFilter": few, "C4QualityFilter": {"min_num_sentences": 1}}
    summary, rows = run(tmp_path / "on", documents, FilterSettings(datatrove=filters))
    assert [row["id"] for row in rows] == ["d0"]
    assert summary["removed"] == {"GopherRepetitionFilter: dup_line_frac": 1, "C4QualityFilter: curly_bracket": 1}
    wrong = FilterSettings(datatrove={"GopherRepetitionFilter": {"nonsense": 1}})
    refused(run, tmp_path / "wrong", documents, wrong, match="does not take")
    with pytest.raises(ValueError, match="GopherRepetitionFilter"):
        FilterSettings(datatrove={"ParquetWriter": {}})
    addresses = {"email_replacement": "email@example.com", "ip_replacement": "192.0.2.1"}
    with_addresses = [f"{ENGLISH} Write to jane@harbour.org or 8.8.8.8.", "jane@harbour.org"]
    summary, rows = run(tmp_path / "addresses", with_addresses, FilterSettings(datatrove={"PIIFormatter": addresses}))
    assert rows[0]["text"] == f"{ENGLISH} Write to email@example.com or 192.0.2.1."
    assert summary["samples"]["too short"][0]["text"] == "email@example.com", "replaced before anything else sees them"
    monkeypatch.setitem(sys.modules, "datatrove.pipeline.filters", None)
    error = refused(run, tmp_path / "missing", documents, FilterSettings(datatrove=filters))
    assert "affinage[filters]" in error.fix and error.where == "data.filters.datatrove"


def test_a_text_in_two_languages_of_the_recipe_can_pass_by_both_together(tmp_path):
    half = f"{ENGLISH} {FRENCH}"  # French at 0.91, French or English at 0.94
    trusted = {"text": ENGLISH, "language": "en", "language_score": 1.0}
    documents = [{"text": half}, {"text": SPANISH}, {"text": half, "language": "en"}, trusted]
    for mixed, kept in ((False, ["d3"]), (True, ["d0", "d2", "d3"])):
        settings = FilterSettings(language_threshold=0.93, mixed_languages=mixed)
        summary, rows = run(tmp_path / str(mixed), documents, settings)
        assert sorted(row["id"] for row in rows) == kept and "other language" in summary["removed"]


CODE_TEXT = "def area(width, height):\n    # <|endcode|><|code|></s>\n    return [[width] * 3, {'h': height}]\n" * 3


def test_code_passes_cleaning_by_rules_of_its_own(tmp_path):
    code = {
        "good": CODE_TEXT,
        "symbols": "+-*/ {} [] () <> == != ;; :: @@ ## && || ^^ ~~ ``\n" * 20,
        "minified": "var a=1;" * 500,
        "wide": ("x = call_of_something(with_an_argument, and_another_one) + " * 3 + "\n") * 5,
        "tiny": "x = 1\n",
    }
    documents = [{"id": id, "text": text, "language": "code"} for id, text in code.items()]
    documents += [{"id": "text", "text": f"{prose('en', 1)}\n{CODE_TEXT}"}, {"id": "other", "text": CODE_TEXT * 2}]
    summary, rows = run(tmp_path, documents, FilterSettings(datatrove={"GopherRepetitionFilter": {}}))
    left = {row["id"]: row["language"] for row in rows}
    assert left.pop("good") == "code", "Gopher's rules for repetition are not for code"
    assert "code" not in left.values()
    removed = summary["removed"]
    assert [removed[f"code: {rule}"] for rule in ("a long line", "long lines", "not enough letters")] == [1, 1, 1]
    assert removed["too short"] == 1


def test_code_is_wrapped_in_the_rows(tmp_path, tokenizer):
    code = {"id": "c", "source": "stack", "language": "code", "text": CODE_TEXT}
    for part in ("train", "validation"):
        write_documents(tmp_path / "split" / part, [code, {"source": "web", "language": "en", "text": CODE_TEXT}])
    tokenize(tmp_path / "split", tokenizer, tmp_path / "rows", PackingSettings(seq_len=512))

    def tokens(folder):
        (path,) = (tmp_path / "rows").glob(f"{folder}/tokens-*.npy")
        (row,) = np.load(path)
        return row[row != PAD].tolist()

    text = tokenizer.encode(CODE_TEXT)
    assert not {CODE, ENDCODE, EOS} & set(text), "raw text never becomes a control id"
    for part in ("train", "validation"):
        assert (tokens(f"{part}/*code"), tokens(f"{part}/*en")) == ([BOS, CODE, *text, ENDCODE, EOS], [BOS, *text, EOS])
    predicted = np.load(next((tmp_path / "rows" / "validation").glob("*code/row_bytes-*.npy")))
    assert predicted.sum() == len(CODE_TEXT.encode()), "bits per byte count the bytes of the text alone"


@pytest.mark.parametrize(("text", "language"), [(ENGLISH, "en"), (FRENCH, "fr"), (GERMAN, "de")])
def test_languages_are_told_from_each_other_by_all_of_a_text(text, language):
    for written in (text, f"{text} " * 100, text.replace(" ", "\n"), f"{SPANISH} " * 3 + f"{text} " * 60):
        found, probability = identify_language(written)
        assert found == language and 0.7 <= probability <= 1
    assert identify_language(text.upper()) == identify_language(text.lower())
    assert identify_language(text.title())[0] == language and identify_language(text.title())[1] > 0.7
    assert identify_language("") == identify_language(" \n\t") == identify_language("12 345 | 6,789 " * 30) == ("", 0.0)
    assert {language, "es"} <= known_languages()


# ---- repair, and counting characters as Python does

ODD = [
    *"\r\n\t\x00\x0b\x0c\x7f\x85\x92\u00ad\u200b\u200d\u2028\u2581\ufeff\ufffe\u202e éÃ©â€™ÂÅx9-",
    *"\u0301\u0327\u1100\u1161\u11a8\u2126\U0001fffe",
    *("\r\n", "Ã©", "â€™", "👩\u200d💻", "e\u0301", "क\u093c", "نا\u200cمه"),
]
TEXTS = st.lists(st.one_of(st.sampled_from(ODD), st.characters(exclude_categories=["Cs"])), max_size=30).map("".join)
REPAIRED = {
    "line\r\nline\rline\n": "line\nline\nline\n",
    "\ufeffzero\u200bwidth and soft\u00adhyphen": "zerowidth and softhyphen",
    "nul\0 bell\a tab\t": "nul bell tab\t",
    "e\u0301te\u0301 and e\u200b\u0301": "été and é",
    "l\x92homme": "l’homme",
    "l’Ã©tÃ© dernier, donâ€™t": "l’été dernier, don’t",
    "▁piece": "_piece",
    "« Où ? » 12\u202f345,67\u00a0€": "« Où ? » 12\u202f345,67\u00a0€",
    "👩\u200d💻": "👩\u200d💻",
    "page\x0cpage": "page\npage",
}


def test_repairs_a_reader_would_ask_for():
    assert repair(pa.array(REPAIRED)).to_pylist() == [*REPAIRED.values()]
    column = pa.array(["first", "second\r\n", "third\0"])[1:]  # of which slices are read at their offset
    assert repair(column).to_pylist() == ["second\n", "third"]


@given(st.lists(TEXTS, min_size=1, max_size=8))
def test_what_is_repaired_stays_so_and_is_counted_as_python_counts_it(texts):
    repaired = repair(pa.array(texts, pa.string()))
    for text, counts in zip(repaired.to_pylist(), count_characters(repaired).T.tolist()):
        assert unicodedata.is_normalized("NFC", text) and not set(text) & set("\r\0\x7f\u00ad\u200b\u2028\u2581\ufeff")
        counted = [c for c in text if not c.isspace() and unicodedata.category(c)[0] != "M"]
        assert counts == [len(text), len(counted), sum(c.isalnum() for c in text)]
