"""The synthetic corpus ("pocket world"): true facts in English and French, from a seed, with its own benchmarks.

Beside the documents there are conversations about the facts, pairs of a good and a bad answer, and benchmarks as tasks
of lm-evaluation-harness.
"""

import json
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from affinage.data.synthetic.documents import Writer, ordinary_documents, planted_documents
from affinage.data.synthetic.facts import LANGUAGES, Fact, Scene, build_facts, calculations, dressed, scenes, table

SHARDS = 4  # files that the documents are spread over
ORDINARY_SHARE = 0.96  # of the bytes; the rest is planted
PHRASINGS = 2  # questions asked about each fact in each language it is stated in
SUMS_ASKED = 100  # per language
FACT_ITEMS, AGREEMENT_ITEMS, CHAT_ITEMS = 300, 200, 150  # per task
WRONG = 3  # choices beside the right one

Item = dict[str, Any]


def write_world(folder: Path | str, *, megabytes: float = 3.0, seed: int = 0) -> dict[str, Any]:
    """Write documents, chats, preference pairs, benchmark tasks and the facts themselves into a folder.

    `megabytes` (1e6 bytes of UTF-8) is the volume of the documents' text; everything else has a fixed size. The same
    arguments write the same bytes. Returns counts of what was written.
    """
    folder = Path(folder)
    facts = build_facts(seed)
    used_sums, held_out_sums = calculations(seed)
    used_scenes, held_out_scenes = scenes(seed)
    writers = [Writer(language, facts, used_sums, used_scenes, seed) for language in LANGUAGES]
    documents = list(ordinary_documents(writers, round(ORDINARY_SHARE * megabytes * 1e6)))
    rng = random.Random(f"{seed}/planted")
    documents += list(planted_documents(documents, rng))
    rng.shuffle(documents)
    exchanges = list(make_exchanges(facts, used_sums, random.Random(f"{seed}/chats")))
    tasks = build_tasks(facts, held_out_sums, held_out_scenes, exchanges, seed)
    size = -(-len(documents) // SHARDS)
    files: dict[str, Iterable[Item]] = {"facts": map(vars, facts)}
    files["chat"] = conversations(exchanges, random.Random(f"{seed}/talks"))
    files["preferences"] = preferences(exchanges, facts, random.Random(f"{seed}/preferences"))
    files |= {f"documents/part-{k}": [d._asdict() for d in documents[k * size :][:size]] for k in range(SHARDS)}
    files |= {f"tasks/{name}": items for name, items in tasks.items()}
    for name, lines in files.items():
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8")
    for name in tasks:
        own = {"task": name, "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}}}
        settings = table("tasks")[name.split("_")[1]] | own
        text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
        (folder / f"tasks/{name}.yaml").write_text(text, "utf-8")
    return {"documents": len(documents), "tasks": {name: len(items) for name, items in sorted(tasks.items())}}


class Exchange(NamedTuple):
    """One question and its answer."""

    question: str
    answer: str
    kind: str  # relation of the fact, "arithmetic" or "greeting"
    lang: str
    fact: Fact | None = None  # None for arithmetic and greetings


def _ask(fact: Fact, template: str, language: str) -> Exchange:
    return Exchange(fact.fill(template, language), fact.statement(language), fact.relation, language, fact)


def make_exchanges(facts: Sequence[Fact], sums: Sequence[Fact], rng: random.Random) -> Iterator[Exchange]:
    """Yield all single questions: each fact in each language it is stated in, calculations, greetings."""
    for language in LANGUAGES:
        for fact in (fact for fact in facts if language in fact.stated):
            for template in rng.sample(fact.templates("questions", language), PHRASINGS):
                yield _ask(fact, template, language)
        for fact in rng.sample(sums, SUMS_ASKED):
            exchange = _ask(fact, rng.choice(fact.templates("questions", language)), language)
            yield exchange._replace(kind="arithmetic", fact=None)
        for question, answer in table("prose")["greetings"][language]:
            yield Exchange(question, answer, "greeting", language)


def conversations(exchanges: Sequence[Exchange], rng: random.Random) -> Iterator[Item]:
    """Yield the lines of chat.jsonl, in random order: every question alone, and once more within a talk."""
    talks = [[exchange] for exchange in exchanges for _ in range(3 if exchange.kind == "greeting" else 1)]
    for language in LANGUAGES:
        mine = [exchange for exchange in exchanges if exchange.lang == language and exchange.kind != "greeting"]
        greetings = [exchange for exchange in exchanges if exchange.lang == language and exchange.kind == "greeting"]
        waiting = rng.sample(mine, len(mine))
        while waiting:
            turns = [waiting.pop() for _ in range(min(len(waiting), rng.choice((2, 2, 3))))]
            last = turns[-1]
            if rng.random() < 0.25 and last.fact:
                facts = [e.fact for e in mine if e.fact and e.fact.domain == last.fact.domain and e != last]
                turns.append(_ask(rng.choice(facts), rng.choice(table("sentences")["follow_ups"][language]), language))
            if rng.random() < 0.15:
                turns.insert(0, rng.choice(greetings[:3]))
            if rng.random() < 0.1:
                turns.append(rng.choice(greetings[-2:]))
            talks.append(turns)
    rng.shuffle(talks)
    for i, turns in enumerate(talks):
        said = [pair for turn in turns for pair in (("user", turn.question), ("assistant", turn.answer))]
        messages = [{"role": role, "content": text} for role, text in said]
        kind, language = turns[0].kind if len(turns) == 1 else "talk", turns[0].lang
        yield {"id": f"{language}-chat-{i:05d}", "messages": messages, "kind": kind, "lang": language}


def preferences(exchanges: Sequence[Exchange], facts: Sequence[Fact], rng: random.Random) -> Iterator[Item]:
    """Yield the lines of preferences.jsonl: the rejected answer is false, curt, or in the other language."""
    pairs = []
    for exchange, fact in [(exchange, exchange.fact) for exchange in exchanges if exchange.fact]:
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
    for i, pair in enumerate(rng.sample(pairs, len(pairs))):
        yield {"id": f"{pair['lang']}-preference-{i:05d}", **pair}


def _choices(context: str, right: Any, wrong: Sequence[Any], rng: random.Random) -> Item:
    """Return shuffled choices of (object, words), with the index of the right one."""
    options = rng.sample([right, *wrong], 1 + len(wrong))
    objects, choices = zip(*options)
    return {"context": context, "choices": choices, "answer": options.index(right), "objects": objects}


def _fact_item(fact: Fact, forms: Sequence[int], language: str, facts: Sequence[Fact], rng: random.Random) -> Item:
    form = rng.choice([i for i in forms if i in fact.completable(language)])
    context, right, wrong = fact.choices(language, form, facts)
    choices = _choices(context, right, rng.sample(wrong, WRONG), rng)
    return {**choices, "fact": fact.id, "relation": fact.relation, "form": form}


def build_tasks(
    facts: Sequence[Fact], sums: Sequence[Fact], scenes: Sequence[Scene], exchanges: Sequence[Exchange], seed: int
) -> dict[str, list[Item]]:
    """Return the items by task; `sums` and `scenes` are the held-out ones, `exchanges` the questions of the chats."""
    tasks: dict[str, list[Item]] = {}
    for language in LANGUAGES:
        rng, items = random.Random(f"{seed}/tasks/{language}"), defaultdict[str, list[Item]](list)
        for fact in rng.sample([fact for fact in facts if language in fact.stated], FACT_ITEMS):
            items["facts"].append(_fact_item(fact, fact.used(language), language, facts, rng))
            items["facts_unseen"].append(_fact_item(fact, fact.held_out[language], language, facts, rng))
        for fact in (fact for fact in facts if language not in fact.stated):  # that only the other language states
            items["cross"].append(_fact_item(fact, fact.completable(language), language, facts, rng))
        rng = random.Random(f"{seed}/tasks/skills/{language}")
        for fact in sums:  # each in two ways in words and in digits
            for form, index in ((language, 0), (language, 1), ("digits", 0)):
                context, right, _ = fact.choices(form, index, ())
                near = [n for step in (-10, -3, -2, -1, 1, 2, 3, 10) if (n := int(fact.object) + step) >= 0]
                wrong = [(str(n), table("lexicon")["numbers"][form][n]) for n in rng.sample(near, WRONG)]
                item = {**_choices(context, right, wrong, rng), "operation": fact.relation}
                items["arithmetic"].append(item | {slot: int(fact.forms["digits"][slot]) for slot in "ab"})
        for scene in rng.sample(scenes, AGREEMENT_ITEMS):  # minimal pairs of sentences, one right and one wrong
            scene = dressed(scene, rng)
            phenomenon, error = rng.choice(sorted(scene.wrong(language).items()))
            pair = rng.sample([scene.text(language), error], 2)
            items["agreement"].append({"choices": pair, "answer": 1 - pair.index(error), "phenomenon": phenomenon})
        chosen = rng.sample([exchange for exchange in exchanges if exchange.lang == language], CHAT_ITEMS)
        items["chat"] = [{"question": each.question, "answer": each.answer, "kind": each.kind} for each in chosen]
        tasks |= {f"pocket_{kind}_{language}": of_kind for kind, of_kind in items.items()}
    return tasks
