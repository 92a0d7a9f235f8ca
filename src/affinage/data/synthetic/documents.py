"""The documents: ordinary text, and what is planted in it for the cleaning steps to find."""

import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from affinage.data.synthetic.facts import LANGUAGES, Fact, Scene, dressed, grouped, sentence, table

ABOUT_COUNTRIES = ("currency", "language", "continent", "country_name")
REHEARSED = "continent"  # stated twice as often as the others: nothing in a country's name hints at its continent
OPENED_SHARE = 0.25  # of the documents of a kind that has openings; most begin in the middle, as facts are asked
NEAR_JACCARD = 0.85  # of word 5-grams: above the usual threshold of 0.8 with room for another way to cut words


class Document(NamedTuple):
    """One text of the corpus; `kind` is "text", or the defect with which it was planted."""

    id: str
    text: str
    lang: str
    kind: str = "text"


def _deal(cards: Sequence[Any], rng: random.Random) -> Iterator[Any]:
    """Yield the cards in random order, again and again, so that each comes equally often."""
    while True:
        yield from reversed(rng.sample(cards, len(cards)))


class Writer:
    """Writes text of one language that states each fact about equally often and in all its statements in turn."""

    def __init__(self, language: str, facts: list[Fact], sums: list[Fact], scenes: list[Scene], seed: int) -> None:
        self.language, self.rng = language, random.Random(f"{seed}/documents/{language}")
        stated = [fact for fact in facts if language in fact.stated]
        relations = grouped(stated, lambda fact: fact.relation)
        countries = grouped([f for f in stated if f.relation in ABOUT_COUNTRIES], lambda fact: fact.id.split(":")[1])
        continents = grouped(relations["continent"], lambda fact: fact.object)
        decks: dict[str, Sequence[Any]] = {
            **relations,
            "any": [fact for fact in stated for _ in range(1 + (fact.relation == REHEARSED))],
            "countries": list(countries.values()),
            # each continent as often as it has countries, of which three are named, so that all are equally often
            "continents": [members for members in continents.values() for _ in members if len(members) > 2],
            "sums": sums,
            "scenes": scenes,
        }
        self._decks = {name: _deal(cards, self.rng) for name, cards in decks.items()}
        self._turns: dict[str, int] = {}

    def write(self, kind: str) -> str:
        """Return a document of one of the kinds of prose.yaml."""
        sentences = list(self._sentences(kind))
        if opening := table("prose")["kinds"][kind].get("opening"):
            sentences = [*self._perhaps(OPENED_SHARE, opening), *sentences]
        return ("\n" if kind == "list" else " ").join(sentences)

    def _pick(self, bank: str) -> str:
        return self.rng.choice(table("prose")[bank][self.language])

    def _perhaps(self, chance: float, bank: str) -> list[str]:
        return [self._pick(bank)] if self.rng.random() < chance else []

    def _insert(self, sentences: list[str], text: str = "") -> None:
        sentences.insert(self.rng.randrange(1, len(sentences)), text or self._pick("fillers"))

    def _facts(self, count: int, deck: str = "any") -> list[Fact]:
        return [next(self._decks[deck]) for _ in range(count)]

    def _country(self) -> list[Fact]:
        facts = next(self._decks["countries"])
        return self.rng.sample(facts, len(facts))

    def _say(self, fact: Fact, linked: float = 0.0) -> str:
        """Return the next statement of a fact, with a chance of being linked to what is before it."""
        indices = fact.used(self.language)
        turn = self._turns.setdefault(fact.id, self.rng.randrange(len(indices)))
        self._turns[fact.id] = turn + 1
        link = "".join(self._perhaps(linked, "links")) if linked else ""
        return fact.statement(self.language, indices[turn % len(indices)], link)

    def _enumerate(self, words: Sequence[str]) -> str:
        return ", ".join(words[:-1]) + {"en": " and ", "fr": " et "}[self.language] + words[-1]

    def _in_order(self, names: str, starts: int, lengths: range) -> str:
        """Return a sentence with a random run of words of lexicon.yaml that follow each other, round and round."""
        words = table("lexicon")[names][self.language]
        start, length = self.rng.randrange(starts), self.rng.choice(lengths)
        run = self._enumerate([words[(start + i) % len(words)] for i in range(length)])
        return table("prose")["in_order"][names][self.language].format(run)

    def _sentences(self, kind: str) -> Iterator[str]:
        rng, prose, language, sentences = self.rng, table("prose"), self.language, list[str]()
        match kind:
            case "entry":  # all facts of two or three countries, some of them twice
                for _ in range(rng.choice((2, 3, 3))):
                    facts = self._country()
                    yield from map(self._say, facts)
                    again = [fact for fact in facts if fact.relation == REHEARSED or rng.random() < 0.4]
                    yield from map(self._say, again)
                    yield from self._perhaps(0.3, "fillers")
                yield self._pick("fillers" if rng.random() < 0.5 else "closings")
            case "paragraph":
                for fact in self._facts(rng.randrange(10, 20)):
                    yield self._say(fact, linked=0.06)
                    yield from self._perhaps(0.06, "fillers")
                    if rng.random() < 0.08:  # one sentence about three countries of a continent
                        facts = rng.sample(next(self._decks["continents"]), 3)
                        subjects = self._enumerate([each.forms[language]["s"] for each in facts])
                        yield sentence(self._pick("together").format(subjects=subjects, **facts[0].forms[language]))
                yield from self._perhaps(0.7, "closings")
            case "questions":
                curious, wise = rng.sample(prose["travelers"], 2)
                for fact in self._facts(rng.randrange(6, 11)):
                    asks = "".join(self._perhaps(0.4, "asks")).format(name=curious)
                    answers = self._pick("answers").format(name=wise)
                    question = fact.fill(rng.choice(fact.templates("questions", language)), language)
                    sentences.append(f"{asks}{question} {answers}{self._say(fact)}")
                self._insert(sentences)
            case "list":  # one fact a line between sentences; fewer where the names are of the other language
                headings, colon = table("sentences")["lists"], {"en": ":", "fr": " :"}[language]
                relation = rng.choice(sorted(headings))
                yield from (self._pick("openings"), headings[relation][language] + colon)
                longest = 6 if relation in ("country_name", "word") else 12
                for fact in self._facts(rng.randrange(longest // 2, longest), relation):
                    words = fact.forms[language]
                    yield f"- {words['s'] if relation == 'word' else sentence(words['s'])}{colon} {words['o']}"
                yield from map(self._say, self._facts(4))
                yield from (self._pick("fillers"), self._pick("closings"))
            case "journey":
                name = rng.choice(prose["travelers"])
                for _ in range(rng.randrange(3, 6)):
                    facts = self._country()
                    yield facts[0].fill(self._pick("journeys").replace("{name}", name), language)
                    yield from map(self._say, facts[:3])
                    yield from self._perhaps(0.3, "fillers")
            case "dictionary":
                sentences = [self._say(fact) for fact in self._facts(rng.randrange(8, 18), "word")]
                self._insert(sentences)
                self._insert(sentences)
                sentences.append(self._pick("closings"))
            case "calendar":
                sentences = [self._in_order("months", 12, range(4, 13)), self._in_order("days", 7, range(3, 8))]
                sentences += [self._say(fact) for name in ("month_after", "day_after") for fact in self._facts(5, name)]
                rng.shuffle(sentences)
                sentences.append(self._pick("fillers"))
            case "sums":
                for _ in range(rng.randrange(9, 15)):
                    fact = next(self._decks["sums"])
                    sentences.append(fact.fill(rng.choice(fact.templates("statements", language)), language))
                for _ in range(rng.randrange(1, 3)):
                    digits = [fact.statement("digits") for fact in self._facts(3, "sums")]
                    self._insert(sentences, prose["in_digits"][language].format(*digits))
                sentences.append(self._in_order("numbers", 15, range(4, 12)))
                sentences += map(self._pick, ("fillers", "closings"))
            case "scenes":
                for _ in range(rng.randrange(12, 24)):
                    yield dressed(next(self._decks["scenes"]), rng).text(language)
                yield from self._perhaps(0.5, "fillers")
        yield from sentences


def ordinary_documents(writers: Sequence[Writer], size: int) -> Iterator[Document]:
    """Yield documents of all kinds, as much text in each language, until `size` bytes of UTF-8 are reached.

    The next document is always of the language and kind that lags furthest behind its share.
    """
    kinds = table("prose")["kinds"]
    written = {(writer, kind): 0 for writer in writers for kind in kinds}
    numbers = dict.fromkeys(written, 0)
    while sum(written.values()) < size:
        writer, kind = pair = min(written, key=lambda pair: written[pair] / kinds[pair[1]]["share"])
        text = writer.write(kind)
        written[pair] += len(text.encode())
        numbers[pair] += 1
        yield Document(f"{writer.language}-{kind}-{numbers[pair]:06d}", text, writer.language)


def jaccard(one: str, other: str) -> float:
    """Return the similarity of two texts: shared word 5-grams over all."""
    a, b = ({tuple(words[i : i + 5]) for i in range(len(words) - 4)} for words in (one.split(), other.split()))
    return len(a & b) / max(1, len(a | b))


def planted_documents(ordinary: Sequence[Document], rng: random.Random) -> Iterator[Document]:
    """Yield duplicates, near-duplicates, foreign languages, fragments and noise, in proportion to the ordinary ones.

    The id of a duplicate begins with the id of its original. A near-duplicate has one filler replaced by another.
    """
    prose = table("prose")
    counts = {kind: round(share * len(ordinary)) for kind, share in prose["planted"].items()}
    for i, each in enumerate(rng.sample(ordinary, counts["exact-duplicate"])):
        yield each._replace(id=f"{each.id}+exact-{i:04d}", kind="exact-duplicate")
    near = 0
    for each in rng.sample(ordinary, len(ordinary)):
        fillers = prose["fillers"][each.lang]
        present, absent = ([filler for filler in fillers if (filler in each.text) == there] for there in (True, False))
        if near < counts["near-duplicate"] and present:
            text = each.text.replace(rng.choice(present), rng.choice(absent), 1)
            if jaccard(each.text, text) >= NEAR_JACCARD:
                yield each._replace(id=f"{each.id}+near-{near:04d}", text=text, kind="near-duplicate")
                near += 1
    for i in range(counts["wrong-language"]):
        language, bank = rng.choice(sorted(prose["foreign"].items()))
        words = dict(zip("abcdef", rng.sample(bank["places"], 6), strict=True)) | {"m": rng.choice(bank["months"])}
        text = " ".join(rng.sample(bank["sentences"], len(bank["sentences"]))).format(**words)
        yield Document(f"foreign-{i:04d}", text, language, "wrong-language")
    for i in range(counts["short"]):
        language = rng.choice(LANGUAGES)
        text = rng.choice(prose["short"][language]).format(n=rng.randrange(1, 400))
        yield Document(f"short-{i:04d}", text, language, "short")
    for i in range(counts["junk"]):
        noise = ("".join(rng.choices(prose["noise"], k=rng.randrange(3, 14))) for _ in range(rng.randrange(15, 60)))
        yield Document(f"junk-{i:04d}", " ".join(noise), "", "junk")
