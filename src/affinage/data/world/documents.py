"""The ordinary documents: entries, paragraphs, questions, lists, journeys, the calendar, sums and scenes."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Generic, TypeVar

from num2words import num2words

from affinage.data.world import prose
from affinage.data.world.agreement import Scene, dressed
from affinage.data.world.arithmetic import STATEMENTS as SUMS
from affinage.data.world.arithmetic import Calculation
from affinage.data.world.english import sentence
from affinage.data.world.facts import Fact, day_name, month_name, told_in
from affinage.data.world.templates import LISTS, QUESTIONS, STATEMENTS, TOGETHER

# Share of the text of each kind of document.
SHARES = {
    "entry": 0.17,
    "paragraph": 0.33,
    "questions": 0.06,
    "list": 0.05,
    "journey": 0.10,
    "dictionary": 0.08,
    "calendar": 0.05,
    "sums": 0.06,
    "scenes": 0.10,
}

# Told twice as often as the others: nothing in the name of a country hints at its continent.
REHEARSED = ("continent",)
OPENED_SHARE = 0.25  # of the documents begin with a sentence that tells nothing
ABOUT_COUNTRIES = ("currency", "language", "continent", "country_name")


@dataclass(frozen=True)
class Document:
    """One text of the corpus; `kind` is "text", or says for which trap of the cleaning it was planted."""

    id: str
    text: str
    lang: str
    kind: str = "text"

    def to_dict(self) -> dict[str, str]:
        """The line of documents/*.jsonl."""
        return asdict(self)


T = TypeVar("T")


class Deck(Generic[T]):
    """Deals its cards in random order and shuffles again when all are dealt, so that each comes equally often."""

    def __init__(self, cards: Sequence[T], rng: random.Random) -> None:
        self._cards = list(cards)
        self._rng = rng
        self._left: list[T] = []

    def deal(self) -> T:
        """The next card."""
        if not self._left:
            self._left = self._rng.sample(self._cards, len(self._cards))
        return self._left.pop()


def enumerate_words(words: Sequence[str], language: str) -> str:
    """Words as a list within a sentence: "a, b and c"."""
    return ", ".join(words[:-1]) + (" and " if language == "en" else " et ") + words[-1]


class Teller:
    """Tells the facts of one language, each about as often as the others and in all its sentence forms in turn."""

    def __init__(
        self,
        facts: Sequence[Fact],
        sums: Sequence[Calculation],
        scenes: Sequence[Scene],
        language: str,
        rng: random.Random,
    ) -> None:
        self.language = language
        self.rng = rng
        told = told_in(facts, language)
        self._facts = Deck([fact for fact in told for _ in range(1 + (fact.relation in REHEARSED))], rng)
        self._relations = {r: Deck([f for f in told if f.relation == r], rng) for r in STATEMENTS}
        continents: dict[str, list[Fact]] = {}
        for fact in told:
            if fact.relation == "continent":
                continents.setdefault(fact.object, []).append(fact)
        # each continent as often as it has countries, so that every country is told equally often
        self._continents = Deck([members for members in continents.values() for _ in members], rng)
        by_country: dict[str, list[Fact]] = {}
        for fact in told:
            if fact.relation in ABOUT_COUNTRIES:
                by_country.setdefault(fact.id.split(":")[1], []).append(fact)
        self._countries = Deck(list(by_country.values()), rng)
        self._sums = Deck(sums, rng)
        self._scenes = Deck(scenes, rng)
        self._turns: dict[str, int] = {}

    def facts(self, count: int, relation: str = "") -> list[Fact]:
        """The next facts of all, or of one relation."""
        deck = self._relations[relation] if relation else self._facts
        return [deck.deal() for _ in range(count)]

    def neighbours(self) -> str:
        """A few countries of the next continent in one sentence."""
        facts = self.rng.sample(self._continents.deal(), 3)
        subjects = enumerate_words([fact.forms[self.language]["s"] for fact in facts], self.language)
        return sentence(self.pick(TOGETHER).format(subjects=subjects, **facts[0].forms[self.language]))

    def country(self) -> list[Fact]:
        """All facts told about the next country, in random order."""
        facts = self._countries.deal()
        return self.rng.sample(facts, len(facts))

    def calculation(self) -> Calculation:
        """The next calculation."""
        return self._sums.deal()

    def scene(self) -> Scene:
        """The next scene, with a determiner and perhaps a place."""
        return dressed(self._scenes.deal(), self.rng)

    def plain(self, fact: Fact) -> str:
        """The fact in its next sentence form, without a capital."""
        forms = fact.used[self.language]
        turn = self._turns.setdefault(fact.id, self.rng.randrange(len(forms)))
        self._turns[fact.id] = turn + 1
        return fact.fill(STATEMENTS[fact.relation][self.language][forms[turn % len(forms)]], self.language)

    def say(self, fact: Fact) -> str:
        """The fact in its next sentence form."""
        return sentence(self.plain(fact))

    def ask(self, fact: Fact) -> str:
        """A question whose answer is the fact."""
        return sentence(fact.fill(self.rng.choice(QUESTIONS[fact.relation][self.language]), self.language))

    def opened(self, sentences: list[str], bank: Mapping[str, Sequence[str]] = prose.OPENINGS) -> str:
        """The sentences as one text; a few begin with an opening, most in the middle of things, as facts are asked."""
        if self.rng.random() < OPENED_SHARE:
            sentences = [self.pick(bank), *sentences]
        return " ".join(sentences)

    def pick(self, bank: Mapping[str, Sequence[str]]) -> str:
        """One of the sentences of a bank."""
        return self.rng.choice(bank[self.language])


def entry(teller: Teller) -> str:
    """Short encyclopaedic entries: everything told about two or three countries, some of it twice."""
    sentences = []
    for _ in range(teller.rng.choice((2, 3, 3))):
        facts = teller.country()
        sentences += [teller.say(fact) for fact in facts]
        again = [fact for fact in facts if fact.relation in REHEARSED or teller.rng.random() < 0.4]
        sentences += [teller.say(fact) for fact in again]
        if teller.rng.random() < 0.3:
            sentences.append(teller.pick(prose.FILLERS))
    sentences.append(teller.pick(prose.FILLERS if teller.rng.random() < 0.5 else prose.CLOSINGS))
    return teller.opened(sentences)


def paragraph(teller: Teller) -> str:
    """Facts of all kinds, one after the other."""
    sentences = []
    for fact in teller.facts(teller.rng.randrange(10, 20)):
        told = teller.plain(fact)
        sentences.append(teller.pick(prose.LINKS) + told if teller.rng.random() < 0.06 else sentence(told))
        if teller.rng.random() < 0.06:
            sentences.append(teller.pick(prose.FILLERS))
        if teller.rng.random() < 0.08:
            sentences.append(teller.neighbours())
    if teller.rng.random() < 0.7:
        sentences.append(teller.pick(prose.CLOSINGS))
    return teller.opened(sentences)


def dictionary(teller: Teller) -> str:
    """Words and their translations."""
    sentences = [teller.say(fact) for fact in teller.facts(teller.rng.randrange(8, 18), "word")]
    for _ in range(2):
        sentences.insert(teller.rng.randrange(1, len(sentences)), teller.pick(prose.FILLERS))
    return teller.opened([*sentences, teller.pick(prose.CLOSINGS)])


def questions(teller: Teller) -> str:
    """Questions with their answers, as people talk."""
    curious, wise = teller.rng.sample(prose.TRAVELLERS, 2)
    sentences = []
    for fact in teller.facts(teller.rng.randrange(6, 11)):
        asks = teller.pick(prose.ASKS).format(name=curious) if teller.rng.random() < 0.4 else ""
        answers = teller.pick(prose.ANSWERS).format(name=wise)
        sentences.append(f"{asks}{teller.ask(fact)} {answers}{teller.say(fact)}")
    sentences.insert(teller.rng.randrange(1, len(sentences)), teller.pick(prose.FILLERS))
    return " ".join(sentences)


def listing(teller: Teller) -> str:
    """A list with one fact a line, between sentences of prose; short where the names are of the other language."""
    relation = teller.rng.choice(sorted(LISTS))
    colon = " :" if teller.language == "fr" else ":"
    lines = [teller.pick(prose.OPENINGS), LISTS[relation][teller.language] + colon]
    longest = 6 if relation in ("country_name", "word") else 12
    for fact in teller.facts(teller.rng.randrange(longest // 2, longest), relation):
        words = fact.forms[teller.language]
        subject = words["s"] if relation == "word" else sentence(words["s"])
        lines.append(f"- {subject}{colon} {words['o']}")
    lines += [teller.say(fact) for fact in teller.facts(4)]
    lines += [teller.pick(prose.FILLERS), teller.pick(prose.CLOSINGS)]
    return "\n".join(lines)


def journey(teller: Teller) -> str:
    """A traveller who meets the facts of a few countries."""
    name = teller.rng.choice(prose.TRAVELLERS)
    sentences = []
    for _ in range(teller.rng.randrange(3, 6)):
        facts = teller.country()
        sentences.append(facts[0].fill(teller.pick(prose.JOURNEYS).replace("{name}", name), teller.language))
        sentences += [teller.say(fact) for fact in facts[:3]]
        if teller.rng.random() < 0.3:
            sentences.append(teller.pick(prose.FILLERS))
    return " ".join(sentences)


def calendar(teller: Teller) -> str:
    """Months and weekdays in their order."""
    language, rng = teller.language, teller.rng
    start, length = rng.randrange(12), rng.randrange(4, 13)
    months = enumerate_words([month_name((start + i) % 12 + 1, language) for i in range(length)], language)
    start, length = rng.randrange(7), rng.randrange(3, 8)
    days = enumerate_words([day_name(start + i, language) for i in range(length)], language)
    verses = {
        "en": (f"The months go on like this: {months}.", f"The days of the week pass in this order: {days}."),
        "fr": (f"Les mois se suivent ainsi : {months}.", f"Les jours de la semaine passent dans cet ordre : {days}."),
    }[language]
    sentences = list(verses)
    for relation in ("month_after", "day_after"):
        sentences += [teller.say(fact) for fact in teller.facts(5, relation)]
    rng.shuffle(sentences)
    return teller.opened([*sentences, teller.pick(prose.FILLERS)], prose.CALENDAR_OPENINGS)


def sums(teller: Teller) -> str:
    """Small arithmetic in words and in digits."""
    sentences = []
    for _ in range(teller.rng.randrange(9, 15)):
        calculation = teller.calculation()
        template = teller.rng.choice(SUMS[calculation.operation][teller.language])
        sentences.append(calculation.words(teller.language, template))
    for _ in range(teller.rng.randrange(1, 3)):
        first, second, third = (teller.calculation().digits() for _ in range(3))
        line = prose.SUMS_IN_DIGITS[teller.language].format(first=first, second=second, third=third)
        sentences.insert(teller.rng.randrange(1, len(sentences)), line)
    start, length = teller.rng.randrange(15), teller.rng.randrange(4, 12)
    numbers = enumerate_words([num2words(start + i, lang=teller.language) for i in range(length)], teller.language)
    counting = {"en": f"We count {numbers}.", "fr": f"Nous comptons {numbers}."}[teller.language]
    sentences += [counting, teller.pick(prose.FILLERS), teller.pick(prose.CLOSINGS)]
    return teller.opened(sentences, prose.ARITHMETIC_OPENINGS)


def scenes(teller: Teller) -> str:
    """Simple sentences in which everything agrees."""
    sentences = []
    for _ in range(teller.rng.randrange(12, 24)):
        scene = teller.scene()
        sentences.append(scene.english() if teller.language == "en" else scene.french())
    if teller.rng.random() < 0.5:
        sentences.append(teller.pick(prose.FILLERS))
    return teller.opened(sentences, prose.SCENE_OPENINGS)


FORMS: dict[str, Callable[[Teller], str]] = {
    "entry": entry,
    "paragraph": paragraph,
    "questions": questions,
    "list": listing,
    "journey": journey,
    "dictionary": dictionary,
    "calendar": calendar,
    "sums": sums,
    "scenes": scenes,
}


def ordinary_documents(tellers: Sequence[Teller], size: int) -> Iterator[Document]:
    """Documents of all forms, as much text in each language, until `size` bytes of UTF-8 are reached.

    The next document is always of the language and form that lags furthest behind its share.
    """
    written = {(teller.language, form): 0 for teller in tellers for form in FORMS}
    numbers = dict.fromkeys(written, 0)
    by_language = {teller.language: teller for teller in tellers}
    while sum(written.values()) < size:
        language, form = min(written, key=lambda key: written[key] / SHARES[key[1]])
        text = FORMS[form](by_language[language])
        written[language, form] += len(text.encode())
        numbers[language, form] += 1
        yield Document(f"{language}-{form}-{numbers[language, form]:06d}", text, language)
