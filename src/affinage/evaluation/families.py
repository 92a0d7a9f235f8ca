"""Rows that begin alike, joined: what they share stands there once, and each sees it and its own end."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from affinage.evaluation.buckets import bucket_lengths
from affinage.evaluation.rows import Row
from affinage.generation.shapes import power_of_two

_SHORTEST = 8  # shared tokens, below which a mask costs more than they do
_ALWAYS = 512  # tokens up to which rows may be joined, however short they are
_MULTIPLE = 8  # of what shapes are rounded up to


@dataclass(frozen=True)
class Family:
    """Rows whose first `shared` tokens are the same, or one row by itself, that shares none."""

    shared: int
    rows: tuple[Row, ...]

    @property
    def length(self) -> int:
        """Tokens, those that are shared counted once."""
        return self.shared + sum(len(row.tokens) - self.shared for row in self.rows)

    @property
    def asked(self) -> int:
        """Number of tokens whose probability is asked."""
        return sum(row.scored - 1 + len(row.candidates) for row in self.rows)

    def answers(
        self, values: Float[np.ndarray, "P"], best: Bool[np.ndarray, "P"]
    ) -> Iterator[tuple[int, tuple[float, bool]]]:
        """For every request, its place and its answer, from those of the tokens that are asked, in `fill`'s order."""
        start = 0
        for row in self.rows:
            last = start + row.scored - 1
            total, greedy = float(np.sum(values[start:last], dtype=np.float64)), bool(np.all(best[start:last]))
            for column, requests in enumerate(row.requests, last):
                answer = total + float(values[column]), greedy and bool(best[column])
                for request in requests:
                    yield request, answer
            start = last + len(row.candidates)


@dataclass(frozen=True)
class Batch:
    """Families padded to one shape.

    Attributes:
        families: those of its first rows; the other rows are padding.
        tokens: a family's shared tokens, then the ends of its rows one after the other, each at the `positions` that
            follow the shared ones and with a number of its own in `segments`.
        shared: of each family.
        at: the places in `tokens` after which a probability is asked, of the token in `targets`.
    """

    families: tuple[Family, ...]
    tokens: Int[np.ndarray, "B S"]
    positions: Int[np.ndarray, "B S"]
    segments: Int[np.ndarray, "B S"]
    shared: Int[np.ndarray, "B"]
    at: Int[np.ndarray, "B P"]
    targets: Int[np.ndarray, "B P"]

    @property
    def joined(self) -> bool:
        """Whether some family has more than one row."""
        return any(len(family.rows) > 1 for family in self.families)


def find_families(rows: Sequence[Row]) -> list[Family]:
    """Every row in one family, joined where that leaves fewer tokens to compute.

    None grows longer than twice the longest row, or 512 tokens: attention would cost more than is saved.
    """
    most = max(_ALWAYS, 2 * max((len(row.tokens) for row in rows), default=0))
    families: list[Family] = []
    some: list[Row] = []
    shared = tokens = 0  # of `some`
    for row in sorted(rows, key=lambda row: row.tokens):
        count = len(some)
        alike = min(shared, _common(some[-1].tokens, row.tokens)) if some else 0
        length = tokens + len(row.tokens) - count * alike
        if alike >= _SHORTEST and count * alike > (count - 1) * shared and length <= most:
            shared = alike
        else:
            families += [_family(some, shared)] if some else []
            some, shared, tokens = [], len(row.tokens), 0
        some.append(row)
        tokens += len(row.tokens)
    return families + ([_family(some, shared)] if some else [])


def batches(
    families: Sequence[Family], batch: int, *, context: int, compile_tokens: float, pad: int, multiple: int
) -> list[Batch]:
    """Batches of few shapes, the longest first so that memory runs out at once or never.

    Args:
        families: that are run.
        batch: of how many rows; of fewer where they are longer than the context.
        context: tokens of the model's rows.
        compile_tokens: see `bucket_lengths`.
        pad: what stands where nothing does.
        multiple: of which the number of rows is one.
    """
    found: list[Batch] = []
    for some in ([f for f in families if len(f.rows) > 1], [f for f in families if len(f.rows) == 1]):
        lengths = [family.length for family in some]
        below = 0
        for length in bucket_lengths(
            lengths, compile_tokens=compile_tokens, longest=max([context, *lengths]), multiple=_MULTIPLE
        ):
            inside = sorted(
                (family for family in some if below < family.length <= length),
                key=lambda family: (-family.length, family.rows[0].tokens),
            )
            below = length
            fitting = batch if length <= context else max(1, batch * context // length)
            rows = -(-min(fitting, power_of_two(len(some))) // multiple) * multiple
            asked = -(-max(family.asked for family in inside) // _MULTIPLE) * _MULTIPLE
            found += [
                _pad(inside[start : start + rows], (rows, length, asked), pad) for start in range(0, len(inside), rows)
            ]
    return sorted(found, key=lambda one: -one.tokens.size)


def _family(rows: Sequence[Row], shared: int) -> Family:
    return Family(shared if len(rows) > 1 else 0, tuple(rows))


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many of the first tokens are the same."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))


def _pad(families: Sequence[Family], shape: tuple[int, int, int], pad: int) -> Batch:
    rows, length, asked = shape
    batch = Batch(
        tuple(families),
        tokens=np.full((rows, length), pad, np.int32),
        positions=np.zeros((rows, length), np.int32),
        segments=np.zeros((rows, length), np.int32),
        shared=np.zeros(rows, np.int32),
        at=np.zeros((rows, asked), np.int32),
        targets=np.zeros((rows, asked), np.int32),
    )
    for index, family in enumerate(families):
        batch.shared[index] = family.shared
        _fill(batch, index, family)
    return batch


def _fill(batch: Batch, index: int, family: Family) -> None:
    shared, start, column = family.shared, family.shared, 0
    batch.tokens[index, :shared] = family.rows[0].tokens[:shared]
    batch.positions[index, :shared] = np.arange(shared)
    for number, row in enumerate(family.rows, 1):
        count = len(row.tokens)
        own = slice(start, start + count - shared)
        batch.tokens[index, own] = row.tokens[shared:]
        batch.positions[index, own] = np.arange(shared, count)
        batch.segments[index, own] = number
        asked = np.arange(count - row.scored, count)  # of the row, the last one for each of its candidates
        places = np.where(asked < shared, asked, asked - shared + start)
        targets = [*row.tokens[count - row.scored + 1 :], *row.candidates]
        columns = slice(column, column + len(targets))
        batch.at[index, columns] = np.append(places, np.repeat(places[-1:], len(row.candidates) - 1))
        batch.targets[index, columns] = targets
        start, column = own.stop, columns.stop
