"""What a corpus should not hold, planted so that cleaning has something to find: duplicates, near-duplicates, text in
other languages, fragments, noise. Each document's kind says what it is, and its id what it was made from."""

import random
from collections.abc import Sequence
from dataclasses import replace

from babel import Locale

from affinage.data.world.documents import Document
from affinage.data.world.prose import FILLERS

# Planted documents per ordinary one.
SHARES = {
    "exact-duplicate": 0.020,
    "near-duplicate": 0.020,
    "wrong-language": 0.014,
    "short": 0.008,
    "junk": 0.008,
}
NEAR_JACCARD = 0.85  # of word 5-grams: above the usual threshold of 0.8 with room for another way to cut words

_SHORT = {
    "en": ("See the next page.", "Page {n}.", "Read more about this", "Chapter {n}", "To be continued.", "OK."),
    "fr": ("Voir la page suivante.", "Page {n}.", "Lire la suite", "Chapitre {n}", "À suivre.", "D'accord."),
}

_FOREIGN = {
    "es": (
        "Este verano queremos viajar con toda la familia a {a}, {b} y {c}.",
        "Mi hermano vive desde hace muchos años muy lejos de {d}.",
        "En el mapa que está en la pared de la escuela los niños buscan {e} y {f}.",
        "Nos gustaría mucho volver en {m}, cuando hace buen tiempo.",
    ),
    "de": (
        "Diesen Sommer möchten wir mit der ganzen Familie nach {a}, {b} und {c} reisen.",
        "Mein Bruder wohnt schon seit vielen Jahren sehr weit weg von {d}.",
        "Auf der Karte an der Wand der Schule suchen die Kinder {e} und {f}.",
        "Wir würden sehr gern im {m} wiederkommen, wenn das Wetter schön ist.",
    ),
    "it": (
        "Quest'estate vogliamo viaggiare con tutta la famiglia in {a}, {b} e {c}.",
        "Mio fratello abita già da molti anni con la sua famiglia in {d}.",
        "Sulla carta appesa alla parete della scuola i bambini leggono i nomi {e} e {f}.",
        "Ci piacerebbe molto tornare in {m}, quando il tempo è bello.",
    ),
}

_FOREIGN_PLACES = "AT BE BR CN DK FI FR GR HU IE IN JP MX NO PL PT RU SE TR"  # no article in es, de, it

_NOISE = "#%&*+=<>|~^{}[]()@$;:/\\_\x01\x02\x07\x1b\x7f\ufffd"


def shingles(text: str, size: int = 5) -> set[tuple[str, ...]]:
    """The word n-grams of a text."""
    words = text.split()
    return {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}


def jaccard(one: str, other: str) -> float:
    """Similarity of two texts: shared word 5-grams over all."""
    a, b = shingles(one), shingles(other)
    return len(a & b) / max(1, len(a | b))


def _exact(document: Document, number: int) -> Document:
    return replace(document, id=f"{document.id}+exact-{number:04d}", kind="exact-duplicate")


def _near(document: Document, number: int, rng: random.Random) -> Document | None:
    """The document with one sentence that tells no fact put in the place of another; None if it cannot be done."""
    bank = FILLERS[document.lang]
    present = [filler for filler in bank if filler in document.text]
    if not present:
        return None
    absent = [filler for filler in bank if filler not in document.text]
    text = document.text.replace(rng.choice(present), rng.choice(absent), 1)
    if jaccard(document.text, text) < NEAR_JACCARD:
        return None
    return Document(f"{document.id}+near-{number:04d}", text, document.lang, "near-duplicate")


def _foreign(number: int, rng: random.Random) -> Document:
    language = rng.choice(sorted(_FOREIGN))
    locale = Locale(language)
    names = [locale.territories[code].replace("’", "'") for code in rng.sample(_FOREIGN_PLACES.split(), 6)]
    words = dict(zip("abcdef", names, strict=True)) | {"m": locale.months["format"]["wide"][rng.randrange(1, 13)]}
    text = " ".join(line.format(**words) for line in rng.sample(_FOREIGN[language], len(_FOREIGN[language])))
    return Document(f"foreign-{number:04d}", text, language, "wrong-language")


def _short(number: int, rng: random.Random) -> Document:
    language = rng.choice(sorted(_SHORT))
    text = rng.choice(_SHORT[language]).format(n=rng.randrange(1, 400))
    return Document(f"short-{number:04d}", text, language, "short")


def _noise(number: int, rng: random.Random) -> Document:
    words = ("".join(rng.choices(_NOISE, k=rng.randrange(3, 14))) for _ in range(rng.randrange(15, 60)))
    return Document(f"junk-{number:04d}", " ".join(words), "", "junk")


def planted_documents(ordinary: Sequence[Document], rng: random.Random) -> list[Document]:
    """All planted documents, in proportion to the ordinary ones they are made from."""
    counts = {kind: round(share * len(ordinary)) for kind, share in SHARES.items()}
    planted = [_exact(document, i) for i, document in enumerate(rng.sample(ordinary, counts["exact-duplicate"]))]
    near: list[Document] = []
    for document in rng.sample(ordinary, len(ordinary)):
        if len(near) == counts["near-duplicate"]:
            break
        changed = _near(document, len(near), rng)
        near += [changed] if changed else []
    planted += near
    planted += [_foreign(i, rng) for i in range(counts["wrong-language"])]
    planted += [_short(i, rng) for i in range(counts["short"])]
    planted += [_noise(i, rng) for i in range(counts["junk"])]
    return planted
