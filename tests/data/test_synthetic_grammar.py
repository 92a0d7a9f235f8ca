"""The grammar of the synthetic corpus: frozen forms and generated sentences against phrases checked by hand."""

import re

import pytest

from affinage.data.synthetic.facts import LANGUAGES, Scene, build_facts, calculations, table

FACTS = {fact.id: fact for fact in build_facts(0)}
SUBJECTS = {fact.id.split(":")[1]: fact for fact in FACTS.values() if "poss" in fact.forms["en"]}


def test_the_preposition_and_the_verb_agree_with_the_article() -> None:
    """Of every country: `du` and `au` follow from the name with its article."""
    for fact in SUBJECTS.values():
        name, of, in_ = (fact.forms["fr"][slot] for slot in ("s", "du", "au"))
        article = re.match(r"les |le |la |l'|", name)[0]
        bare = name.removeprefix(article)
        vowel = bare[0] in "AÉEIOU"
        assert (article == "l'") == (vowel and article != "les " and bare not in ("Israël", "Oman")), name
        contracted = {"les ": "des ", "le ": "du ", "la ": "de la ", "l'": "de l'", "": "d'" if vowel else "de "}
        assert of == contracted[article] + bare
        prepositions = {"les ": {"aux"}, "le ": {"au"}, "la ": {"en", "à la"}, "l'": {"en"}, "": {"à", "en"}}
        assert in_.removesuffix(f" {bare}") in prepositions[article]
        assert fact.plural == (article == "les ")


ELISION = re.compile(r"\b(?:de|le|la|que|se|ce) (?=[aâeéèêiîoôuœ])(?!un\b|une\b|onze\b)|\b(?:à|de) les? (?=\w)")


def test_every_sentence_is_whole_and_french_elides_and_contracts() -> None:
    for fact in FACTS.values():
        for language in LANGUAGES:
            for template in (*fact.templates("statements", language), *fact.templates("questions", language)):
                text = fact.fill(template, language)
                assert text.endswith((".", "?")) and not re.search(r"[][{}|]|  ", text), text
                if language == "fr" and fact.relation not in ("word", "country_name"):  # foreign and quoted words
                    assert not ELISION.search(text), text


def test_numbers_in_words() -> None:
    assert all(len(set(table("lexicon")["numbers"][form])) == 111 for form in (*LANGUAGES, "digits"))
    sums = {fact.id: fact for part in calculations(0) for fact in part}
    assert sums["1 * 4"].statement("fr") == "Une fois quatre égale quatre."
    assert sums["8 * 10"].statement("fr") == "Huit fois dix égale quatre-vingts."
    assert sums["12 - 5"].statement("en") == "Twelve minus five is seven."
    assert sums["7 + 5"].statement("digits") == "7 + 5 = 12"


def scene(noun: str, adjective: str, verb: str, plural: bool, determiner: str = "le", place: str = "") -> Scene:
    def row(kind: str, english: str) -> dict:
        return next(row for row in table("lexicon")[kind] if english in (row["en"], row["en"][0]))

    where = row("places", place) if place else None
    return Scene(row("nouns", noun), row("adjectives", adjective), row("verbs", verb), plural, determiner, where)


@pytest.mark.parametrize(
    ("right", "en", "fr"),
    [
        (scene("cat", "small", "sleeps", True), "The small cats sleep.", "Les petits chats dorment."),
        (scene("cow", "white", "eats", True, "un"), "Some white cows eat.", "Des vaches blanches mangent."),
        (scene("cat", "small", "eats", True, "un"), "Some small cats eat.", "De petits chats mangent."),
        (scene("man", "old", "is", False, "ce"), "This man is old.", "Cet homme est vieux."),
        (scene("bird", "old", "eats", False, "un"), "An old bird eats.", "Un vieil oiseau mange."),
        (scene("aunt", "active", "waits", False, "mon"), "My active aunt waits.", "Ma tante active attend."),
        (scene("horse", "strong", "comes back", True, "le", "in the garden"),
         "The strong horses come back in the garden.", "Les chevaux forts reviennent dans le jardin."),
    ],
)  # fmt: skip
def test_scenes(right: Scene, en: str, fr: str) -> None:
    assert (right.text("en"), right.text("fr")) == (en, fr)


def test_minimal_pairs_break_one_agreement() -> None:
    cats = scene("cat", "small", "sleeps", True)
    assert cats.wrong("en") == {"verb number": "The small cats sleeps."}
    assert cats.wrong("fr") == {
        "verb number": "Les petits chats dort.",
        "determiner number": "Le petits chats dorment.",
        "adjective gender": "Les petites chats dorment.",
        "adjective number": "Les petit chats dorment.",
    }
    goat = scene("goat", "old", "runs", False, "un", "in the garden")
    assert goat.wrong("en") == {
        "verb number": "An old goat run in the garden.",
        "a or an": "A old goat runs in the garden.",
    }
    assert goat.wrong("fr")["determiner gender"] == "Un vieille chèvre court dans le jardin."
    assert goat.wrong("fr")["adjective gender"] == "Une vieux chèvre court dans le jardin."
