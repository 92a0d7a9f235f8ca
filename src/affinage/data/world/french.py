"""French grammar that names carry with them: articles, contractions, elision, gender.

Apostrophes are the plain ASCII one and spaces are ordinary ones, before `?` and `!` too: one spelling for one thing.
"""

from dataclasses import dataclass
from typing import Literal

Gender = Literal["m", "f"]

_VOWELS = (
    "aâàeéèêëiîïoôuûœ"  # the h of our names (Hongrie, Honduras, hongrois) is aspirated: no elision; so is y (Yémen)
)

# A name of a country is feminine when its first word ends in -e, but for these.
_MASCULINE_IN_E = frozenset({"Belize", "Cambodge", "Mexique", "Mozambique", "Royaume-Uni", "Suriname", "Zimbabwe"})
_FEMININE_NOT_IN_E = frozenset({"Sierra Leone"})
_PLURAL = {
    "Bahamas": "f", "Comores": "f", "Maldives": "f", "Philippines": "f", "Seychelles": "f",
    "Émirats arabes unis": "m", "États-Unis": "m", "Pays-Bas": "m",
}  # fmt: skip
_WITHOUT_ARTICLE = frozenset(
    {"Bahreïn", "Chypre", "Cuba", "Djibouti", "Israël", "Madagascar", "Malte", "Maurice", "Monaco", "Nauru", "Oman",
     "Saint-Marin", "Singapour"}
)  # fmt: skip
_EN_WITHOUT_ARTICLE = frozenset({"Israël"})  # the other names without an article are small or islands: "à Cuba"
_ISLANDS_A_LA = frozenset({"Barbade", "Dominique", "Grenade"})  # "à la Barbade", not "en Barbade"

_FEMININE_CURRENCIES = frozenset({"couronne", "hryvnia", "livre", "roupie", "rufiyaa"})


def elides(word: str) -> bool:
    """Whether `le`, `la` and `de` lose their vowel before this word."""
    return word[0].lower() in _VOWELS


def de(word: str) -> str:
    """`de` before a word without an article: "de mars", "d'avril"."""
    return f"d'{word}" if elides(word) else f"de {word}"


def le(noun: str, gender: Gender, plural: bool = False) -> str:
    """A noun with its definite article: "le Japon", "la France", "l'Iran", "les Pays-Bas"."""
    if plural:
        return f"les {noun}"
    if elides(noun):
        return f"l'{noun}"
    return f"le {noun}" if gender == "m" else f"la {noun}"


def du(noun: str, gender: Gender, plural: bool = False) -> str:
    """`de` and the definite article: "du Japon", "de la France", "de l'Iran", "des Pays-Bas"."""
    if plural:
        return f"des {noun}"
    if gender == "m" and not elides(noun):
        return f"du {noun}"
    return f"de {le(noun, gender)}"


@dataclass(frozen=True)
class Country:
    """The forms that a country's name takes in a French sentence."""

    name: str
    gender: Gender
    plural: bool
    le: str  # "le Japon", "les États-Unis", "Cuba"
    du: str  # "du Japon", "des États-Unis", "de Cuba"
    au: str  # "au Japon", "en France", "aux États-Unis", "à Cuba"


def country(name: str) -> Country:
    """Gender, number, article and prepositions of a country from its name alone."""
    if name in _PLURAL:
        gender: Gender = "m" if _PLURAL[name] == "m" else "f"
        return Country(name, gender, True, le(name, gender, True), du(name, gender, True), f"aux {name}")
    first = name.replace("-", " ").split()[0]
    feminine = name in _FEMININE_NOT_IN_E or (first.endswith("e") and name not in _MASCULINE_IN_E)
    gender = "f" if feminine else "m"
    if name in _WITHOUT_ARTICLE:
        preposition = "en" if name in _EN_WITHOUT_ARTICLE else "à"
        return Country(name, gender, False, name, de(name), f"{preposition} {name}")
    if name in _ISLANDS_A_LA:
        au = f"à la {name}"
    elif feminine or elides(name):
        au = f"en {name}"
    else:
        au = f"au {name}"
    return Country(name, gender, False, le(name, gender), du(name, gender), au)


def currency_gender(name: str) -> Gender:
    """Gender of a currency by its first noun: "la livre turque", "le nouveau shekel israélien"."""
    return "f" if name.split()[0] in _FEMININE_CURRENCIES else "m"


def agree(template: str, plural: bool) -> str:
    """Choose between singular and plural in "[utilise|utilisent]"."""
    pieces = template.split("[")
    chosen = [pieces[0]]
    for piece in pieces[1:]:
        alternatives, rest = piece.split("]", 1)
        chosen.append(alternatives.split("|")[int(plural)] + rest)
    return "".join(chosen)


def determiner(kind: str, following: str, gender: Gender, plural: bool) -> str:
    """`le`, `un`, `ce` or `mon` before a noun group, space or apostrophe included.

    `following` is the word that comes next; it decides on elision ("l'oiseau", "cet oiseau", "mon école").
    """
    vowel = elides(following) or following.startswith("hom")  # the h of homme is mute
    if kind == "le":
        if plural:
            return "les "
        return "l'" if vowel else {"m": "le ", "f": "la "}[gender]
    if kind == "un":
        return "des " if plural else {"m": "un ", "f": "une "}[gender]
    if kind == "ce":
        return "ces " if plural else {"m": "cet " if vowel else "ce ", "f": "cette "}[gender]
    return "mes " if plural else {"m": "mon ", "f": "mon " if vowel else "ma "}[gender]
