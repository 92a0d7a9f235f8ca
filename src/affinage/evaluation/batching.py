"""From continuations to score to batches: few shapes, little padding, and shared prefixes computed once.

Rows that begin alike are a prefix group, in which the shared tokens stand once, and each row's end sees them and
itself. Groups are packed into rows of few lengths.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

MULTIPLE = 8  # of every length, for the sake of the hardware
Pair = tuple[list[int], list[int]]  # ids of a context, and of the continuation to score
Answer = tuple[int, tuple[float, bool]]  # a request, with its log-probability and whether it is greedy


@dataclass(frozen=True)
class Row:
    """A text without its last token, of which the last tokens are `targets`, to score for a request."""

    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    request: int

    @property
    def first(self) -> int:
        """The place after which the first target stands."""
        return len(self.tokens) - len(self.targets)


def in_pieces(pairs: Sequence[Pair], context: int) -> tuple[list[Pair], list[int]]:
    """Return pairs whose continuations fit the context, and for each the index of the pair it is (a piece of)."""
    pieces: list[Pair] = []
    owners: list[int] = []
    for index, (before, continuation) in enumerate(pairs):
        step = len(continuation) if len(continuation) <= context else max(1, context // 2)
        for start in range(0, len(continuation), max(1, step)):
            pieces.append((before + continuation[:start], continuation[start : start + step]))
            owners.append(index)
    return pieces, owners


def as_rows(pairs: Sequence[Pair], context: int) -> list[Row]:
    """Return rows for (context ids, continuation ids) pairs, each cut from the left to the last `context` inputs.

    The input of a pair is everything but its last token, as in the harness: (context + continuation)[-(length + 1):-1].
    """
    rows = []
    for index, (before, continuation) in enumerate(pairs):
        if not before or not 0 < len(continuation) <= context:
            raise ValueError(f"a pair needs at least one context token, and 1 to {context} continuation tokens")
        rows.append(Row(tuple((before + continuation)[-(context + 1) : -1]), tuple(continuation), index))
    return rows


# ---- groups ----

_SHORTEST = 8  # shared tokens that are worth a group
_ROOM = 256  # tokens of a row that several short groups are put into, about
# Keys whose attention costs a token as much as the rest of a layer; 1,750 is of a narrow model on CPUs.
_EQUAL = 1750


@dataclass(frozen=True)
class PrefixGroup:
    """Rows whose first `shared` tokens are the same, before their targets; or one row by itself, with 0."""

    shared: int
    rows: tuple[Row, ...]

    @cached_property
    def length(self) -> int:
        """Tokens, the shared ones counted once."""
        return self.shared + sum(len(row.tokens) - self.shared for row in self.rows)

    @cached_property
    def targets(self) -> int:
        """The number of targets of all rows."""
        return sum(len(row.targets) for row in self.rows)

    def answers(self, values: Float[np.ndarray, "P"], best: Bool[np.ndarray, "P"]) -> Iterator[Answer]:
        """Yield every request with its answer, from those of the targets, in their order."""
        start = 0
        for row in self.rows:
            own = slice(start, start + len(row.targets))
            yield row.request, (float(np.sum(values[own], dtype=np.float64)), bool(np.all(best[own])))
            start = own.stop


def find_groups(rows: Sequence[Row], most: int) -> list[PrefixGroup]:
    """Return every row in one group, joined where that leaves less to compute.

    None grows longer than `most` tokens, nor than twice the longest row, or 256 if rows are short.
    """
    most = min(most, max(_ROOM, 2 * max((len(row.tokens) for row in rows), default=0)))
    groups: list[PrefixGroup] = []
    some: list[Row] = []
    shared = tokens = 0  # of `some`
    for row in sorted(rows, key=lambda row: (row.tokens, row.request)):
        if some:
            pairs = zip(some[-1].tokens[:shared], row.tokens, strict=False)
            alike = next((n for n, (a, b) in enumerate(pairs) if a != b), min(shared, len(row.tokens)))
            alike = min(alike, row.first + 1)
            length = tokens + len(row.tokens) - len(some) * alike
            apart = _alone(tokens - (len(some) - 1) * shared) + _alone(len(row.tokens))
            if alike >= _SHORTEST and length <= most and _alone(length) < apart:
                some, shared, tokens = [*some, row], alike, tokens + len(row.tokens)
                continue
            groups.append(PrefixGroup(shared if len(some) > 1 else 0, tuple(some)))
        some, shared, tokens = [row], row.first + 1, len(row.tokens)
    return [*groups, PrefixGroup(shared if len(some) > 1 else 0, tuple(some))] if some else groups


def _cost(tokens: int, length: int) -> float:
    """The cost of tokens in rows of a length, in tokens without attention."""
    return tokens * (1 + length / _EQUAL)


def _alone(length: int) -> float:
    """The cost of a group, which stands in a row with others if it is short."""
    return _cost(length, max(length, _ROOM))


# ---- batches ----

# Tokens of a row that short groups are put into. Which of them leaves little padding depends on the groups: of
# those of 50 tokens 192 hold three, and 256 five.
_ROOMS = range(128, 577, 64)
# If at most one in four of a row's tokens is scored, the last layer's attention computes these alone.
_FEW = 4


@dataclass(frozen=True)
class Batch:
    """Rows of groups, padded to one shape.

    Attributes:
        rows: the groups that each row holds; those without one are padding.
        tokens: of a group the shared ones, then the ends of its rows one after the other, each at the `positions` that
            follow the shared ones.
        segments: a number for the shared tokens, and for each end.
        prefix_segment_ids: for an end the number of its group's shared tokens; for other tokens their own segment's.
        logit_positions: for each of R equal parts of the rows, the places in its flattened `tokens` after which targets
            stand. If these are few, a part is a row.
        targets: the tokens to score.
        joined: a row of this length may be more than one sequence, or longer than one.
    """

    rows: tuple[tuple[PrefixGroup, ...], ...]
    tokens: Int[np.ndarray, "B S"]
    positions: Int[np.ndarray, "B S"]
    segments: Int[np.ndarray, "B S"]
    prefix_segment_ids: Int[np.ndarray, "B S"]
    logit_positions: Int[np.ndarray, "R P"]
    targets: Int[np.ndarray, "R P"]
    joined: bool

    def answers(self, values: Float[np.ndarray, "R P"], best: Bool[np.ndarray, "R P"]) -> Iterator[Answer]:
        """Yield every request with its answer, from those of the targets."""
        rows = len(self.tokens) // len(self.logit_positions)
        for part, (of_part, best_of_part) in enumerate(zip(values, best, strict=True)):
            start = 0
            for group in chain.from_iterable(self.rows[part * rows : (part + 1) * rows]):
                own = slice(start, start + group.targets)
                yield from group.answers(of_part[own], best_of_part[own])
                start = own.stop


class _Shape(NamedTuple):
    rows: int
    length: int  # of a row, in tokens
    parts: int  # of the rows, equally large
    targets: int  # of a part


_GroupRow = list[PrefixGroup]


def batches(
    groups: Sequence[PrefixGroup],
    tokens: int,
    *,
    context: int,
    most: int,
    compile_tokens: float,
    pad: int,
    multiple: int,
    packed: bool = True,
) -> list[Batch]:
    """Return batches of few shapes, the longest first so that memory runs out at once or never.

    Args:
        groups: to be computed.
        tokens: in a batch at most, if that is more than a row.
        context: tokens of the model's rows.
        most: tokens of a row with several groups.
        compile_tokens: the cost of one more compiled shape, as the number of tokens scored in the same time.
        pad: the id of padding.
        multiple: the number of rows is a multiple of it.
        packed: a row may hold several groups.
    """
    found: list[Batch] = []
    for length, rows in _cheapest(groups, context, most if packed else 0, compile_tokens).items():
        # The scores of attention grow with the square of the length.
        fitting = max(1, int(tokens * min(1, context / length)) // (length * multiple)) * multiple
        count = -(-len(rows) // fitting) * multiple  # parts of all batches, all as full as one another
        ordered = sorted(rows, key=_targets, reverse=True)
        parts = [ordered[start::count] for start in range(count)]
        part, most_targets = len(parts[0]), max(sum(map(_targets, rows_of_part)) for rows_of_part in parts)
        shape = _Shape(part * multiple, length, multiple, _padded(most_targets))
        of_a_row = _padded(_targets(ordered[0]))
        if _FEW * of_a_row <= length:  # row by row
            shape = shape._replace(parts=shape.rows, targets=of_a_row)
        joined = length > context or any(len(row) > 1 or len(row[0].rows) > 1 for row in rows)
        for start in range(0, count, multiple):
            together = [row for one in parts[start : start + multiple] for row in [*one, *[[]] * (part - len(one))]]
            found.append(_batch(together, shape, pad, joined))
    return sorted(found, key=lambda one: -one.tokens.size)


def _padded(tokens: int) -> int:
    return -(-tokens // MULTIPLE) * MULTIPLE


def _targets(row: _GroupRow) -> int:
    return sum(group.targets for group in row)


def _cheapest(
    groups: Sequence[PrefixGroup], context: int, most: int, compile_tokens: float
) -> dict[int, list[_GroupRow]]:
    """The groups of each row, by the length of the row; with 0 for `most` one in each.

    Rows have a length that short groups are packed into, and one or two lengths for longer groups.
    """
    longest_first = sorted(groups, key=lambda group: (-group.length, group.rows[0].tokens))
    lengths = [group.length for group in longest_first]
    largest = max(lengths, default=0)
    longest = context if largest <= context else _padded(largest)
    ways = []
    for room in [room for room in _ROOMS if room <= most] or [most]:
        room = min(room, _padded(sum(length for length in lengths if length <= room)))
        alone = [min(_padded(length), longest) for length in lengths if length > room]
        for middle in {alone[len(alone) * part // 4] for part in (0, 1, 2, 3)} if alone else {0}:
            ways.append(_rows(longest_first, room, sorted({middle, *alone[:1]}), packed=most > 0))

    def price(rows: dict[int, list[_GroupRow]]) -> float:
        return sum(_cost(len(alike) * length, length) + compile_tokens for length, alike in rows.items())

    return min(ways, key=price)


def _rows(
    longest_first: Sequence[PrefixGroup], room: int, sizes: Sequence[int], *, packed: bool
) -> dict[int, list[_GroupRow]]:
    """Rows of `room` tokens, and of `sizes` for longer groups; each group goes where the least room is left over."""
    rows: dict[int, list[_GroupRow]] = {}
    every: list[_GroupRow] = []
    left: list[tuple[int, int]] = []  # tokens that rows have left, ascending, and their places in `every`
    for group in longest_first:
        place = bisect_left(left, (group.length, 0))
        if packed and place < len(left):
            space, number = left.pop(place)
        else:
            space = room if group.length <= room else next(size for size in sizes if size >= group.length)
            number = len(every)
            every.append([])
            rows.setdefault(space, []).append(every[number])
        every[number].append(group)
        insort(left, (space - group.length, number))
    return rows


def _batch(rows: Sequence[_GroupRow], shape: _Shape, pad: int, joined: bool) -> Batch:
    whole, of_parts = (shape.rows, shape.length), (shape.parts, shape.targets)
    positions, segments, parents = (np.zeros(whole, np.int32) for _ in range(3))
    at, targets = (np.zeros(of_parts, np.int32) for _ in range(2))
    tokens = np.full(whole, pad, np.int32)
    batch = Batch(tuple(map(tuple, rows)), tokens, positions, segments, parents, at, targets, joined)
    rows_of_part, column = shape.rows // shape.parts, 0
    for index, groups in enumerate(rows):
        part, place = divmod(index, rows_of_part)
        column, before = (0 if place == 0 else column), place * shape.length
        start = number = 0
        for group in groups:
            shared, first, number = group.shared, start, number + 1
            start += shared
            batch.prefix_segment_ids[index, first : first + group.length] = number
            pieces = [(slice(first, start), group.rows[0], 0, number)]  # the shared tokens, then the ends of the rows
            for row in group.rows:
                number += 1
                end = start + len(row.tokens) - shared
                pieces.append((slice(start, end), row, shared, number))
                columns = slice(column, column + len(row.targets))
                places = np.arange(row.first, len(row.tokens))
                batch.logit_positions[part, columns] = before + np.where(
                    places < shared, places + first, places - shared + start
                )
                batch.targets[part, columns] = row.targets
                start, column = end, columns.stop
            for own, row, begin, segment in pieces:
                count = own.stop - own.start
                batch.tokens[index, own] = row.tokens[begin : begin + count]
                batch.positions[index, own] = np.arange(begin, begin + count)
                batch.segments[index, own] = segment
    return batch
