"""English grammar that names carry with them: `the`, `a` or `an`, the possessive.

Countries take a singular verb whatever their name looks like ("the United States is", "the Netherlands is").
"""

_WITH_ARTICLE = frozenset(
    {"Bahamas", "Central African Republic", "Comoros", "Dominican Republic", "Gambia", "Maldives", "Netherlands",
     "Philippines", "Seychelles", "United Arab Emirates", "United Kingdom", "United States"}
)  # fmt: skip


def country(name: str) -> str:
    """A country as it stands in a sentence: "Japan", "the United States"."""
    return f"the {name}" if name in _WITH_ARTICLE else name


def possessive(name: str) -> str:
    """The genitive: "Japan's", "the Netherlands'"."""
    return f"{name}'" if name.endswith("s") else f"{name}'s"


def a(phrase: str) -> str:
    """A phrase with its indefinite article; our words have no silent h and no u read as in `use`."""
    return f"an {phrase}" if phrase[0].lower() in "aeiou" else f"a {phrase}"


def sentence(text: str) -> str:
    """The text with a capital at its beginning, the rest untouched; right for French too."""
    return text[0].upper() + text[1:]
