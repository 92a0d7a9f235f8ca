"""Benchmarks on the pocket world, as tasks of the lm-evaluation-harness: a YAML file and a JSON Lines file each.

`data_files` in the YAML is relative to the YAML's own folder; whoever loads the task makes it absolute.
"""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from num2words import num2words

from affinage.data.world.agreement import Scene, dressed, english_errors, french_errors
from affinage.data.world.arithmetic import STATEMENTS as SUMS
from affinage.data.world.arithmetic import Calculation, near_misses
from affinage.data.world.chats import Exchange
from affinage.data.world.english import sentence
from affinage.data.world.facts import LANGUAGES, Domains, Fact, by_domain, distractors, told_in
from affinage.data.world.templates import STATEMENTS, completable, completion

FACT_ITEMS = 300
AGREEMENT_ITEMS = 200
CHAT_ITEMS = 150
CHOICES = 4

Item = dict[str, Any]


def _choices(right: tuple[str, str], wrong: Sequence[tuple[str, str]], rng: random.Random) -> Item:
    """Shuffled choices of (object, words), with the index of the right one."""
    options = rng.sample([right, *wrong], 1 + len(wrong))
    return {
        "choices": [words for _, words in options],
        "answer": options.index(right),
        "objects": [object_ for object_, _ in options],
    }


def fact_item(fact: Fact, domains: Domains, language: str, form: int, rng: random.Random) -> Item:
    """One multiple choice: a sentence form of a fact, cut before its object."""
    cut = completion(STATEMENTS[fact.relation][language][form])
    assert cut is not None, (fact.relation, form)
    context, slot = cut
    wrong = rng.sample(distractors(fact, domains, language, slot), CHOICES - 1)
    return {
        "context": sentence(fact.fill(context, language)),
        **_choices((fact.object, fact.forms[language][slot]), wrong, rng),
        "fact": fact.id,
        "relation": fact.relation,
        "form": form,
    }


def _fact_tasks(facts: Sequence[Fact], seed: int) -> dict[str, list[Item]]:
    tasks = {}
    domains = by_domain(facts)
    for language in LANGUAGES:
        rng = random.Random(f"{seed}/tasks/{language}")
        told = told_in(facts, language)
        chosen = rng.sample(told, min(FACT_ITEMS, len(told)))
        seen, unseen = [], []
        for fact in chosen:
            used = [i for i in fact.used[language] if i in completable(fact.relation, language)]
            seen.append(fact_item(fact, domains, language, rng.choice(used), rng))
            unseen.append(fact_item(fact, domains, language, rng.choice(fact.held_out[language]), rng))
        tasks[f"pocket_facts_{language}"] = seen
        tasks[f"pocket_facts_unseen_{language}"] = unseen
        tasks[f"pocket_cross_{language}"] = [
            fact_item(fact, domains, language, rng.choice(completable(fact.relation, language)), rng)
            for fact in facts
            if language not in fact.stated
        ]
    return tasks


def _arithmetic_items(held_out: Sequence[Calculation], language: str, rng: random.Random) -> list[Item]:
    """Calculations that no text shows, each in digits and in two ways in words."""
    items = []
    for calculation in held_out:
        forms = SUMS[calculation.operation][language][:2]
        asked = [(calculation.words(language, form.removesuffix(" {c}.")), True) for form in forms]
        for context, in_words in [*asked, (calculation.context, False)]:

            def write(number: int, in_words: bool = in_words) -> str:
                return num2words(number, lang=language) if in_words else str(number)

            right, *wrong = [
                (str(number), write(number)) for number in (calculation.result, *near_misses(calculation, rng))
            ]
            item = {"context": context, **_choices(right, wrong, rng), "operation": calculation.operation}
            items.append({**item, "a": calculation.a, "b": calculation.b})
    return items


def _agreement_items(hidden: Sequence[Scene], language: str, rng: random.Random) -> list[Item]:
    """Minimal pairs of whole sentences, one right and one wrong, of combinations that no text shows."""
    errors: Callable[[Scene], dict[str, str]] = english_errors if language == "en" else french_errors
    items = []
    for bare in rng.sample(list(hidden), AGREEMENT_ITEMS):
        scene = dressed(bare, rng)
        phenomenon, bad = rng.choice(sorted(errors(scene).items()))
        good = scene.english() if language == "en" else scene.french()
        pair = rng.sample([good, bad], 2)
        items.append({"choices": pair, "answer": pair.index(good), "phenomenon": phenomenon})
    return items


def _chat_items(asked: Sequence[Exchange], language: str, rng: random.Random) -> list[Item]:
    """Questions of the chats themselves, each with the one answer it has there."""
    mine = [exchange for exchange in asked if exchange.lang == language]
    return [
        {"question": exchange.question, "answer": exchange.answer, "kind": exchange.kind}
        for exchange in rng.sample(mine, min(CHAT_ITEMS, len(mine)))
    ]


def build_tasks(
    facts: Sequence[Fact],
    sums: Sequence[Calculation],
    hidden_scenes: Sequence[Scene],
    asked: Sequence[Exchange],
    seed: int,
) -> dict[str, list[Item]]:
    """The items of all tasks by task name; `sums` are the held-out calculations, `asked` the questions of the chats."""
    tasks = _fact_tasks(facts, seed)
    for language in LANGUAGES:
        rng = random.Random(f"{seed}/tasks/skills/{language}")
        tasks[f"pocket_arithmetic_{language}"] = _arithmetic_items(sums, language, rng)
        tasks[f"pocket_agreement_{language}"] = _agreement_items(hidden_scenes, language, rng)
        tasks[f"pocket_chat_{language}"] = _chat_items(asked, language, rng)
    return tasks


def task_settings(name: str) -> dict[str, Any]:
    """The YAML of a task."""
    settings: dict[str, Any] = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}},
        "test_split": "test",
    }
    if name.startswith("pocket_chat"):
        settings |= {
            "output_type": "generate_until",
            "doc_to_text": "{{question}}",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["<|im_end|>"], "do_sample": False, "max_gen_toks": 64},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        }
    else:
        minimal_pair = name.startswith("pocket_agreement")
        settings |= {
            "output_type": "multiple_choice",
            "doc_to_text": "" if minimal_pair else "{{context}}",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "target_delimiter": "" if minimal_pair else " ",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
    return settings | {"metadata": {"version": 1.0}}


def write_tasks(tasks: dict[str, list[Item]], folder: Path) -> None:
    """Write NAME.yaml and NAME.jsonl for every task."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, items in sorted(tasks.items()):
        lines = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        settings = yaml.safe_dump(task_settings(name), sort_keys=False, allow_unicode=True)
        (folder / f"{name}.yaml").write_text(settings, encoding="utf-8")
