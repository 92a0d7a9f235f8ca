"""The French page is French: every word has its French, and nothing of ours on the page is left in English."""

import ast
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from synthetic_run import build_run

import affinage.data
from affinage.data import collect, decontaminate, records, repetition, split
from affinage.report import collect_facts, render
from affinage.report.card import card_facts
from affinage.report.quantities import Quantities
from affinage.report.reasons import detail_in, ending_in, reason_name
from affinage.report.strings import strings
from affinage.report.summary import verdict
from affinage.stages.watching import seen_enough

OF_THE_RUN = {"document", "provenance", "description", "versions", "flow"}  # classes of what a run brings itself
TECHNICAL = {"code", "pre", "style", "script", "title"}
ENGLISH = r"\b(the|of|and|with|is|are|was|were|from|that|this|which|per|by|for|in)\b"


class Ours(HTMLParser):
    """The text of the page that the page itself brings: no documents, no names, no code."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._inside: list[bool] = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag not in ("meta", "link", "br", "wbr", "img"):
            foreign = tag in TECHNICAL or bool(OF_THE_RUN & set((given.get("class") or "").split()))
            self._inside.append(foreign or (bool(self._inside) and self._inside[-1]))
        if not (self._inside and self._inside[-1]):
            self.texts += [given[name] for name in ("aria-label", "title") if given.get(name)]

    def handle_endtag(self, tag):
        self._inside.pop()

    def handle_data(self, data):
        if data.strip() and not self._inside[-1]:
            self.texts.append(data.strip())


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    return collect_facts(build_run(tmp_path_factory.mktemp("run"), steps=300))


def test_no_english_is_left_on_the_page(facts):
    ours = Ours(render(facts, "fr")).texts
    quoted = "Published by others: citations stay as they were published."
    found = [text for text in ours if re.search(ENGLISH, text) and "Julian" not in text]
    assert found == [], quoted
    english = strings("en")
    french = set(strings("fr").values())
    whole = {text for text in english.values() if " " in text and "{" not in text} - french
    assert whole.isdisjoint(ours)
    assert len(ours) > 200, "the page was read"


def test_every_word_has_its_french():
    english, french = strings("en"), strings("fr")
    alike = {key for key in english if english[key] == french[key]}
    # Words that are the same in both languages, looked at one by one.
    assert alike <= {
        "sources", "source", "documents_title", "tokens", "total", "scores", "points", "base", "conversations",
        "q_tokens", "features_pixels", "c_parameters", "part", "time_validation", "versions",
    }  # fmt: skip


def test_numbers_are_written_as_in_french(facts):
    page = render(facts, "fr")
    shown = " ".join(Ours(page).texts)
    assert '<html lang="fr">' in page
    assert not re.search(r"(?<![\w-])\d+\.\d", shown), "a decimal point that is not of a name"
    assert Quantities("fr").count(1234567) == "1\u202f234\u202f567"
    assert not re.search(r"\d%", shown), "no space before a percent sign"


def test_every_reason_of_the_stages_has_its_french():
    """Reasons are found in the source: the second argument of every BadRecord, and the named ones."""
    folder = Path(affinage.data.__file__).parent
    given = {
        call.args[1].value
        for file in folder.glob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and getattr(call.func, "attr", getattr(call.func, "id", "")) == "BadRecord"
        if len(call.args) > 1 and isinstance(call.args[1], ast.Constant)
    }
    assert {"empty", "not UTF-8"} <= given
    given |= {*records.BROKEN, *repetition.RULES, records.NOT_ASKED_FOR, collect.UNKNOWN_KIND, split.NEAR_COPY}
    given |= {repetition.LOREM_IPSUM, repetition.CURLY_BRACKET, decontaminate.CONTAMINATED}
    assert {reason for reason in given if reason_name(reason, "fr") == reason} <= {"lorem ipsum", "licence"}


@pytest.mark.parametrize(
    ("detail", "french"),
    [
        ("Jaccard 0.860 to world/6 of a b", "Jaccard 0,860 avec world/6 de a b"),
        ("0.02 of its characters", "0,02 de ses caractères"),
        ("12 characters", "12 caractères"),
        ("en+fr 0.62", "en+fr 0,62"),
        ("whatever a plug-in says", "whatever a plug-in says"),
    ],
)
def test_details_of_reasons(detail, french):
    assert detail_in(detail, "fr") == french and detail_in(detail, "en") == detail


def test_why_a_training_ended_is_said_in_french(tmp_path):
    seen = {"a": 2.0, "b c": 2.0, "d": 0.5}
    some = seen_enough(SimpleNamespace(epochs=lambda _: seen), 5, 1.5)  # type: ignore[arg-type]
    every = seen_enough(SimpleNamespace(epochs=lambda _: {"a": 2.0}), 5, 1.5)  # type: ignore[arg-type]
    worse, moins_bon = (
        "a is worse than at step 1,000 (p = 0.01)",
        "a est moins bon qu’au pas 1\u202f000 (p\u00a0=\u00a00,01)",
    )
    assert ending_in(some, "en") == some
    assert ending_in(some, "fr") == "les lignes de a, b c ont été vues aussi souvent que `max_epochs: 1.5` le permet"
    assert ending_in(f"{worse}; {worse}", "fr") == f"{moins_bon}\u00a0; {moins_bon}"
    run = build_run(tmp_path)
    summary = run / "sft" / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"ended": every}))
    page = render(collect_facts(run), "fr")
    assert "ses lignes ont été vues aussi souvent que `max_epochs: 1.5` le permet." in page and every not in page


def test_one_line_says_the_same_in_head_and_card(facts):
    line = verdict(facts, "fr")
    assert line.startswith("Un modèle de 1,44\u202fM paramètres, préentraîné sur") and "\n" not in line
    assert line in render(facts, "fr")
    told = card_facts(facts, "apache-2.0")
    assert told.summary == verdict(facts, "en", timed=False)
    assert " in " not in told.summary and "cpu" not in told.summary, "a card does not change with the clock"
    assert told.results["sft"]["tasks"]["lambada_openai"]["metrics"]["perplexity"]["value"] == pytest.approx(52.4)
    assert told.sources[0]["documents"] == 10_690 and told.training["Pretraining: steps"] == 300
