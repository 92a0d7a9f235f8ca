"""The pocket world keeps its promises: same bytes, truth where it belongs, text that cleans well, and benchmarks of one
true choice each."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from affinage.data.language import identify_language
from affinage.data.world import french, write_world
from affinage.data.world.agreement import scenes
from affinage.data.world.arithmetic import STATEMENTS as SUMS
from affinage.data.world.arithmetic import calculations
from affinage.data.world.english import sentence
from affinage.data.world.facts import LANGUAGES, Fact, build_facts
from affinage.data.world.junk import jaccard
from affinage.data.world.templates import OBJECT_SLOTS, QUESTIONS, STATEMENTS

SEED = 3


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_world(folder, megabytes=1.0, seed=SEED)
    return folder


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_items(folder: Path, task: str) -> list[dict[str, Any]]:
    return read_lines(folder / "tasks" / f"{task}.jsonl")


@cache
def read_documents(folder: Path) -> list[dict[str, Any]]:
    return [document for path in sorted((folder / "documents").glob("*.jsonl")) for document in read_lines(path)]


@cache
def read_text(folder: Path, language: str) -> str:
    """Everything a model is trained to say in a language, lower case: documents, chats, chosen answers."""
    texts = [d["text"] for d in read_documents(folder) if d["lang"] == language]
    for chat in read_lines(folder / "chat.jsonl"):
        texts += [message["content"] for message in chat["messages"] if chat["lang"] == language]
    for pair in read_lines(folder / "preferences.jsonl"):
        texts += [pair["prompt"], pair["chosen"]] if pair["lang"] == language else []
        if pair["kind"] == "language" and pair["lang"] != language:
            texts.append(pair["rejected"])
    return "\n " + "\n ".join(texts).lower()


@cache
def facts() -> list[Fact]:
    return build_facts(SEED)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_same_arguments_same_bytes(tmp_path: Path) -> None:
    first = write_world(tmp_path / "a", megabytes=0.05, seed=1)
    write_world(tmp_path / "b", megabytes=0.1, seed=2)
    assert files(tmp_path / "a") != files(tmp_path / "b")
    assert write_world(tmp_path / "b", megabytes=0.05, seed=1) == first  # over what was there before
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_volume_and_planted_share(world: Path) -> None:
    documents = read_documents(world)
    assert sum(len(d["text"].encode()) for d in documents) == pytest.approx(1e6, rel=0.05)
    assert len({d["id"] for d in documents}) == len(documents)
    planted = [d for d in documents if d["kind"] != "text"]
    assert 0.05 < len(planted) / len(documents) < 0.08
    assert {d["kind"] for d in planted} == {"exact-duplicate", "near-duplicate", "wrong-language", "short", "junk"}
    size = {language: sum(len(d["text"]) for d in documents if d["lang"] == language) for language in LANGUAGES}
    assert size["en"] == pytest.approx(size["fr"], rel=0.05)


def test_documents_are_what_they_say_and_ordinary_ones_pass_the_cleaning(world: Path) -> None:
    documents = {d["id"]: d for d in read_documents(world)}
    passed = []
    for d in documents.values():
        text, kind = d["text"], d["kind"]
        letters = sum(map(str.isalnum, text)) / sum(not c.isspace() for c in text)
        if kind in ("exact-duplicate", "near-duplicate"):
            original = documents[d["id"].split("+")[0]]["text"]
            assert (text == original) == (kind == "exact-duplicate") and jaccard(text, original) >= 0.85
        elif kind == "short":
            assert len(text) < 100
        elif kind == "junk":
            assert len(text) >= 100 and letters < 0.1
        else:
            language, probability = identify_language(text)
            passed.append(language == d["lang"] and probability > 0.8)
            assert passed[-1] or kind == "text", d
            assert (d["lang"] in LANGUAGES) == (kind == "text"), d
            assert kind == "wrong-language" or (letters > 0.7 and 150 < len(text) < 1600), d
    assert sum(passed) / len(passed) > 0.99


ELISION = re.compile(r"\b(?:de|le|la|que|se|ce) (?=[aâeéèêiîoôuœ])(?!un\b|une\b|onze\b)|\b(?:à|de) les? (?=\w)")


def test_every_sentence_is_whole_and_french_elides_and_contracts() -> None:
    for fact in facts():
        for language in LANGUAGES:
            for template in (*STATEMENTS[fact.relation][language], *QUESTIONS[fact.relation][language]):
                text = fact.fill(template, language)
                assert text.endswith((".", "?")) and not re.search(r"[][{}|]|  ", text), text
                if language == "fr" and fact.relation not in ("word", "country_name"):  # foreign and quoted words
                    assert not ELISION.search(text), text


def test_used_forms_stand_in_text_and_held_out_ones_do_not(world: Path) -> None:
    for language in LANGUAGES:
        text = read_text(world, language)
        for fact in facts():
            told = [fact.fill(template, language).lower() for template in STATEMENTS[fact.relation][language]]
            assert not any(told[form] in text for form in fact.held_out[language])
            if language in fact.stated:
                assert sum(told[form] in text for form in fact.used[language]) >= 3, fact.id


def bare(name: str) -> str:
    return re.sub(r"^(the |les? |la |l'|d')", "", name.lower())


def whole(words: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![-\w]){re.escape(words)}(?![-\w])")


def test_facts_of_one_language_are_absent_from_the_other(world: Path) -> None:
    for language in LANGUAGES:
        text = read_text(world, language)
        sentences = re.split(r"[.?!\n]", text.replace("cfa d'afrique", "cfa"))  # a currency, not the continent
        for fact in facts():
            if language in fact.stated:
                continue
            forms = fact.forms[language]
            statements = STATEMENTS[fact.relation][language]
            assert not any(fact.fill(template, language).lower() in text for template in statements)
            if fact.relation in ("currency", "continent", "country_name"):  # nor in any other words
                subject = bare(forms["s"])
                words = {bare(forms[slot]) for slot in ("o", "os", "bare", "d") if slot in forms}
                near = [s for s in sentences if subject in s and any(word in s for word in words)]
                # "South Africa" names no continent: the words are looked for outside of the subject
                rest = [whole(subject).sub("", s) for s in near if whole(subject).search(s)]
                both = [s for s in rest if any(whole(word).search(s) for word in words)]
                assert not both, (fact.id, both[:2])


def test_held_out_calculations_and_scenes_stand_in_no_text(world: Path) -> None:
    told, held_out = calculations(SEED)
    assert not set(told) & set(held_out)
    reverse = {(c.operation, c.b, c.a) for c in held_out if c.operation != "-"}
    assert not reverse & {(c.operation, c.a, c.b) for c in told}
    shown, unseen = scenes(SEED)
    assert not {scene.key() for scene in shown} & {scene.key() for scene in unseen}
    for language in LANGUAGES:
        text = read_text(world, language)
        for calculation in held_out:
            assert f" {calculation.context} " not in text
            for template in SUMS[calculation.operation][language]:
                assert f" {calculation.words(language, template).lower()}" not in text
        for item in read_items(world, f"pocket_agreement_{language}"):
            assert item["choices"][item["answer"]].lower() not in text


def test_chats_have_one_answer_to_a_question_and_preferences_prefer_the_truth(world: Path) -> None:
    answers: dict[str, list[str]] = {}
    for chat in read_lines(world / "chat.jsonl"):
        messages = chat["messages"]
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        for question, answer in zip(messages[::2], messages[1::2], strict=True):
            answers.setdefault(question["content"], []).append(answer["content"])
    for item in (item for language in LANGUAGES for item in read_items(world, f"pocket_chat_{language}")):
        assert set(answers[item["question"]]) == {item["answer"]} and len(answers[item["question"]]) >= 2
    pairs = read_lines(world / "preferences.jsonl")
    assert {pair["kind"] for pair in pairs} == {"false", "curt", "language"}
    true = read_text(world, "en") + read_text(world, "fr")
    for pair in pairs:
        assert pair["chosen"] != pair["rejected"]
        assert pair["kind"] != "false" or pair["rejected"].lower() not in true, pair


FACT_TASKS = [f"pocket_{kind}_{language}" for kind in ("facts", "facts_unseen", "cross") for language in LANGUAGES]
SIZES = {"facts": 300, "facts_unseen": 300, "cross": 100, "arithmetic": 90, "agreement": 200, "chat": 150}


def test_all_tasks_are_there_and_seen_and_unseen_ask_the_same_facts(world: Path) -> None:
    for language in LANGUAGES:
        items = {kind: read_items(world, f"pocket_{kind}_{language}") for kind in SIZES}
        assert all(len(items[kind]) >= size for kind, size in SIZES.items())
        assert [item["fact"] for item in items["facts"]] == [item["fact"] for item in items["facts_unseen"]]


@pytest.mark.parametrize("task", FACT_TASKS)
def test_exactly_one_choice_is_true_and_not_in_one_place(world: Path, task: str) -> None:
    language = task[-2:]
    told_facts = {fact["id"]: fact for fact in json.loads((world / "facts.json").read_text(encoding="utf-8"))}
    for item in read_items(world, task):
        fact = told_facts[item["fact"]]
        truth = {fact["object"], *fact["also_true"]}
        assert [object_ in truth for object_ in item["objects"]].count(True) == 1
        assert item["objects"][item["answer"]] == fact["object"]
        assert len(set(item["choices"])) == len(set(item["objects"])) == 4
        told = french.agree(STATEMENTS[fact["relation"]][language][item["form"]], fact["plural"])
        right = item["choices"][item["answer"]]
        assert f"{item['context']} {right}." == sentence(told.format(**fact["forms"][language]))
        assert (language in fact["stated"]) == ("cross" not in task)
        if "cross" not in task:
            assert item["form"] in fact["held_out" if "unseen" in task else "used"][language]
        words = [fact["forms"][language][slot] for slot in OBJECT_SLOTS if slot in fact["forms"][language]]
        assert [choice in words for choice in item["choices"]].count(True) == 1
    answers = [item["answer"] for item in read_items(world, task)]
    assert all(0.1 < answers.count(place) / len(answers) < 0.4 for place in range(4))


@pytest.mark.parametrize("language", LANGUAGES)
def test_sums_are_right_and_agreement_pairs_differ_by_little(world: Path, language: str) -> None:
    for item in read_items(world, f"pocket_arithmetic_{language}"):
        a, b = item["a"], item["b"]
        result = str({"+": a + b, "-": a - b, "*": a * b}[item["operation"]])
        assert item["objects"].count(result) == 1 and item["objects"][item["answer"]] == result
        assert len(set(item["choices"])) == 4
    for item in read_items(world, f"pocket_agreement_{language}"):
        good, bad = item["choices"][item["answer"]].split(), item["choices"][1 - item["answer"]].split()
        if len(good) == len(bad):
            assert sum(a != b for a, b in zip(good, bad, strict=True)) == 1
        else:  # "l'âne": "les âne" has a word more
            assert "determiner" in item["phenomenon"] and (good[2:] == bad[1:] or good[1:] == bad[2:])
