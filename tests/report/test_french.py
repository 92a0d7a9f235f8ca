"""The French page is French: every word has its French, and nothing of ours on the page is left in English."""

import re
import string
from pathlib import Path
from types import SimpleNamespace

from html_page import Page

from affinage.data import decontaminate, ingest, readers, split
from affinage.pipeline.steps_train import epochs_exceeded
from affinage.report import collect_facts, render
from affinage.report.reasons import detail_in, ending_in, reason_name
from affinage.report.strings import strings
from affinage.report.summary import verdict

ENGLISH = r"\b(the|of|and|with|is|are|was|were|from|that|this|which|per|by|for|in)\b"
EN, FR = strings("en"), strings("fr")


def test_no_english_is_left_on_the_page_and_numbers_are_french(pages: dict[str, str], facts):
    ours = Page(pages["fr"]).own
    assert len(ours) > 200, "the page was read"
    # What others published is cited as they published it.
    assert [text for text in ours if re.search(ENGLISH, text) and "Julian" not in text] == []
    whole = {text for text in EN.values() if " " in text and "{" not in text} - set(FR.values())
    assert whole.isdisjoint(ours) and '<html lang="fr">' in pages["fr"]
    shown = " ".join(ours)
    assert not re.search(r"(?<![\w-])\d+\.\d", shown), "a decimal point that is not of a name"
    assert not re.search(r"\d%", shown), "no space before a percent sign"
    assert verdict(facts, "fr").startswith("Un modèle de 1,44\u202fM paramètres, préentraîné sur")


def test_every_word_has_its_french_with_the_same_blanks():
    # Words that are the same in both languages, looked at one by one.
    assert {key for key in EN if EN[key] == FR[key]} <= {
        "sources", "source", "documents_title", "tokens", "total", "scores", "points", "base", "conversations",
        "q_tokens", "features_pixels", "c_parameters", "part", "time_validation", "versions",
    }  # fmt: skip
    english, french = (
        {key: {f[1] for f in string.Formatter().parse(text) if f[1]} for key, text in words.items()}
        for words in (EN, FR)
    )
    assert english == french
    assert not [text for text in FR.values() if re.search(" [:;?!»]", text)]


def test_every_reason_of_the_stages_and_its_detail_has_its_french():
    assert detail_in("Jaccard 0.860 to world/6 of a b", "fr") == "Jaccard 0,860 avec world/6 de a b"
    assert detail_in("whatever a plug-in says", "fr") == "whatever a plug-in says"
    given = {*readers.BROKEN, readers.NOT_ASKED_FOR, ingest.UNKNOWN_KIND, split.NEAR_COPY, "empty"}
    given |= {decontaminate.CONTAMINATED, "not UTF-8"}
    assert {reason for reason in given if reason_name(reason, "fr") == reason} <= {"license"}


def test_why_a_training_ended_is_said_in_french(run: Path, change):
    def told(seen: dict[str, float]) -> str:
        return epochs_exceeded(SimpleNamespace(epochs=lambda _: seen), 5, 1.5)  # type: ignore[arg-type,return-value]

    some, every = told({"a": 2.0, "b c": 2.0, "d": 0.5}), told({"a": 2.0})
    worse = "a is worse than at step 1,000 (p = 0.01)"
    moins_bon = "a est moins bon qu’au pas 1\u202f000 (p\u00a0=\u00a00,01)"
    assert ending_in(some, "en") == some
    assert ending_in(some, "fr") == "les lignes de a, b c ont été vues aussi souvent que `num_epochs: 1.5` le permet"
    assert ending_in(f"{worse}; {worse}", "fr") == f"{moins_bon}\u00a0; {moins_bon}"
    with change(run / "sft" / "result.json") as summary:
        summary["ended"] = every
    page = render(collect_facts(run), "fr")
    assert "ses lignes ont été vues aussi souvent que `num_epochs: 1.5` le permet." in page and every not in page
