"""Simple sentences full of agreement, and minimal pairs that differ in one agreement."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

from affinage.data.world import english
from affinage.data.world.french import Gender, determiner, elides
from affinage.data.world.lexicon import ADJECTIVES, NOUNS, PLACES, PREDICATE_ONLY, VERBS, Adjective, Noun, Verb

DETERMINERS = {"le": ("the", "the"), "un": ("a", "some"), "ce": ("this", "these"), "mon": ("my", "my")}
HELD_OUT_SHARE = 0.15


@dataclass(frozen=True)
class Scene:
    """What a sentence says: some beings of a quality do something, or (without a verb) are of that quality."""

    noun: Noun
    adjective: Adjective
    verb: Verb | None
    plural: bool
    kind: str = "le"  # of determiner
    place: int | None = None  # index into PLACES

    def key(self) -> tuple[str, str, str, bool]:
        """What makes it the same combination in both languages, whatever the determiner and the place."""
        return (self.noun.en, self.adjective.en, self.verb.en if self.verb else "be", self.plural)

    def english(self) -> str:
        """The sentence in English."""
        return " ".join(self.english_words())

    def english_words(self) -> list[str]:
        """Determiner, noun group, verb group and place, to be joined by spaces."""
        noun = self.noun.en_plural if self.plural else self.noun.en
        group = noun if self.verb is None else f"{self.adjective.en} {noun}"
        word = DETERMINERS[self.kind][int(self.plural)]
        if word == "a":
            word = english.a(group).split()[0]
        if self.verb is None:
            predicate = f"{'are' if self.plural else 'is'} {self.adjective.en}"
        else:
            predicate = self.verb.en_plural if self.plural else self.verb.en
        return _sentence([word, group, predicate], None if self.place is None else PLACES[self.place][0])

    def french(self) -> str:
        """The sentence in French."""
        return self.french_with()

    def french_with(
        self,
        *,
        article: Callable[[str], str] | None = None,
        adjective: str | None = None,
        predicate: str | None = None,
    ) -> str:
        """The sentence in French, parts replaced by wrong ones for the minimal pairs."""
        noun = self.noun.fr_plural if self.plural else self.noun.fr
        quality = adjective or self._french_adjective(noun)
        if self.verb is None:
            group = noun
            action = f"{predicate or ('sont' if self.plural else 'est')} {quality}"
        else:
            group = f"{quality} {noun}" if self.adjective.before else f"{noun} {quality}"
            action = predicate or (self.verb.fr_plural if self.plural else self.verb.fr)
        word = (article or self._french_article)(group.split()[0])
        return " ".join(_sentence([word + group, action], None if self.place is None else PLACES[self.place][1]))

    def _french_article(self, following: str) -> str:
        if self.kind == "un" and self.plural and self.verb is not None and self.adjective.before:
            return "de "  # "de petits chats", not "des petits chats"
        return determiner(self.kind, following, self.noun.gender, self.plural)

    def _french_adjective(self, noun: str) -> str:
        adjective = self.adjective
        before_vowel = adjective.before_vowel and self.verb is not None and not self.plural
        if before_vowel and self.noun.gender == "m" and (elides(noun) or noun.startswith("hom")):
            return adjective.before_vowel
        return adjective.french(self.noun.gender, self.plural)


def _sentence(words: list[str], place: str | None) -> list[str]:
    words = [*words, place] if place else words
    return [english.sentence(words[0]), *words[1:-1], words[-1] + "."]


def scenes(seed: int) -> tuple[list[Scene], list[Scene]]:
    """All combinations of noun, quality, action and number, as (told, held out)."""
    everything = [
        Scene(noun, adjective, verb, plural)
        for noun, adjective, verb, plural in product(NOUNS, ADJECTIVES, (None, *VERBS), (False, True))
        if (verb is None or adjective.en not in PREDICATE_ONLY) and (noun.animal or not adjective.colour)
    ]
    hidden = random.Random(f"{seed}/agreement").sample(range(len(everything)), round(HELD_OUT_SHARE * len(everything)))
    chosen = set(hidden)
    told = [scene for i, scene in enumerate(everything) if i not in chosen]
    return told, [everything[i] for i in sorted(chosen)]


def dressed(scene: Scene, rng: random.Random) -> Scene:
    """The scene with a determiner drawn at random, and an action half of the time with a place."""
    kinds = [kind for kind in DETERMINERS if scene.verb or kind != "un"]  # not "a rabbit is black"
    place = rng.randrange(len(PLACES)) if scene.verb and rng.random() < 0.5 else None
    return replace(scene, kind=rng.choice(kinds), place=place)


def english_errors(scene: Scene) -> dict[str, str]:
    """Wrong versions of the English sentence, by what is wrong with them."""
    words = scene.english_words()
    first, rest = words[0], words[1:]
    wrong: dict[str, str] = {}
    if scene.verb is None:
        wrong["be"] = replace(scene, plural=not scene.plural).english_words()[2]
    else:
        wrong["verb number"] = replace(scene, plural=not scene.plural).english_words()[2]
    errors = {what: " ".join([first, words[1], form, *words[3:]]) for what, form in wrong.items()}
    swap = {"This": "These", "These": "This", "A": "An", "An": "A"}
    if first in swap:
        errors["a or an" if first in ("A", "An") else "demonstrative"] = " ".join([swap[first], *rest])
    return errors


def french_errors(scene: Scene) -> dict[str, str]:
    """Wrong versions of the French sentence, by what is wrong with them."""
    noun, adjective, verb = scene.noun, scene.adjective, scene.verb
    errors: dict[str, str] = {}
    if verb is None:
        errors["être"] = scene.french_with(predicate="est" if scene.plural else "sont")
    else:
        errors["verb number"] = scene.french_with(predicate=verb.fr if scene.plural else verb.fr_plural)
    other: Gender = "f" if noun.gender == "m" else "m"
    if not scene.plural:
        errors["determiner gender"] = scene.french_with(
            article=lambda following: determiner(scene.kind, following, other, False)
        )
    elif scene.kind != "un":
        errors["determiner number"] = scene.french_with(
            article=lambda following: determiner(scene.kind, following, noun.gender, False)
        )
    errors["adjective gender"] = scene.french_with(adjective=adjective.french(other, scene.plural))
    errors["adjective number"] = scene.french_with(adjective=adjective.french(noun.gender, not scene.plural))
    right = scene.french()
    return {what: sentence for what, sentence in errors.items() if sentence != right}
