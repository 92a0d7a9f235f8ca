"""Language id: the right language at 0.8, on texts that trap the usual wrappers."""

import pytest

from affinage.data.language import excerpt, identify_language, known_languages, language_probabilities

ENGLISH = "The committee met on Thursday to discuss how the harbour should be rebuilt before the winter storms arrive. "
FRENCH = "Le comité s'est réuni jeudi pour décider comment reconstruire le port avant les tempêtes de l'hiver. "
GERMAN = "Der Ausschuss traf sich am Donnerstag, um zu besprechen, wie der Hafen wieder aufgebaut werden soll. "


@pytest.mark.parametrize(("text", "language"), [(ENGLISH, "en"), (FRENCH, "fr"), (GERMAN, "de")])
@pytest.mark.parametrize("repeat", [1, 100])
def test_plain_sentences(text, language, repeat):
    found, probability = identify_language(text * repeat)
    assert found == language and 0.8 <= probability <= 1


def test_newlines_and_capitals_do_not_change_the_language():
    assert identify_language(ENGLISH.replace(" ", "\n"))[0] == "en"
    assert identify_language(FRENCH.upper()) == identify_language(FRENCH.lower())


def test_the_start_does_not_decide_for_the_rest():
    found, probability = identify_language(GERMAN * 3 + FRENCH * 60)
    assert found == "fr" and probability >= 0.8


def test_the_excerpt_is_spread_over_all_of_a_long_text():
    text = "".join(chr(ord("a") + i // 1000) for i in range(20_000))
    assert len(excerpt(text)) == 8 * 500 + 7
    assert excerpt(text)[0] == "a" and excerpt(text)[-1] == "t" and len(set(excerpt(text))) > 8
    assert excerpt("short  text\n") == "short text"


def test_texts_without_words():
    assert identify_language("") == identify_language(" \n\t") == ("", 0.0)


def test_several_probabilities():
    found = language_probabilities(ENGLISH * 2 + FRENCH * 2, 3)
    assert {"en", "fr"} <= set(found) and sum(found.values()) <= 1.01
    assert {"en", "fr", "de", "zh"} <= known_languages() and len(known_languages()) == 176
