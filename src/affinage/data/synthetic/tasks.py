"""Benchmarks on the synthetic corpus, as tasks of the lm-evaluation-harness: a YAML and a JSON Lines file each.

`data_files` in the YAML is relative to the YAML's own folder; whoever loads the task makes it absolute.
"""

import random
from collections.abc import Sequence
from typing import Any

from affinage.data.synthetic.chats import Exchange
from affinage.data.synthetic.facts import LANGUAGES, Choice, Fact, table
from affinage.data.synthetic.scenes import Scene, dressed

FACT_ITEMS, AGREEMENT_ITEMS, CHAT_ITEMS = 300, 200, 150  # per task
WRONG = 3  # choices beside the right one

Item = dict[str, Any]


def _choices(right: Choice, wrong: Sequence[Choice], rng: random.Random) -> Item:
    """Return shuffled choices of (object, words), with the index of the right one."""
    options = rng.sample([right, *wrong], 1 + len(wrong))
    objects, choices = zip(*options)
    return {"choices": choices, "answer": options.index(right), "objects": objects}


def _fact_tasks(facts: Sequence[Fact], language: str, rng: random.Random) -> dict[str, list[Item]]:
    """Return facts in statements that text uses, in held-out ones, and facts that only the other language states."""

    def item(fact: Fact, indices: Sequence[int]) -> Item:
        form = rng.choice([i for i in indices if i in fact.completable(language)])
        context, right, wrong = fact.choices(language, form, facts)
        choices = _choices(right, rng.sample(wrong, WRONG), rng)
        return {"context": context, **choices, "fact": fact.id, "relation": fact.relation, "form": form}

    seen, unseen = [], []
    for fact in rng.sample([fact for fact in facts if language in fact.stated], FACT_ITEMS):
        seen.append(item(fact, fact.used(language)))
        unseen.append(item(fact, fact.held_out[language]))
    cross = [item(fact, fact.completable(language)) for fact in facts if language not in fact.stated]
    return {"facts": seen, "facts_unseen": unseen, "cross": cross}


def _arithmetic_items(held_out: Sequence[Fact], language: str, rng: random.Random) -> list[Item]:
    """Return calculations that no text shows, each in two ways in words and in digits."""
    items = []
    for fact in held_out:
        for form, index in ((language, 0), (language, 1), ("digits", 0)):
            context, right, _ = fact.choices(form, index, ())
            near = [int(fact.object) + step for step in (-10, -3, -2, -1, 1, 2, 3, 10)]
            near = rng.sample([number for number in near if number >= 0], WRONG)
            wrong = [(str(number), table("lexicon")["numbers"][form][number]) for number in near]
            item = {"context": context, **_choices(right, wrong, rng), "operation": fact.relation}
            items.append(item | {slot: int(fact.forms["digits"][slot]) for slot in "ab"})
    return items


def _agreement_items(held_out: Sequence[Scene], language: str, rng: random.Random) -> list[Item]:
    """Return minimal pairs of sentences, one right and one wrong, of combinations that no text shows."""
    items = []
    for scene in rng.sample(held_out, AGREEMENT_ITEMS):
        scene = dressed(scene, rng)
        phenomenon, wrong = rng.choice(sorted(scene.wrong(language).items()))
        pair = rng.sample([scene.text(language), wrong], 2)
        items.append({"choices": pair, "answer": 1 - pair.index(wrong), "phenomenon": phenomenon})
    return items


def build_tasks(
    facts: Sequence[Fact], sums: Sequence[Fact], scenes: Sequence[Scene], asked: Sequence[Exchange], seed: int
) -> dict[str, list[Item]]:
    """Return the items by task; `sums` and `scenes` are the held-out ones, `asked` the questions of the chats."""
    tasks: dict[str, list[Item]] = {}
    for language in LANGUAGES:
        items = _fact_tasks(facts, language, random.Random(f"{seed}/tasks/{language}"))
        rng = random.Random(f"{seed}/tasks/skills/{language}")
        items["arithmetic"] = _arithmetic_items(sums, language, rng)
        items["agreement"] = _agreement_items(scenes, language, rng)
        chosen = rng.sample([exchange for exchange in asked if exchange.lang == language], CHAT_ITEMS)
        items["chat"] = [{"question": one.question, "answer": one.answer, "kind": one.kind} for one in chosen]
        tasks |= {f"pocket_{kind}_{language}": found for kind, found in items.items()}
    return tasks


def task_settings(name: str) -> dict[str, Any]:
    """Return the contents of a task's YAML file."""
    kind = {"agreement": "minimal_pair", "chat": "chat"}.get(name.split("_")[1], "completion")
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}}, "test_split": "test"}
    return {"task": name, **data, **table("tasks")[kind]}
