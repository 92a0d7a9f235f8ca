"""What is true in the synthetic corpus: facts and calculations, and scenes full of agreement, worded in both languages.

A part of them, and of the sentences that state them, is held out: no text has it, and benchmarks ask for it.
"""

import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from itertools import product
from typing import Any

import yaml

LANGUAGES = ("en", "fr")
ONE_LANGUAGE_SHARE = 0.15  # of the facts are stated in English text only, and as many in French text only
STATED_IN_BOTH = ("month_after", "day_after")  # any list of the months would state them
HELD_OUT_STATEMENTS = 2  # per fact and language: no text uses them; never the first, which answers questions
HELD_OUT_CALCULATIONS = 0.12
LARGEST_OPERANDS = {"+": 12, "-": 12, "*": 10}  # few enough for a small model to see each calculation often
HELD_OUT_SCENES = 0.15
_VOWEL = re.compile("[aâàeéèêëiîïoôuûœ]|hom")  # French elides before it; of our words only homme has a mute h

Choice = tuple[str, str]  # an object and its words
Row = dict[str, Any]  # a word of lexicon.yaml with its forms
Agreement = tuple[str, bool]  # gender, and whether it is a plural


@cache
def table(name: str) -> dict[str, Any]:
    """Return the contents of the file NAME.yaml beside this module, which is read once."""
    return yaml.safe_load((files(__package__) / f"{name}.yaml").read_text(encoding="utf-8"))


def sentence(text: str) -> str:
    """Return the text with a capital at its beginning, the rest untouched; right for French too."""
    return text[0].upper() + text[1:]


@dataclass(frozen=True)
class Fact:
    """One true fact; `forms[language][slot]` are its words for the slots of a sentence.

    For translations the subject is a word of the language of the sentence and the object its translation.
    """

    id: str
    relation: str
    domain: str  # facts of one domain have objects that can stand in for each other
    object: str
    forms: dict[str, dict[str, str]]
    plural: bool = False  # the French subject is a plural
    also_true: Sequence[str] = ()  # objects that are not the fact's own and yet not false
    stated: Sequence[str] = LANGUAGES  # languages whose text states it
    held_out: dict[str, list[int]] = field(default_factory=dict)  # indices of statements by language

    def fill(self, template: str, language: str, opening: str = "") -> str:
        """Return a template with this fact's words, with a capital; "[est|sont]" agrees with the subject."""
        agreed = re.sub(r"\[(.*?)\|(.*?)\]", r"\2" if self.plural else r"\1", template)
        return sentence(opening + agreed.format(**self.forms[language]))

    def templates(self, kind: str, language: str) -> list[str]:
        """Return the templates of its "statements" or "questions"."""
        return table("sentences")[kind][self.relation][language]

    def statement(self, language: str, index: int = 0, opening: str = "") -> str:
        """Return one of the sentences that state the fact; the first one answers all questions."""
        return self.fill(self.templates("statements", language)[index], language, opening)

    def used(self, language: str) -> list[int]:
        """Return the indices of the statements that are not held out."""
        return [i for i in range(len(self.templates("statements", language))) if i not in self.held_out[language]]

    def completable(self, language: str) -> range:
        """Return the indices of the statements that end in their object: all but the last two."""
        return range(len(self.templates("statements", language)) - 2)

    def choices(self, language: str, index: int, facts: Iterable["Fact"]) -> tuple[str, Choice, list[Choice]]:
        """Cut a completable statement before its object: the beginning, the object, objects false of this fact."""
        context, _, slot = self.templates("statements", language)[index].rpartition(" {")
        slot = slot.rstrip("}.")
        right = (self.object, self.forms[language][slot])
        others = {(other.object, other.forms[language][slot]) for other in facts if other.domain == self.domain}
        wrong = [(key, words) for key, words in others - {right} if key not in self.also_true and words != right[1]]
        return self.fill(context, language), right, sorted(wrong)


def grouped(facts: Iterable[Fact], key: Callable[[Fact], str]) -> dict[str, list[Fact]]:
    """Return the facts by key, keys and facts in their order of appearance."""
    groups: dict[str, list[Fact]] = defaultdict(list)
    for fact in facts:
        groups[key(fact)].append(fact)
    return groups


def build_facts(seed: int) -> list[Fact]:
    """Return all facts, each with the languages it is stated in and the statements held out for it."""
    facts = []
    for subject in table("facts")["subjects"]:
        other_name = {"en": {"o": subject["fr"]["s"]}, "fr": {"o": subject["en"]["s"]}}  # country_name and words
        for domain, object_ in subject["facts"].items():
            words = table("facts")["objects"].get(domain, {}).get(object_, other_name)
            forms = {language: subject[language] | words[language] for language in LANGUAGES}
            also_true = subject.get("also_true", {}).get(domain, ())
            id_, relation, plural = f"{domain}:{subject['key']}", domain.split("/")[0], subject.get("plural", False)
            facts.append(Fact(id_, relation, domain, object_, forms, plural, also_true))
    rng = random.Random(f"{seed}/facts")
    stated: dict[str, Sequence[str]] = {}
    for domain, members in sorted(grouped(facts, lambda fact: fact.domain).items()):
        if domain not in STATED_IN_BOTH:
            rng.shuffle(members)
            share = round(ONE_LANGUAGE_SHARE * len(members))
            stated |= {fact.id: (x,) for i, x in enumerate(LANGUAGES) for fact in members[i * share :][:share]}
    for i, fact in enumerate(facts):
        held_out = {x: sorted(rng.sample(fact.completable(x)[1:], HELD_OUT_STATEMENTS)) for x in LANGUAGES}
        facts[i] = replace(fact, stated=stated.get(fact.id, LANGUAGES), held_out=held_out)
    return facts


def calculations(seed: int) -> tuple[list[Fact], list[Fact]]:
    """Return all calculations as (used in text, held out); a + b and b + a are held out together, so are products."""
    rng, parts = random.Random(f"{seed}/arithmetic"), (list[Fact](), list[Fact]())
    for operation, largest in LARGEST_OPERANDS.items():
        pairs = [(a, b) for a in range(largest + 1) for b in range(a + 1)]
        held_out = rng.sample(pairs, round(HELD_OUT_CALCULATIONS * len(pairs)))
        for pair in pairs:
            for a, b in sorted({pair} if operation == "-" else {pair, pair[::-1]}):
                result = {"+": a + b, "-": a - b, "*": a * b}[operation]
                forms = {
                    language: {"a": words[a], "b": words[b], "c": words[result], "once": {1: "une"}.get(a, words[a])}
                    for language, words in table("lexicon")["numbers"].items()
                }
                fact = Fact(f"{a} {operation} {b}", operation, "arithmetic", str(result), forms)
                parts[pair in held_out].append(fact)
    return parts


@dataclass(frozen=True)
class Scene:
    """What a sentence says: some beings of a quality do something or, if the verb is the copula, are of it."""

    noun: Row
    adjective: Row
    verb: Row
    plural: bool
    determiner: str = "le"
    place: Row | None = None

    def text(self, language: str, **errors: Agreement) -> str:
        """Return the sentence; `errors` are agreements of its verb, adjective or determiner with another noun."""
        right: Agreement = (self.noun["gender"], self.plural)
        agreed = dict.fromkeys(("verb", "adjective", "determiner"), right) | errors
        copula, noun = "copula" in self.verb, self.noun[language][self.plural]
        before, quality = True, self.adjective["en"]
        if language == "fr":
            gender, plural = agreed["adjective"]
            elided = not copula and not self.plural and _VOWEL.match(noun)
            before, forms = "before" in self.adjective, self.adjective.get(f"{gender}_vowel" if elided else gender)
            quality = (forms or self.adjective[gender])[plural]
        group = noun if copula else f"{quality} {noun}" if before else f"{noun} {quality}"
        gender, plural = agreed["determiner"]
        vowel = "_vowel" if bool(_VOWEL.match(group)) != ("vowel" in errors) else ""
        determiner = table("lexicon")["determiners"][self.determiner][language]["plural" if plural else gender + vowel]
        if determiner == "des " and before and not copula:  # "de petits chats"
            determiner = "de "
        verb, place = self.verb[language][agreed["verb"][1]], self.place[language] if self.place else ""
        return sentence(" ".join(filter(None, (determiner + group, verb, quality if copula else "", place)))) + "."

    def wrong(self, language: str) -> dict[str, str]:
        """Return wrong versions of the sentence by what is wrong with them."""
        gender, other_gender = self.noun["gender"], {"m": "f", "f": "m"}[self.noun["gender"]]
        agreements = {"number": (gender, not self.plural), "gender": (other_gender, self.plural)}
        numbered = self.determiner == "ce" if language == "en" else self.plural and self.determiner != "un"
        errors = {self.verb.get("copula", {}).get(language, "verb number"): ["verb", "number"]}
        wrong = {
            name: self.text(language, **{part: agreements[agreement]})
            for name, (part, agreement) in {**errors, **table("lexicon")["errors"][language]}.items()
            if numbered or [part, agreement] != ["determiner", "number"]
        }
        return {name: text for name, text in wrong.items() if text != self.text(language)}


def scenes(seed: int) -> tuple[list[Scene], list[Scene]]:
    """Return all combinations of noun, quality, action and number, as (used in text, held out)."""
    words = table("lexicon")
    everything = [
        Scene(noun, adjective, verb, plural)
        for noun, adjective, verb in product(words["nouns"], words["adjectives"], words["verbs"])
        if ("copula" in verb or "predicate_only" not in adjective) and ("animal" in noun or "color" not in adjective)
        for plural in (False, True)
    ]
    size, parts = round(HELD_OUT_SCENES * len(everything)), (list[Scene](), list[Scene]())
    held_out = set(random.Random(f"{seed}/agreement").sample(range(len(everything)), size))
    for i, scene in enumerate(everything):
        parts[i in held_out].append(scene)
    return parts


def dressed(scene: Scene, rng: random.Random) -> Scene:
    """Return the scene with a random determiner and, for an action, half of the time with a place."""
    words, action = table("lexicon"), "copula" not in scene.verb
    place = rng.choice(words["places"]) if action and rng.random() < 0.5 else None
    determiners = [kind for kind in words["determiners"] if action or kind != "un"]  # not "a rabbit is black"
    return replace(scene, determiner=rng.choice(determiners), place=place)
