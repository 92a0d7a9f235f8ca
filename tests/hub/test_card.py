"""The model card in both languages."""

from dataclasses import replace

import pytest
from huggingface_hub import ModelCard

from affinage.hub.card import CardFacts, model_card

FACTS = CardFacts(
    licence="apache-2.0",
    summary="A model of 1.23M parameters.",
    command="affinage run quickstart",
    languages=("en", "fr"),
    sources=[{"name": "pocket-world", "licence": "CC0-1.0", "documents": 1234, "bytes": 5678}],
    training={"Pretraining: steps": 1800},
    results={"base": {"tasks": {"facts|en": {"metrics": {"acc": {"value": 0.5, "stderr": 0.01}}}}}},
)


def card(facts: CardFacts) -> str:
    return model_card("m", facts, parameters=1_234_567, context=2048, chat=True)


def test_numbers_and_headings_are_of_the_language():
    english, french = card(FACTS), card(replace(FACTS, language="fr", summary="Un modèle de 1,23 M paramètres."))
    assert "1,234,567 parameters" in english and "0.500 ± 0.010" in english and "| 1,234 | 5,678 |" in english
    assert "1\u202f234\u202f567 paramètres" in french and "0,500 ± 0,010" in french and "1\u202f800" in french
    heads = [[line for line in text.splitlines() if line.startswith("## ")] for text in (english, french)]
    assert len(heads[0]) == len(heads[1]) == 6 and set(heads[0]) & set(heads[1]) == {"## Scores"}
    for text in (english, french):
        assert "\n".join(text.splitlines()).count("\n\n\n") == 0
        assert ModelCard(text).data.eval_results[0].metric_value == 0.5


def test_what_is_not_known_is_left_out():
    text = card(CardFacts(licence="mit"))
    assert "license: mit" in text and "## Scores" not in text and "## Training" not in text and "None" not in text


def test_scores_asked_in_the_chat_template_are_marked():
    asked = {"tasks": {"facts|en": {"metrics": {"acc": {"value": 0.6, "stderr": 0.01, "in_chat": True}}}}}
    text = card(replace(FACTS, results=FACTS.results | {"sft": asked}))
    assert "0.600 ± 0.010 †" in text and "0.500 ± 0.010 |" in text and text.count("†") == 2
    assert "†" not in card(FACTS)


@pytest.mark.parametrize("language", ["en", "fr"])
def test_the_example_and_the_harness_s_own_backend_put_before_a_text_what_the_tokenizer_does_not(language: str):
    told = {"parameters": 1, "context": 8, "chat": False}
    facts = replace(FACTS, language=language)
    ours, foreign = model_card("m", facts, **told), model_card("m", facts, **told, opening="")
    assert 'tokenizer("<s>' in ours and "add_bos_token=True" in ours
    assert 'tokenizer("' in foreign and "<s>" not in foreign and "add_bos_token" not in foreign
