"""The grammar that names carry, against phrases checked by hand."""

import pytest

from affinage.data.world import english, french
from affinage.data.world.agreement import Scene, english_errors, french_errors
from affinage.data.world.facts import country_forms, currency_forms
from affinage.data.world.lexicon import ADJECTIVES, NOUNS, VERBS

COUNTRIES = """
FR: la France, de la France, en France; JP: le Japon, du Japon, au Japon;
US: les États-Unis, des États-Unis, aux États-Unis; CU: Cuba, de Cuba, à Cuba; IL: Israël, d'Israël, en Israël;
CY: Chypre, de Chypre, à Chypre; IR: l'Iran, de l'Iran, en Iran; EG: l'Égypte, de l'Égypte, en Égypte;
MX: le Mexique, du Mexique, au Mexique; ZA: l'Afrique du Sud, de l'Afrique du Sud, en Afrique du Sud;
HN: le Honduras, du Honduras, au Honduras; HU: la Hongrie, de la Hongrie, en Hongrie;
CI: la Côte d'Ivoire, de la Côte d'Ivoire, en Côte d'Ivoire; BB: la Barbade, de la Barbade, à la Barbade
"""  # code: with article, of, in


def test_countries_and_currencies() -> None:
    for country in COUNTRIES.replace("\n", " ").split(";"):
        code, _, told = country.strip().partition(": ")
        forms, plural = country_forms(code)
        assert ", ".join(forms["fr"][slot] for slot in ("s", "du", "au")) == told
        assert plural == told.startswith("les ")
    for code, name, possessive in (("GM", "the Gambia", "the Gambia's"), ("NL", "the Netherlands", "the Netherlands'")):
        assert country_forms(code)[0]["en"] == {"s": name, "poss": possessive}
    west = "d'Afrique de l'Ouest"
    assert currency_forms("XOF")["fr"] == {"o": f"le franc CFA {west}", "os": f"francs CFA {west}"}
    assert currency_forms("EUR")["fr"] == {"o": "l'euro", "os": "euros"}


def test_articles_months_and_agreement() -> None:
    articles = [english.a(phrase) for phrase in ("cat", "old cat", "active dog", "uncle", "big uncle")]
    assert articles == ["a cat", "an old cat", "an active dog", "an uncle", "a big uncle"]
    assert (english.sentence("Émile"), english.sentence("à Cuba")) == ("Émile", "À Cuba")
    months = [french.de(month) for month in ("mars", "avril", "août", "octobre")]
    assert months == ["de mars", "d'avril", "d'août", "d'octobre"]
    assert french.agree("les Pays-Bas [est|sont] [petit|petits].", True) == "les Pays-Bas sont petits."
    assert french.agree("Cuba [est|sont] [petit|petits].", False) == "Cuba est petit."


NOUN = {noun.en: noun for noun in NOUNS}
ADJECTIVE = {adjective.en: adjective for adjective in ADJECTIVES}
VERB = {verb.en: verb for verb in VERBS}


def scene(noun: str, adjective: str, verb: str | None, plural: bool, *rest: str | int) -> Scene:
    return Scene(NOUN[noun], ADJECTIVE[adjective], VERB[verb] if verb else None, plural, *rest)


@pytest.mark.parametrize(
    ("told", "en", "fr"),
    [
        (scene("cat", "small", "sleeps", True), "The small cats sleep.", "Les petits chats dorment."),
        (scene("cow", "white", "eats", True, "un"), "Some white cows eat.", "Des vaches blanches mangent."),
        (scene("cat", "small", "eats", True, "un"), "Some small cats eat.", "De petits chats mangent."),
        (scene("man", "old", "runs", False), "The old man runs.", "Le vieil homme court."),
        (scene("man", "old", "runs", True), "The old men run.", "Les vieux hommes courent."),
        (scene("man", "old", None, False, "ce"), "This man is old.", "Cet homme est vieux."),
        (scene("bird", "old", "eats", False, "un"), "An old bird eats.", "Un vieil oiseau mange."),
        (scene("aunt", "active", "waits", False, "mon"), "My active aunt waits.", "Ma tante active attend."),
        (scene("queen", "old", None, True, "ce"), "These queens are old.", "Ces reines sont vieilles."),
        (scene("horse", "strong", "comes back", True, "le", 0), "The strong horses come back in the garden.",
         "Les chevaux forts reviennent dans le jardin."),
    ],
)  # fmt: skip
def test_scenes(told: Scene, en: str, fr: str) -> None:
    assert told.english() == en
    assert told.french() == fr


def test_minimal_pairs_break_one_agreement() -> None:
    cats = scene("cat", "small", "sleeps", True)
    assert english_errors(cats) == {"verb number": "The small cats sleeps."}
    assert french_errors(cats) == {
        "verb number": "Les petits chats dort.",
        "determiner number": "Le petits chats dorment.",
        "adjective gender": "Les petites chats dorment.",
        "adjective number": "Les petit chats dorment.",
    }
    goat = scene("goat", "old", "runs", False, "un", 0)
    assert english_errors(goat) == {
        "verb number": "An old goat run in the garden.",
        "a or an": "A old goat runs in the garden.",
    }
    assert french_errors(goat)["determiner gender"] == "Un vieille chèvre court dans le jardin."
    bird = scene("bird", "happy", None, False, "ce", 9)
    assert english_errors(bird)["be"] == "This bird are happy today."
    assert "adjective number" not in french_errors(bird)  # heureux is both
