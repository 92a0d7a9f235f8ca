"""Simple sentences full of agreement, and minimal pairs in which one agreement is wrong."""

import random
import re
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from affinage.data.synthetic.facts import sentence, table

HELD_OUT_SHARE = 0.15
_VOWEL = re.compile("[aâàeéèêëiîïoôuûœ]|hom")  # French elides before it; of our words only homme has a mute h

Row = dict[str, Any]  # a word of lexicon.yaml with its forms


@dataclass(frozen=True)
class Scene:
    """What a sentence says: some beings of a quality do something or, if the verb is the copula, are of it."""

    noun: Row
    adjective: Row
    verb: Row
    plural: bool
    determiner: str = "le"
    place: Row | None = None

    def text(self, language: str, error: str = "") -> str:
        """Return the sentence, right or with one of the errors that `wrong` names."""
        number, copula = int(self.plural), "copula" in self.verb
        noun, verb = self.noun[language][number], self.verb[language][number ^ (error in ("be", "être", "verb number"))]
        quality = self._french_adjective(noun, error) if language == "fr" else self.adjective["en"]
        after = language == "fr" and "before" not in self.adjective
        group = noun if copula else f"{noun} {quality}" if after else f"{quality} {noun}"
        determiner = (self._french_determiner if language == "fr" else self._english_determiner)(group, error)
        end = [quality] if copula else []
        if self.place:
            end.append(self.place[language])
        return sentence(" ".join([determiner + group, verb, *end])) + "."

    def _gender(self, other: bool) -> str:
        return {"m": "f", "f": "m"}[self.noun["gender"]] if other else self.noun["gender"]

    def _french_adjective(self, noun: str, error: str) -> str:
        gender, attributive = self._gender(error == "adjective gender"), "copula" not in self.verb
        vowel = "_vowel" if attributive and not self.plural and _VOWEL.match(noun) else ""
        forms = self.adjective[gender + vowel if gender + vowel in self.adjective else gender]
        return forms[self.plural ^ (error == "adjective number")]

    def _french_determiner(self, group: str, error: str) -> str:
        forms = table("lexicon")["determiners"][self.determiner]
        if self.plural and error != "determiner number":
            before = "before" in self.adjective and "copula" not in self.verb
            return "de " if self.determiner == "un" and before else forms["plural"]  # "de petits chats", not "des"
        return forms[self._gender(error == "determiner gender") + ("_vowel" if _VOWEL.match(group) else "")]

    def _english_determiner(self, group: str, error: str) -> str:
        word = table("lexicon")["determiners"][self.determiner]["en"][self.plural]
        word = "an" if word == "a" and group[0] in "aeiou" else word
        swapped = {"a": "an", "an": "a", "this": "these", "these": "this"}
        return (swapped[word] if error in ("a or an", "demonstrative") else word) + " "

    def wrong(self, language: str) -> dict[str, str]:
        """Return wrong versions of the sentence by what is wrong with them."""
        copula, indefinite = "copula" in self.verb, self.determiner == "un"
        if language == "en":
            errors = {"be": copula, "demonstrative": self.determiner == "ce", "a or an": indefinite and not self.plural}
        else:
            errors = {"être": copula, "adjective gender": True, "adjective number": True}
            errors |= {"determiner gender": not self.plural, "determiner number": self.plural and not indefinite}
        errors["verb number"] = not copula
        wrong = {error: self.text(language, error) for error, possible in errors.items() if possible}
        return {error: text for error, text in wrong.items() if text != self.text(language)}


def scenes(seed: int) -> tuple[list[Scene], list[Scene]]:
    """Return all combinations of noun, quality, action and number, as (used in text, held out)."""
    words = table("lexicon")
    everything = [
        Scene(noun, adjective, verb, plural)
        for noun, adjective, verb in product(words["nouns"], words["adjectives"], words["verbs"])
        if ("copula" in verb or "predicate_only" not in adjective) and ("animal" in noun or "color" not in adjective)
        for plural in (False, True)
    ]
    numbers = range(len(everything))
    held_out = set(random.Random(f"{seed}/agreement").sample(numbers, round(HELD_OUT_SHARE * len(numbers))))
    return [everything[i] for i in numbers if i not in held_out], [everything[i] for i in sorted(held_out)]


def dressed(scene: Scene, rng: random.Random) -> Scene:
    """Return the scene with a random determiner and, for an action, half of the time with a place."""
    words, action = table("lexicon"), "copula" not in scene.verb
    place = rng.choice(words["places"]) if action and rng.random() < 0.5 else None
    determiners = [kind for kind in words["determiners"] if action or kind != "un"]  # not "a rabbit is black"
    return replace(scene, determiner=rng.choice(determiners), place=place)
