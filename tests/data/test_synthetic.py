"""The synthetic corpus: same bytes for the same seed, true facts, text that cleans well, benchmarks without leaks."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from affinage.data.filters import identify_language
from affinage.data.synthetic import write_world
from affinage.data.synthetic.documents import jaccard
from affinage.data.synthetic.facts import LANGUAGES, Fact, Scene, build_facts, calculations, scenes, table
from affinage.evaluation.harness import load_tasks, quiet
from affinage.evaluation.tasks import find_tasks, is_chat
from run_affinage import refused
from source_forms import bytes_of

SEED = 3
OBJECT_SLOTS = ("o", "os", "bare", "d")


class World:
    """What was written, and the facts from the same seed."""

    def __init__(self, folder: Path) -> None:
        write_world(folder, megabytes=1.0, seed=SEED)
        self.folder, self.facts = folder, build_facts(SEED)
        self.documents = [line for part in range(4) for line in self.lines(f"documents/part-{part}")]
        self.chats, self.pairs = self.lines("chat"), self.lines("preferences")
        self.text = {language: self._text(language) for language in LANGUAGES}

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / f"{name}.jsonl").read_text("utf-8").splitlines()]

    def _text(self, language: str) -> str:
        """Everything a model is trained to write in a language, lower case: documents, chats, chosen answers."""
        texts = [d["text"] for d in self.documents if d["lang"] == language]
        texts += [m["content"] for chat in self.chats if chat["lang"] == language for m in chat["messages"]]
        for pair in self.pairs:
            texts += [pair["prompt"], pair["chosen"]] if pair["lang"] == language else []
            texts += [pair["rejected"]] if pair["kind"] == "language" and pair["lang"] != language else []
        return "\n " + "\n ".join(texts).lower()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def statements(fact: Fact, language: str) -> list[str]:
    return [fact.statement(language, i) for i in range(len(fact.templates("statements", language)))]


def test_same_arguments_same_bytes(tmp_path: Path) -> None:
    first = write_world(tmp_path / "a", megabytes=0.05, seed=1)
    write_world(tmp_path / "b", megabytes=0.3, seed=8)  # in which a continent has two countries
    assert bytes_of(tmp_path / "a") != bytes_of(tmp_path / "b")
    assert write_world(tmp_path / "b", megabytes=0.05, seed=1) == first  # over what was there before
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")


def test_ordinary_documents_pass_the_filters_and_planted_ones_have_their_defect(world: World) -> None:
    documents = {d["id"]: d for d in world.documents}
    assert sum(len(d["text"].encode()) for d in documents.values()) == pytest.approx(1e6, rel=0.05)
    passed = []
    for d in documents.values():
        text, kind = d["text"], d["kind"]
        letters = sum(map(str.isalnum, text)) / sum(not c.isspace() for c in text)
        if kind in ("exact-duplicate", "near-duplicate"):
            original = documents[d["id"].split("+")[0]]["text"]
            assert (text == original) == (kind == "exact-duplicate") and jaccard(text, original) >= 0.85
        elif kind in ("short", "junk"):
            assert len(text) < 100 if kind == "short" else letters < 0.1
        else:
            language, probability = identify_language(text)
            passed.append(language == d["lang"] and probability > 0.8)
            assert (d["lang"] in LANGUAGES) == (kind == "text"), d
    assert sum(passed) / len(passed) > 0.99
    assert 0.05 < sum(d["kind"] != "text" for d in documents.values()) / len(documents) < 0.08


def whole(words: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![-\w]){re.escape(words)}(?![-\w])")


def test_text_states_facts_in_used_statements_alone_and_those_of_one_language_in_no_other(world: World) -> None:
    for language in LANGUAGES:
        text = world.text[language]
        sentences = re.split(r"[.?!\n]", text.replace("cfa d'afrique", "cfa"))  # a currency, not the continent
        for fact in world.facts:
            forms = [form.lower() for form in statements(fact, language)]
            assert not any(forms[i] in text for i in fact.held_out[language])
            if language in fact.stated:
                assert sum(forms[i] in text for i in fact.used(language)) >= 3, fact.id
                continue
            assert not any(form in text for form in forms)
            if fact.relation in ("currency", "continent", "country_name"):  # nor in any other words
                without_article = partial(re.sub, r"^(the |les |le |la |l')", "")
                forms = {slot: without_article(words.lower()) for slot, words in fact.forms[language].items()}
                subject = forms["s"]
                words = {forms[slot].removeprefix("d'") for slot in OBJECT_SLOTS if slot in forms}
                near = [s for s in sentences if subject in s and any(word in s for word in words)]
                # "South Africa" names no continent: the words are looked for outside of the subject
                rest = [whole(subject).sub("", s) for s in near if whole(subject).search(s)]
                assert not [s for s in rest if any(whole(word).search(s) for word in words)], fact.id


def test_held_out_calculations_and_scenes_are_in_no_text(world: World) -> None:
    used, held_out = calculations(SEED)
    hidden = {fact.id for fact in held_out}
    for fact in used:
        a, operation, b = fact.id.split()
        assert not {fact.id, fact.id if operation == "-" else f"{b} {operation} {a}"} & hidden
    seen, unseen = ([(s.noun["en"], s.adjective["en"], s.verb["en"], s.plural) for s in part] for part in scenes(SEED))
    assert not [scene for scene in unseen if scene in seen]
    for language in LANGUAGES:
        text = world.text[language]
        for fact in held_out:
            assert f" {fact.choices('digits', 0, ())[0]} " not in text
            assert not any(f" {statement.lower()}" in text for statement in statements(fact, language))
        for item in world.lines(f"tasks/pocket_agreement_{language}"):
            assert item["choices"][item["answer"]].lower() not in text


def test_chats_have_one_answer_to_a_question_and_preferences_prefer_the_truth(world: World) -> None:
    answers: dict[str, list[str]] = {}
    for chat in world.chats:
        messages = chat["messages"]
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        for question, answer in zip(messages[::2], messages[1::2], strict=True):
            answers.setdefault(question["content"], []).append(answer["content"])
    for item in [*world.lines("tasks/pocket_chat_en"), *world.lines("tasks/pocket_chat_fr")]:
        assert set(answers[item["question"]]) == {item["answer"]} and len(answers[item["question"]]) >= 2
    assert {pair["kind"] for pair in world.pairs} == {"false", "curt", "language"}
    for pair in world.pairs:
        assert pair["chosen"] != pair["rejected"]
        true = any(pair["rejected"].lower() in text for text in world.text.values())
        assert pair["kind"] != "false" or not true, pair


SIZES = {"facts": 300, "facts_unseen": 300, "cross": 100, "arithmetic": 90, "agreement": 200, "chat": 150}


@pytest.mark.parametrize("language", LANGUAGES)
def test_all_tasks_are_there_and_exactly_one_choice_is_true(world: World, language: str) -> None:
    items = {kind: world.lines(f"tasks/pocket_{kind}_{language}") for kind in SIZES}
    assert all(len(items[kind]) >= size for kind, size in SIZES.items())
    assert [item["fact"] for item in items["facts"]] == [item["fact"] for item in items["facts_unseen"]]
    by_id = {fact["id"]: Fact(**fact) for fact in world.lines("facts")}
    for kind in ("facts", "facts_unseen", "cross"):
        for item in items[kind]:
            fact = by_id[item["fact"]]
            assert [key in (fact.object, *fact.also_true) for key in item["objects"]].count(True) == 1
            assert item["objects"][item["answer"]] == fact.object
            assert len(set(item["choices"])) == len(set(item["objects"])) == 4
            right = item["choices"][item["answer"]]
            assert f"{item['context']} {right}." == fact.statement(language, item["form"])
            assert (language in fact.stated) == (kind != "cross")
            if kind != "cross":
                assert (item["form"] in fact.held_out[language]) == (kind == "facts_unseen")
            words = [words for slot, words in fact.forms[language].items() if slot in OBJECT_SLOTS]
            assert [choice in words for choice in item["choices"]].count(True) == 1
        answers = [item["answer"] for item in items[kind]]
        assert all(0.1 < answers.count(place) / len(answers) < 0.4 for place in range(4))
    for item in items["arithmetic"]:
        a, b = item["a"], item["b"]
        result = str({"+": a + b, "-": a - b, "*": a * b}[item["operation"]])
        assert item["objects"].count(result) == 1 and item["objects"][item["answer"]] == result
        assert len(set(item["choices"])) == 4
    for item in items["agreement"]:
        good, bad = item["choices"][item["answer"]].split(), item["choices"][1 - item["answer"]].split()
        if len(good) == len(bad):
            assert sum(a != b for a, b in zip(good, bad, strict=True)) == 1
        else:  # "l'âne": "les âne" has a word more
            assert "determiner" in item["phenomenon"] and (good[2:] == bad[1:] or good[1:] == bad[2:])


def test_each_task_loads_by_its_name_and_a_choice_follows_its_context_and_one_space(world: World) -> None:
    names = {f"pocket_{kind}_{language}" for kind in SIZES for language in LANGUAGES}
    assert {task["task"] for task in find_tasks(["quickstart"], world=world.folder)[0]} == names
    found, _ = find_tasks(["pocket_chat_fr", "piqa", "pocket_agreement_en"], world=world.folder)
    assert [task["task"] for task in found] == ["pocket_chat_fr", "piqa", "pocket_agreement_en"]
    assert found[1] == {"task": "piqa"} and list(map(is_chat, found)) == [True, False, False]
    refused(find_tasks, ["pocket_agreement_en"])
    with quiet():
        (loaded,) = load_tasks(find_tasks(["pocket_facts_en"], world=world.folder)[0]).values()
        loaded.build_all_requests(limit=1)
    item = world.lines("tasks/pocket_facts_en")[0]
    asked = [request.args for request in loaded.instances]
    assert asked == [(item["context"], " " + choice) for choice in item["choices"]]


# ---- the grammar, against phrases checked by hand ----


def scene(noun: str, adjective: str, verb: str, plural: bool, determiner: str = "le", place: str = "") -> Scene:
    def row(kind: str, english: str) -> Any:
        return next((row for row in table("lexicon")[kind] if english in (row["en"], row["en"][0])), None)

    words = row("nouns", noun), row("adjectives", adjective), row("verbs", verb)
    return Scene(*words, plural, determiner, row("places", place))


CATS, GOAT = scene("cat", "small", "sleeps", True), scene("goat", "old", "runs", False, "un", "in the garden")
SUMS = {fact.id: fact.statement for part in calculations(0) for fact in part}


@pytest.mark.parametrize(("of", "en", "fr"), [
    (CATS.text, "The small cats sleep.", "Les petits chats dorment."),
    (scene("cow", "white", "eats", True, "un").text, "Some white cows eat.", "Des vaches blanches mangent."),
    (scene("cat", "small", "eats", True, "un").text, "Some small cats eat.", "De petits chats mangent."),
    (scene("man", "old", "is", False, "ce").text, "This man is old.", "Cet homme est vieux."),
    (scene("bird", "old", "eats", False, "un").text, "An old bird eats.", "Un vieil oiseau mange."),
    (scene("aunt", "active", "waits", False, "mon").text, "My active aunt waits.", "Ma tante active attend."),
    (scene("horse", "strong", "comes back", True, "le", "in the garden").text,
     "The strong horses come back in the garden.", "Les chevaux forts reviennent dans le jardin."),
    (SUMS["1 * 4"], "One times four is four.", "Une fois quatre égale quatre."),
    (SUMS["8 * 10"], "Eight times ten is eighty.", "Huit fois dix égale quatre-vingts."),
    (SUMS["12 - 5"], "Twelve minus five is seven.", "Douze moins cinq égale sept."),
])  # fmt: skip
def test_sentences_in_both_languages(of: Any, en: str, fr: str) -> None:
    assert (of("en"), of("fr")) == (en, fr)
    assert SUMS["7 + 5"]("digits") == "7 + 5 = 12"
    assert all(len(set(table("lexicon")["numbers"][form])) == 111 for form in (*LANGUAGES, "digits"))


def test_minimal_pairs_break_one_agreement() -> None:
    assert CATS.wrong("en") == {"verb number": "The small cats sleeps."}
    assert CATS.wrong("fr") == {
        "verb number": "Les petits chats dort.",
        "determiner number": "Le petits chats dorment.",
        "adjective gender": "Les petites chats dorment.",
        "adjective number": "Les petit chats dorment.",
    }
    errors = {"verb number": "An old goat run in the garden.", "a or an": "A old goat runs in the garden."}
    assert GOAT.wrong("en") == errors
    assert GOAT.wrong("fr")["determiner gender"] == "Un vieille chèvre court dans le jardin."
    assert GOAT.wrong("fr")["adjective gender"] == "Une vieux chèvre court dans le jardin."
