"""Conversations about the facts, and pairs of a good and a bad answer."""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from affinage.data.synthetic.facts import LANGUAGES, Fact, table

PHRASINGS = 2  # questions asked about each fact in each language it is stated in
SUMS_ASKED = 100  # per language


class Exchange(NamedTuple):
    """One question and its answer."""

    question: str
    answer: str
    kind: str  # relation of the fact, "arithmetic" or "greeting"
    lang: str
    fact: Fact | None = None  # None for arithmetic and greetings


def _ask(fact: Fact, template: str, language: str) -> Exchange:
    return Exchange(fact.fill(template, language), fact.statement(language), fact.relation, language, fact)


def exchanges(facts: Sequence[Fact], sums: Sequence[Fact], rng: random.Random) -> list[Exchange]:
    """Return all single questions: each fact in each language it is stated in, calculations, greetings."""
    asked = []
    for language in LANGUAGES:
        for fact in (fact for fact in facts if language in fact.stated):
            templates = rng.sample(fact.templates("questions", language), PHRASINGS)
            asked += [_ask(fact, template, language) for template in templates]
        for fact in rng.sample(sums, SUMS_ASKED):
            exchange = _ask(fact, rng.choice(fact.templates("questions", language)), language)
            asked.append(exchange._replace(kind="arithmetic", fact=None))
        greetings = table("prose")["greetings"][language]
        asked += [Exchange(question, answer, "greeting", language) for question, answer in greetings]
    return asked


def _talks(asked: Sequence[Exchange], language: str, rng: random.Random) -> list[list[Exchange]]:
    """Return conversations of several turns in which every question of a language is asked once more."""
    mine = [exchange for exchange in asked if exchange.lang == language and exchange.kind != "greeting"]
    greetings = [exchange for exchange in asked if exchange.lang == language and exchange.kind == "greeting"]
    waiting, talks = rng.sample(mine, len(mine)), []
    while waiting:
        turns = [waiting.pop() for _ in range(min(len(waiting), rng.choice((2, 2, 3))))]
        last = turns[-1]
        if rng.random() < 0.25 and last.fact:
            facts = [e.fact for e in mine if e.fact and e.fact.domain == last.fact.domain and e != last]
            follow_ups = table("sentences")["follow_ups"][language]
            turns.append(_ask(rng.choice(facts), rng.choice(follow_ups), language))
        if rng.random() < 0.15:
            turns.insert(0, rng.choice(greetings[:3]))
        if rng.random() < 0.1:
            turns.append(rng.choice(greetings[-2:]))
        talks.append(turns)
    return talks


def conversations(asked: Sequence[Exchange], rng: random.Random) -> list[dict[str, Any]]:
    """Return the lines of chat.jsonl, in random order: every question alone, and once more within a talk."""
    talks = [[exchange] for exchange in asked for _ in range(3 if exchange.kind == "greeting" else 1)]
    for language in LANGUAGES:
        talks += _talks(asked, language, rng)
    rng.shuffle(talks)
    lines = []
    for i, turns in enumerate(talks):
        pairs = [(("user", turn.question), ("assistant", turn.answer)) for turn in turns]
        messages = [{"role": role, "content": content} for pair in pairs for role, content in pair]
        kind, language = turns[0].kind if len(turns) == 1 else "talk", turns[0].lang
        lines.append({"id": f"{language}-chat-{i:05d}", "messages": messages, "kind": kind, "lang": language})
    return lines


def preferences(asked: Sequence[Exchange], facts: Sequence[Fact], rng: random.Random) -> list[dict[str, str]]:
    """Return the lines of preferences.jsonl: the rejected answer is false, curt, or in the other language.

    An answer in the other language is only made of facts that are stated in both.
    """
    pairs = []
    for exchange in asked:
        if (fact := exchange.fact) is None:
            continue
        language, other = exchange.lang, {"en": "fr", "fr": "en"}[exchange.lang]
        kind = rng.choice(["false", "false", "curt"] + ["language"] * (other in fact.stated))
        if kind == "language":
            rejected = fact.statement(other)
        elif kind == "curt":
            rejected = rng.choice(table("prose")["curt"][language])
        else:
            context, _, wrong = fact.choices(language, 0, facts)
            rejected = f"{context} {rng.choice(wrong)[1]}."
        answers = {"prompt": exchange.question, "chosen": exchange.answer, "rejected": rejected}
        pairs.append({**answers, "lang": language, "kind": kind})
    pairs = rng.sample(pairs, len(pairs))
    return [{"id": f"{pair['lang']}-preference-{i:05d}", **pair} for i, pair in enumerate(pairs)]
