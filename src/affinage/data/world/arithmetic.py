"""Small arithmetic in words and digits, with pairs of operands that no text shows."""

import random
from dataclasses import dataclass

from num2words import num2words

from affinage.data.world.english import sentence

STATEMENTS: dict[str, dict[str, tuple[str, ...]]] = {
    "+": {
        "en": (
            "{a} plus {b} is {c}.",
            "{a} and {b} make {c}.",
            "the sum of {a} and {b} is {c}.",
            "if you add {b} to {a}, you get {c}.",
        ),
        "fr": (
            "{a} plus {b} égale {c}.",
            "{a} et {b} font {c}.",
            "la somme de {a} et de {b} est {c}.",
            "si l'on ajoute {b} à {a}, on obtient {c}.",
        ),
    },
    "-": {
        "en": (
            "{a} minus {b} is {c}.",
            "if you take {b} away from {a}, you are left with {c}.",
            "the difference between {a} and {b} is {c}.",
        ),
        "fr": (
            "{a} moins {b} égale {c}.",
            "si l'on retire {b} de {a}, il reste {c}.",
            "la différence entre {a} et {b} est {c}.",
        ),
    },
    "*": {
        "en": ("{a} times {b} is {c}.", "the product of {a} and {b} is {c}."),
        "fr": ("{once} fois {b} égale {c}.", "le produit de {a} par {b} est {c}."),
    },
}

QUESTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "+": {"en": ("What is {a} plus {b}?", "How much is {a} plus {b}?"), "fr": ("Combien font {a} plus {b} ?",)},
    "-": {"en": ("What is {a} minus {b}?", "How much is {a} minus {b}?"), "fr": ("Combien font {a} moins {b} ?",)},
    "*": {"en": ("What is {a} times {b}?", "How much is {a} times {b}?"), "fr": ("Combien font {once} fois {b} ?",)},
}

SIGNS = {"+": "+", "-": "-", "*": "x"}
LARGEST = 12  # operand of a sum or a difference: few enough for a small model to see each one often
LARGEST_FACTOR = 10
HELD_OUT_SHARE = 0.12


@dataclass(frozen=True, order=True)
class Calculation:
    """One operation on two small numbers."""

    operation: str
    a: int
    b: int

    @property
    def result(self) -> int:
        """What it comes to; never negative."""
        return {"+": self.a + self.b, "-": self.a - self.b, "*": self.a * self.b}[self.operation]

    @property
    def context(self) -> str:
        """The calculation in digits up to its result."""
        return f"{self.a} {SIGNS[self.operation]} {self.b} ="

    def digits(self) -> str:
        """The calculation in digits: "7 + 5 = 12"."""
        return f"{self.context} {self.result}"

    def words(self, language: str, template: str) -> str:
        """A statement or question in words, with a capital."""
        a, b, c = (num2words(number, lang=language) for number in (self.a, self.b, self.result))
        once = "une" if a == "un" else a  # "une fois quatre"
        return sentence(template.format(a=a, b=b, c=c, once=once))


def calculations(seed: int) -> tuple[list[Calculation], list[Calculation]]:
    """All calculations as (told, held out); with a + b, b + a is held out, and so for products."""
    rng = random.Random(f"{seed}/arithmetic")
    told: list[Calculation] = []
    held_out: list[Calculation] = []
    for operation, largest in (("+", LARGEST), ("-", LARGEST), ("*", LARGEST_FACTOR)):
        pairs = [(a, b) for a in range(largest + 1) for b in range(a + 1)]
        hidden = set(rng.sample(pairs, round(HELD_OUT_SHARE * len(pairs))))
        for a, b in pairs:
            both = {(a, b)} if operation == "-" else {(a, b), (b, a)}
            for x, y in sorted(both):
                (held_out if (a, b) in hidden else told).append(Calculation(operation, x, y))
    return told, held_out


def near_misses(calculation: Calculation, rng: random.Random) -> list[int]:
    """Three wrong results close to the right one, none negative."""
    result = calculation.result
    near = (result + step for step in (-10, -3, -2, -1, 1, 2, 3, 10))
    return rng.sample([number for number in near if number >= 0], 3)
