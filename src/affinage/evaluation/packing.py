"""Families into rows and rows into batches: few shapes, little padding, and of one shape a batch like another."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from affinage.evaluation.buckets import MULTIPLE, bucket_lengths, round_up
from affinage.evaluation.families import Family, cost

# Tokens of a row that short families are put into. Which of them leaves little padding depends on the families: of
# those of 50 tokens 192 hold three, and 256 five.
_ROOMS = range(128, 577, 64)
# Where no more than one in so many of a row's tokens is asked, the last layer's attention computes these alone.
_FEW = 4


@dataclass(frozen=True)
class Batch:
    """Rows of families, padded to one shape.

    Attributes:
        rows: the families that each row holds; those without one are padding.
        tokens: of a family those that are shared, then the ends of its rows one after the other, each at the
            `positions` that follow the shared ones.
        segments: a number for what is shared, and for each end.
        parents: of an end the number of what its family shares; of other tokens that of their own segment.
        at: of each of R equal parts of the rows, the places in its flattened `tokens` after which a probability is
            asked. Where these are few, a part is a row.
        targets: the tokens whose probability is asked.
        joined: a row of this length may be more than one sequence, or longer than one.
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


class _Shape(NamedTuple):
    rows: int
    length: int  # of a row, in tokens
    parts: int  # of the rows, equally large
    asked: int  # tokens of a part


def batches(
    families: Sequence[Family],
    tokens: int,
    *,
    context: int,
    most: int,
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
        most: tokens of a row in which several families may stand.
        compile_tokens: see `bucket_lengths`.
        pad: what stands where nothing does.
        multiple: of which the number of rows is one.
        packed: a row may hold several families.
    """
    found: list[Batch] = []
    for length, rows in _cheapest(families, context, most if packed else 0, compile_tokens).items():
        # The scores of attention grow with the square of the length.
        fitting = max(1, int(tokens * min(1, context / length)) // (length * multiple)) * multiple
        steps = -(-len(rows) // fitting)
        part = -(-len(rows) // (steps * multiple))  # all batches as full as one another
        parts = _dealt(rows, steps * multiple, part)
        asked = max(sum(map(_asked, rows_of_part)) for rows_of_part in parts)
        shape = _Shape(part * multiple, length, multiple, _padded(asked))
        of_a_row = _padded(max(map(_asked, rows)))
        if _FEW * of_a_row <= length:  # row by row
            shape = shape._replace(parts=shape.rows, asked=of_a_row)
        joined = length > context or any(len(row) > 1 or len(row[0].rows) > 1 for row in rows)
        for start in range(0, len(parts), multiple):
            together = [row for one in parts[start : start + multiple] for row in [*one, *[[]] * (part - len(one))]]
            found.append(_batch(together, shape, pad, joined))
    return sorted(found, key=lambda one: -one.tokens.size)


def _dealt(rows: Sequence[list[Family]], parts: int, most: int) -> list[list[list[Family]]]:
    """Rows in parts of `most` or fewer, of each of which about as much is asked: all are padded to the largest."""
    dealt: list[list[list[Family]]] = [[] for _ in range(parts)]
    least = [(0, part) for part in range(parts)]
    for row in sorted(rows, key=_asked, reverse=True):
        asked, part = heappop(least)
        dealt[part].append(row)
        if len(dealt[part]) < most:
            heappush(least, (asked + _asked(row), part))
    return dealt


def _padded(asked: int) -> int:
    return -(-asked // MULTIPLE) * MULTIPLE


def _asked(row: Sequence[Family]) -> int:
    return sum(family.asked for family in row)


def _cheapest(
    families: Sequence[Family], context: int, most: int, compile_tokens: float
) -> dict[int, list[list[Family]]]:
    """The families of each row, by the length of the row; with 0 for `most` one in each."""
    longest_first = sorted(families, key=lambda family: (-family.length, family.rows[0].tokens))
    lengths = [family.length for family in longest_first]
    longest = max(lengths, default=0)
    longest = context if longest <= context else -(-longest // MULTIPLE) * MULTIPLE
    ways = []
    for room in [room for room in _ROOMS if room <= most] or [most]:
        room = min(room, -(-sum(length for length in lengths if length <= room) // MULTIPLE) * MULTIPLE)
        alone = [length for length in lengths if length > room]
        sizes = bucket_lengths(alone, compile_tokens=compile_tokens, longest=longest)
        ways.append(_rows(longest_first, room, sizes, packed=most > 0))

    def price(rows: dict[int, list[list[Family]]]) -> float:
        return sum(cost(len(alike) * length, length) + compile_tokens for length, alike in rows.items())

    return min(ways, key=price)


def _rows(
    longest_first: Sequence[Family], room: int, sizes: Sequence[int], *, packed: bool
) -> dict[int, list[list[Family]]]:
    """Rows of `room` tokens, and of `sizes` for longer families; others fill up what is left, the tightest first."""
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


def _batch(rows: Sequence[Sequence[Family]], shape: _Shape, pad: int, joined: bool) -> Batch:
    whole, asked = (shape.rows, shape.length), (shape.parts, shape.asked)
    batch = Batch(
        tuple(map(tuple, rows)),
        tokens=np.full(whole, pad, np.int32),
        positions=np.zeros(whole, np.int32),
        segments=np.zeros(whole, np.int32),
        parents=np.zeros(whole, np.int32),
        at=np.zeros(asked, np.int32),
        targets=np.zeros(asked, np.int32),
        joined=joined,
    )
    column = 0
    for index, row in enumerate(rows):
        if index % (shape.rows // shape.parts) == 0:
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
    alike = slice(column, column + len(family.begun))
    batch.at[part, alike] = before + first + np.array(family.begun, np.int32)
    batch.targets[part, alike] = family.rows[0].tokens[family.begun.start + 1 : shared]
    column = alike.stop
    for own_number, row in enumerate(family.rows, number + 1):
        count = len(row.tokens)
        own = slice(start, start + count - shared)
        batch.tokens[index, own] = row.tokens[shared:]
        batch.positions[index, own] = np.arange(shared, count)
        batch.segments[index, own] = own_number
        asked = np.array(family.own(row))
        places = before + np.where(asked < shared, asked + first, asked - shared + start)
        targets = [*row.tokens[asked[0] + 1 :], *row.candidates]
        columns = slice(column, column + len(targets))
        batch.at[part, columns] = np.append(places, np.repeat(places[-1:], len(row.candidates) - 1))
        batch.targets[part, columns] = targets
        start, column = own.stop, columns.stop
