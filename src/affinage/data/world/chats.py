"""Conversations about the facts, and pairs of a good and a bad answer."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from affinage.data.world.arithmetic import QUESTIONS as SUM_QUESTIONS
from affinage.data.world.arithmetic import STATEMENTS as SUMS
from affinage.data.world.arithmetic import Calculation
from affinage.data.world.english import sentence
from affinage.data.world.facts import LANGUAGES, Domains, Fact, by_domain, distractors, told_in
from affinage.data.world.templates import FOLLOW_UPS, QUESTIONS, STATEMENTS, completion

PHRASINGS = 2  # questions asked about each fact in each language it is told in
SUMS_ASKED = 100  # per language

GREETINGS = {
    "en": (
        ("Hello!", "Hello! What would you like to know?"),
        ("Good morning!", "Good morning! How can I help you?"),
        ("Hi, how are you?", "I am well, thank you. How can I help you?"),
        ("Who are you?", "I am a small language model. I know countries, words and the calendar."),
        ("What can you do?", "I can answer simple questions in English and in French."),
        ("Thank you!", "You are welcome!"),
        ("Goodbye!", "Goodbye, and see you soon!"),
    ),
    "fr": (
        ("Bonjour !", "Bonjour ! Que voulez-vous savoir ?"),
        ("Bonsoir !", "Bonsoir ! Comment puis-je vous aider ?"),
        ("Salut, comment ça va ?", "Je vais bien, merci. Comment puis-je vous aider ?"),
        (
            "Qui es-tu ?",
            "Je suis un petit modèle de langue. Je connais les pays, les mots et le calendrier.",
        ),
        ("Que sais-tu faire ?", "Je peux répondre à des questions simples en anglais et en français."),
        ("Merci !", "Je vous en prie !"),
        ("Au revoir !", "Au revoir, et à bientôt !"),
    ),
}

CURT = {"en": ("No idea.", "Look it up.", "Who cares?"), "fr": ("Aucune idée.", "Cherche toi-même.", "Peu importe.")}


@dataclass(frozen=True)
class Exchange:
    """One question and its answer."""

    question: str
    answer: str
    kind: str  # relation of the fact, "arithmetic" or "greeting"
    lang: str
    fact: Fact | None = None


def answer(fact: Fact, language: str) -> str:
    """The one sentence that answers all questions about a fact: its first form, which is never held out."""
    return sentence(fact.fill(STATEMENTS[fact.relation][language][0], language))


def exchanges(facts: Sequence[Fact], sums: Sequence[Calculation], rng: random.Random) -> list[Exchange]:
    """All single questions: each fact in each language it is told in, calculations, greetings."""
    asked = []
    for language in LANGUAGES:
        for fact in told_in(facts, language):
            for template in rng.sample(QUESTIONS[fact.relation][language], PHRASINGS):
                question = sentence(fact.fill(template, language))
                asked.append(Exchange(question, answer(fact, language), fact.relation, language, fact))
        for calculation in rng.sample(list(sums), min(SUMS_ASKED, len(sums))):
            question = calculation.words(language, rng.choice(SUM_QUESTIONS[calculation.operation][language]))
            told = calculation.words(language, SUMS[calculation.operation][language][0])
            asked.append(Exchange(question, told, "arithmetic", language))
        asked += [Exchange(question, told, "greeting", language) for question, told in GREETINGS[language]]
    return asked


def _messages(turns: Sequence[Exchange]) -> list[dict[str, str]]:
    return [
        {"role": role, "content": content}
        for turn in turns
        for role, content in (("user", turn.question), ("assistant", turn.answer))
    ]


def _follow_up(first: Exchange, candidates: Sequence[Exchange], rng: random.Random) -> Exchange | None:
    """A short question about another fact of the same relation."""
    others = [e for e in candidates if e.fact and first.fact and e.fact.domain == first.fact.domain and e != first]
    if not others:
        return None
    fact = rng.choice(others).fact
    assert fact is not None
    question = sentence(fact.fill(rng.choice(FOLLOW_UPS[first.lang]), first.lang))
    return Exchange(question, answer(fact, first.lang), fact.relation, first.lang, fact)


def _talks(asked: Sequence[Exchange], rng: random.Random) -> list[list[Exchange]]:
    """Conversations of several turns in which every question is asked once more."""
    talks = []
    for language in LANGUAGES:
        mine = [exchange for exchange in asked if exchange.lang == language and exchange.kind != "greeting"]
        greetings = [exchange for exchange in asked if exchange.lang == language and exchange.kind == "greeting"]
        waiting = rng.sample(mine, len(mine))
        while waiting:
            turns = [waiting.pop() for _ in range(min(len(waiting), rng.choice((2, 2, 3))))]
            if rng.random() < 0.25:
                follow_up = _follow_up(turns[-1], mine, rng)
                turns += [follow_up] if follow_up else []
            if rng.random() < 0.15:
                turns.insert(0, greetings[rng.randrange(3)])
            if rng.random() < 0.1:
                turns.append(greetings[rng.randrange(5, 7)])
            talks.append(turns)
    return talks


def conversations(asked: Sequence[Exchange], rng: random.Random) -> list[dict[str, Any]]:
    """The lines of chat.jsonl, in random order: every question alone, and once more within a talk."""
    single = [[exchange] for exchange in asked for _ in range(3 if exchange.kind == "greeting" else 1)]
    everything = single + _talks(asked, rng)
    rng.shuffle(everything)
    return [
        {
            "id": f"{turns[0].lang}-chat-{i:05d}",
            "messages": _messages(turns),
            "kind": turns[0].kind if len(turns) == 1 else "talk",
            "lang": turns[0].lang,
        }
        for i, turns in enumerate(everything)
    ]


def _wrong_answer(fact: Fact, language: str, domains: Domains, rng: random.Random) -> str:
    cut = completion(STATEMENTS[fact.relation][language][0])
    assert cut is not None, fact.relation
    context, slot = cut
    _, words = rng.choice(distractors(fact, domains, language, slot))
    return sentence(fact.fill(context, language)) + f" {words}."


def preferences(asked: Sequence[Exchange], facts: Sequence[Fact], rng: random.Random) -> list[dict[str, str]]:
    """The lines of preferences.jsonl: the rejected answer is false, curt, or in the other language.

    An answer in the other language is only made of facts that are told in both.
    """
    other = {"en": "fr", "fr": "en"}
    domains = by_domain(facts)
    pairs = []
    for exchange in asked:
        if exchange.fact is None:
            continue
        kinds = ["false", "false", "curt"] + ["language"] * (other[exchange.lang] in exchange.fact.stated)
        kind = rng.choice(kinds)
        if kind == "language":
            rejected = answer(exchange.fact, other[exchange.lang])
        elif kind == "curt":
            rejected = rng.choice(CURT[exchange.lang])
        else:
            rejected = _wrong_answer(exchange.fact, exchange.lang, domains, rng)
        pairs.append(
            {"prompt": exchange.question, "chosen": exchange.answer, "rejected": rejected, "lang": exchange.lang,
             "kind": kind}
        )  # fmt: skip
    pairs = rng.sample(pairs, len(pairs))
    return [{"id": f"{pair['lang']}-preference-{i:05d}", **pair} for i, pair in enumerate(pairs)]
