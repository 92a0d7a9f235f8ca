"""Rows that begin alike, joined: what they share stands there once, and each sees it and its own end."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float

from affinage.evaluation.rows import Row

_SHORTEST = 8  # shared tokens, below which it is not worth the while
_ROOM = 256  # tokens of a row that several short families are put into, about
# Tokens before it that cost a token in attention what the rest of a layer costs it; 1,750 is of a narrow model on CPUs.
_EQUAL = 1750


@dataclass(frozen=True)
class Family:
    """Rows whose first `shared` tokens are the same, or one row by itself, that shares none."""

    shared: int
    rows: tuple[Row, ...]

    @cached_property
    def length(self) -> int:
        """Tokens, those that are shared counted once."""
        return self.shared + sum(len(row.tokens) - self.shared for row in self.rows)

    @cached_property
    def begun(self) -> range:
        """The shared places after which a shared token is asked: the beginnings of continuations that begin alike."""
        return range(min(len(row.tokens) - row.scored for row in self.rows), self.shared - 1)

    def own(self, row: Row) -> range:
        """The other places of a row after which a token is asked, the last one for each of its candidates."""
        return range(max(len(row.tokens) - row.scored, self.shared - 1), len(row.tokens))

    @cached_property
    def asked(self) -> int:
        """Number of tokens whose probability is asked: the `begun` ones once, then each row's own."""
        return len(self.begun) + sum(len(self.own(row)) - 1 + len(row.candidates) for row in self.rows)

    def answers(
        self, values: Float[np.ndarray, "P"], best: Bool[np.ndarray, "P"]
    ) -> Iterator[tuple[int, tuple[float, bool]]]:
        """For every request, its place and its answer, from those of the tokens that are asked, in their order."""
        start = begun = len(self.begun)
        for row in self.rows:
            last = start + len(self.own(row)) - 1
            alike = slice(len(row.tokens) - row.scored - self.begun.start, begun)
            total = float(np.sum(values[alike], dtype=np.float64) + np.sum(values[start:last], dtype=np.float64))
            greedy = bool(np.all(best[alike]) and np.all(best[start:last]))
            for column, requests in enumerate(row.requests, last):
                answer = total + float(values[column]), greedy and bool(best[column])
                for request in requests:
                    yield request, answer
            start = last + len(row.candidates)


def find_families(rows: Sequence[Row], most: int) -> list[Family]:
    """Every row in one family, joined where that leaves less to compute.

    None grows longer than `most` tokens, nor than twice the longest row, or 256 where rows are short.
    """
    most = min(most, max(_ROOM, 2 * max((len(row.tokens) for row in rows), default=0)))
    families: list[Family] = []
    some: list[Row] = []
    shared = tokens = 0  # of `some`
    for row in sorted(rows, key=lambda row: row.tokens):
        count = len(some)
        alike = min(shared, _common(some[-1].tokens, row.tokens)) if some else 0
        length = tokens + len(row.tokens) - count * alike
        apart = _alone(tokens - (count - 1) * shared) + _alone(len(row.tokens))
        if alike >= _SHORTEST and length <= most and _alone(length) < apart:
            shared = alike
        else:
            families += [_family(some, shared)] if some else []
            some, shared, tokens = [], len(row.tokens), 0
        some.append(row)
        tokens += len(row.tokens)
    return families + ([_family(some, shared)] if some else [])


def cost(tokens: int, length: int) -> float:
    """Of tokens in rows of a length, in tokens without attention."""
    return tokens * (1 + length / _EQUAL)


def _alone(length: int) -> float:
    """The cost of a family, which stands in a row with others if it is short."""
    return cost(length, max(length, _ROOM))


def _family(rows: Sequence[Row], shared: int) -> Family:
    return Family(shared if len(rows) > 1 else 0, tuple(rows))


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many of the first tokens are the same."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))
