"""Rows that begin alike, joined: what they share stands there once, and each sees it and its own end."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from jaxtyping import Bool, Float, Int

from affinage.evaluation.buckets import MULTIPLE, bucket_lengths, round_up
from affinage.evaluation.rows import Row

_SHORTEST = 8  # shared tokens, below which it is not worth the while
_ROOM = 192  # tokens of a row that short families are put into: few shapes, without much padding or attention
# Tokens before it that cost a token in attention what the rest of a layer costs it; 1,000 is of a narrow model on CPUs.
_EQUAL = 1000


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
        """For every request, its place and its answer, from those of the tokens that are asked, in their order."""
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
    """Rows of families, padded to one shape.

    Attributes:
        rows: the families that each of the first rows holds; the other rows are padding.
        tokens: of a family those that are shared, then the ends of its rows one after the other, each at the
            `positions` that follow the shared ones.
        segments: a number for what is shared, and for each end.
        parents: of an end the number of what its family shares; of other tokens that of their own segment.
        joined: a row of this length may be more than one sequence, or longer than one.
        at: of each of R equal parts of the rows, the places in its flattened `tokens` after which a probability is
            asked, of the token in `targets`.
    """

    rows: tuple[tuple[Family, ...], ...]
    tokens: Int[np.ndarray, "B S"]
    positions: Int[np.ndarray, "B S"]
    segments: Int[np.ndarray, "B S"]
    parents: Int[np.ndarray, "B S"]
    at: Int[np.ndarray, "R P"]
    targets: Int[np.ndarray, "R P"]
    joined: bool

    def answers(
        self, values: Float[np.ndarray, "R P"], best: Bool[np.ndarray, "R P"]
    ) -> Iterator[tuple[int, tuple[float, bool]]]:
        """For every request, its place and its answer, from those of the tokens that are asked."""
        rows = len(self.tokens) // len(self.at)
        for part, (of_part, best_of_part) in enumerate(zip(values, best, strict=True)):
            start = 0
            for family in chain.from_iterable(self.rows[part * rows : (part + 1) * rows]):
                asked = slice(start, start + family.asked)
                yield from family.answers(of_part[asked], best_of_part[asked])
                start = asked.stop


def find_families(rows: Sequence[Row]) -> list[Family]:
    """Every row in one family, joined where that leaves less to compute.

    None grows longer than the longest row and a quarter, or 192 tokens: scores of attention take memory.
    """
    most = max(_ROOM, max((len(row.tokens) for row in rows), default=0) * 5 // 4)
    families: list[Family] = []
    some: list[Row] = []
    shared = tokens = 0  # of `some`
    for row in sorted(rows, key=lambda row: row.tokens):
        count = len(some)
        alike = min(shared, _common(some[-1].tokens, row.tokens)) if some else 0
        length = tokens + len(row.tokens) - count * alike
        apart = _cost(tokens - (count - 1) * shared) + _cost(len(row.tokens))
        if alike >= _SHORTEST and length <= most and _cost(length) < apart:
            shared = alike
        else:
            families += [_family(some, shared)] if some else []
            some, shared, tokens = [], len(row.tokens), 0
        some.append(row)
        tokens += len(row.tokens)
    return families + ([_family(some, shared)] if some else [])


def batches(
    families: Sequence[Family],
    tokens: int,
    *,
    context: int,
    compile_tokens: float,
    pad: int,
    multiple: int,
    packed: bool = True,
) -> list[Batch]:
    """Batches of few shapes, the longest first so that memory runs out at once or never.

    Args:
        families: that are run.
        tokens: in a batch at most, if it is more than a row.
        context: tokens of the model's rows.
        compile_tokens: see `bucket_lengths`.
        pad: what stands where nothing does.
        multiple: of which the number of rows is one.
        packed: a row may hold several families.
    """
    found: list[Batch] = []
    for length, rows in _rows(families, context, compile_tokens, packed).items():
        # The scores of attention grow with the square of the length.
        fitting = max(1, int(tokens * min(1, context / length)) // (length * multiple)) * multiple
        steps = -(-len(rows) // fitting)
        together = -(-len(rows) // (steps * multiple)) * multiple  # all batches as full as one another
        part = together // multiple
        asked = [
            sum(family.asked for row in rows[at : at + part] for family in row) for at in range(0, len(rows), part)
        ]
        shape = together, length, multiple, -(-max(asked) // MULTIPLE) * MULTIPLE
        joined = length > context or any(len(row) > 1 or len(row[0].rows) > 1 for row in rows)
        found += [_pad(rows[start : start + together], shape, pad, joined) for start in range(0, len(rows), together)]
    return sorted(found, key=lambda one: -one.tokens.size)


def _rows(
    families: Sequence[Family], context: int, compile_tokens: float, packed: bool
) -> dict[int, list[list[Family]]]:
    """The families of each row, by the length of the row; short ones fill up what others leave, the tightest first."""
    longest_first = sorted(families, key=lambda family: (-family.length, family.rows[0].tokens))
    lengths = [family.length for family in longest_first]
    short = sum(length for length in lengths if length <= _ROOM) if packed else 0
    room = min(_ROOM, -(-short // MULTIPLE) * MULTIPLE)
    longest = max(lengths, default=0)
    sizes = bucket_lengths(
        [length for length in lengths if length > room],
        compile_tokens=compile_tokens,
        longest=context if longest <= context else -(-longest // MULTIPLE) * MULTIPLE,
    )
    rows: dict[int, list[list[Family]]] = {}
    left: dict[int, list[list[Family]]] = {}  # rows by the tokens they have left
    spaces: list[int] = []  # its keys, ascending
    for family in longest_first:
        place = bisect_left(spaces, family.length)
        if packed and place < len(spaces):
            space = spaces[place]
            row = left[space].pop()
            if not left[space]:
                del left[space], spaces[place]
        else:
            space = room if family.length <= room else round_up(family.length, sizes)
            row = []
            rows.setdefault(space, []).append(row)
        row.append(family)
        space -= family.length
        if space not in left:
            insort(spaces, space)
        left.setdefault(space, []).append(row)
    return rows


def _cost(length: int) -> float:
    """Of a family, in tokens without attention."""
    return length * (1 + max(length, _ROOM) / _EQUAL)


def _family(rows: Sequence[Row], shared: int) -> Family:
    return Family(shared if len(rows) > 1 else 0, tuple(rows))


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many of the first tokens are the same."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))


def _pad(rows: Sequence[Sequence[Family]], shape: tuple[int, int, int, int], pad: int, joined: bool) -> Batch:
    count, length, parts, asked = shape
    batch = Batch(
        tuple(map(tuple, rows)),
        tokens=np.full((count, length), pad, np.int32),
        positions=np.zeros((count, length), np.int32),
        segments=np.zeros((count, length), np.int32),
        parents=np.zeros((count, length), np.int32),
        at=np.zeros((parts, asked), np.int32),
        targets=np.zeros((parts, asked), np.int32),
        joined=joined,
    )
    column = 0
    for index, row in enumerate(rows):
        if index % (count // parts) == 0:
            column = 0
        start = number = 0
        for family in row:
            _fill(batch, index, family, start, column, number + 1)
            start, column, number = start + family.length, column + family.asked, number + 1 + len(family.rows)
    return batch


def _fill(batch: Batch, index: int, family: Family, start: int, column: int, number: int) -> None:
    """Write a family into a row, from a token, an asked one and a segment's number on."""
    shared, begun = family.shared, slice(start, start + family.shared)
    part, row_of_part = divmod(index, len(batch.tokens) // len(batch.at))
    before = row_of_part * batch.tokens.shape[1]
    batch.tokens[index, begun] = family.rows[0].tokens[:shared]
    batch.positions[index, begun] = np.arange(shared)
    batch.segments[index, begun] = number
    batch.parents[index, start : start + family.length] = number
    first = start
    start = begun.stop
    for own_number, row in enumerate(family.rows, number + 1):
        count = len(row.tokens)
        own = slice(start, start + count - shared)
        batch.tokens[index, own] = row.tokens[shared:]
        batch.positions[index, own] = np.arange(shared, count)
        batch.segments[index, own] = own_number
        asked = np.arange(count - row.scored, count)  # of the row, the last one for each of its candidates
        places = before + np.where(asked < shared, asked + first, asked - shared + start)
        targets = [*row.tokens[count - row.scored + 1 :], *row.candidates]
        columns = slice(column, column + len(targets))
        batch.at[part, columns] = np.append(places, np.repeat(places[-1:], len(row.candidates) - 1))
        batch.targets[part, columns] = targets
        start, column = own.stop, columns.stop
