"""From continuations to score to batches: few shapes, little padding, and shared prefixes computed once.

Continuations that differ in their last token only are one row. Rows that begin alike are a prefix group, in which the
shared tokens stand once, and each row's end sees them and itself. Groups are packed into rows of few lengths.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

MULTIPLE = 8  # of every length, for the sake of the hardware
Pair = tuple[list[int], list[int]]  # ids of a context, and of the continuation to score
Answer = tuple[int, tuple[float, bool]]  # a request, with its log-probability and whether it is greedy


@dataclass
class Row:
    """A text, of which the last `scored - 1` tokens are themselves scored, and then each of `candidates`.

    `requests` are, for each candidate, the indices of the requests it answers.
    """

    tokens: tuple[int, ...]
    scored: int
    candidates: list[int] = field(default_factory=list)
    requests: list[list[int]] = field(default_factory=list)


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


def group_requests(pairs: Sequence[Pair], context: int) -> list[Row]:
    """Return rows for (context ids, continuation ids) pairs, each cut from the left to the last `context` inputs.

    The input of a pair is everything but its last token, as in the harness: (context + continuation)[-(length + 1):-1].
    Pairs with the same input and the same number of scored tokens become one row with several candidates.
    """
    rows: dict[tuple[tuple[int, ...], int], Row] = {}
    for index, (before, continuation) in enumerate(pairs):
        if not before or not 0 < len(continuation) <= context:
            raise ValueError(f"a pair needs at least one context token, and 1 to {context} continuation tokens")
        tokens = tuple((before + continuation)[-(context + 1) : -1])
        row = rows.setdefault((tokens, len(continuation)), Row(tokens, len(continuation)))
        if continuation[-1] not in row.candidates:
            row.candidates.append(continuation[-1])
            row.requests.append([])
        row.requests[row.candidates.index(continuation[-1])].append(index)
    return list(rows.values())


# ---- groups ----

_SHORTEST = 8  # shared tokens that are worth a group
_ROOM = 256  # tokens of a row that several short groups are put into, about
# Keys whose attention costs a token as much as the rest of a layer; 1,750 is of a narrow model on CPUs.
_EQUAL = 1750


@dataclass(frozen=True)
class PrefixGroup:
    """Rows whose first `shared` tokens are the same, or one row by itself, with 0.

    Tokens "asked" are those whose probability is computed.
    """

    shared: int
    rows: tuple[Row, ...]

    @cached_property
    def length(self) -> int:
        """Tokens, the shared ones counted once."""
        return self.shared + sum(len(row.tokens) - self.shared for row in self.rows)

    @cached_property
    def begun(self) -> range:
        """The shared places after which a shared token is asked: of continuations that begin alike."""
        return range(min(len(row.tokens) - row.scored for row in self.rows), self.shared - 1)

    def own(self, row: Row) -> range:
        """Return the other places of a row after which a token is asked, the last one for each of its candidates."""
        return range(max(len(row.tokens) - row.scored, self.shared - 1), len(row.tokens))

    @cached_property
    def asked(self) -> int:
        """The number of asked tokens: the `begun` ones once, then each row's own."""
        return len(self.begun) + sum(len(self.own(row)) - 1 + len(row.candidates) for row in self.rows)

    def answers(self, values: Float[np.ndarray, "P"], best: Bool[np.ndarray, "P"]) -> Iterator[Answer]:
        """Yield every request with its answer, from those of the asked tokens, in their order."""
        start = begun = len(self.begun)
        for row in self.rows:
            last = start + len(self.own(row)) - 1
            alike = slice(len(row.tokens) - row.scored - self.begun.start, begun)
            total = float(np.sum(values[alike], dtype=np.float64) + np.sum(values[start:last], dtype=np.float64))
            greedy = bool(np.all(best[alike]) and np.all(best[start:last]))
            for column, requests in enumerate(row.requests, last):
                answer = total + float(values[column]), greedy and bool(best[column])
                yield from ((request, answer) for request in requests)
            start = last + len(row.candidates)


def find_groups(rows: Sequence[Row], most: int) -> list[PrefixGroup]:
    """Return every row in one group, joined where that leaves less to compute.

    None grows longer than `most` tokens, nor than twice the longest row, or 256 if rows are short.
    """
    most = min(most, max(_ROOM, 2 * max((len(row.tokens) for row in rows), default=0)))
    groups: list[PrefixGroup] = []
    some: list[Row] = []
    shared = tokens = 0  # of `some`
    for row in sorted(rows, key=lambda row: row.tokens):
        if some:
            pairs = zip(some[-1].tokens[:shared], row.tokens, strict=False)
            alike = next((n for n, (a, b) in enumerate(pairs) if a != b), min(shared, len(row.tokens)))
            length = tokens + len(row.tokens) - len(some) * alike
            apart = _alone(tokens - (len(some) - 1) * shared) + _alone(len(row.tokens))
            if alike >= _SHORTEST and length <= most and _alone(length) < apart:
                some, shared, tokens = [*some, row], alike, tokens + len(row.tokens)
                continue
            groups.append(PrefixGroup(shared if len(some) > 1 else 0, tuple(some)))
        some, shared, tokens = [row], len(row.tokens), len(row.tokens)
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
        prefix_segment_ids: for an end the number of its group's shared tokens; for other tokens that of their own
            segment.
        logit_positions: for each of R equal parts of the rows, the places in its flattened `tokens` after which a token
            is asked. If these are few, a part is a row.
        targets: the asked tokens.
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
        """Yield every request with its answer, from those of the asked tokens."""
        rows = len(self.tokens) // len(self.logit_positions)
        for part, (of_part, best_of_part) in enumerate(zip(values, best, strict=True)):
            start = 0
            for group in chain.from_iterable(self.rows[part * rows : (part + 1) * rows]):
                asked = slice(start, start + group.asked)
                yield from group.answers(of_part[asked], best_of_part[asked])
                start = asked.stop


class _Shape(NamedTuple):
    rows: int
    length: int  # of a row, in tokens
    parts: int  # of the rows, equally large
    asked: int  # tokens of a part


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
        ordered = sorted(rows, key=_asked, reverse=True)
        parts = [ordered[start::count] for start in range(count)]
        part, asked = len(parts[0]), max(sum(map(_asked, rows_of_part)) for rows_of_part in parts)
        shape = _Shape(part * multiple, length, multiple, _padded(asked))
        of_a_row = _padded(_asked(ordered[0]))
        if _FEW * of_a_row <= length:  # row by row
            shape = shape._replace(parts=shape.rows, asked=of_a_row)
        joined = length > context or any(len(row) > 1 or len(row[0].rows) > 1 for row in rows)
        for start in range(0, count, multiple):
            together = [row for one in parts[start : start + multiple] for row in [*one, *[[]] * (part - len(one))]]
            found.append(_batch(together, shape, pad, joined))
    return sorted(found, key=lambda one: -one.tokens.size)


def _padded(tokens: int) -> int:
    return -(-tokens // MULTIPLE) * MULTIPLE


def _asked(row: _GroupRow) -> int:
    return sum(group.asked for group in row)


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
    whole, asked = (shape.rows, shape.length), (shape.parts, shape.asked)
    batch = Batch(
        tuple(map(tuple, rows)),
        np.full(whole, pad, np.int32),
        *(np.zeros(shape_of, np.int32) for shape_of in (whole, whole, whole, asked, asked)),
        joined=joined,
    )
    column = 0
    for index, row in enumerate(rows):
        if index % (shape.rows // shape.parts) == 0:
            column = 0
        start = number = 0
        for group in row:
            _fill(batch, index, group, start, column, number + 1)
            start, column, number = start + group.length, column + group.asked, number + 1 + len(group.rows)
    return batch


def _fill(batch: Batch, index: int, group: PrefixGroup, start: int, column: int, number: int) -> None:
    """Write a group into a row, from a token, an asked one and a segment's number on."""
    shared, begun = group.shared, slice(start, start + group.shared)
    part, row_of_part = divmod(index, len(batch.tokens) // len(batch.logit_positions))
    before = row_of_part * batch.tokens.shape[1]
    batch.tokens[index, begun] = group.rows[0].tokens[:shared]
    batch.positions[index, begun] = np.arange(shared)
    batch.segments[index, begun] = number
    batch.prefix_segment_ids[index, start : start + group.length] = number
    first = start
    start = begun.stop
    alike = slice(column, column + len(group.begun))
    batch.logit_positions[part, alike] = before + first + np.array(group.begun, np.int32)
    batch.targets[part, alike] = group.rows[0].tokens[group.begun.start + 1 : shared]
    column = alike.stop
    for own_number, row in enumerate(group.rows, number + 1):
        count = len(row.tokens)
        own = slice(start, start + count - shared)
        batch.tokens[index, own] = row.tokens[shared:]
        batch.positions[index, own] = np.arange(shared, count)
        batch.segments[index, own] = own_number
        asked = np.array(group.own(row))
        places = before + np.where(asked < shared, asked + first, asked - shared + start)
        targets = [*row.tokens[asked[0] + 1 :], *row.candidates]
        columns = slice(column, column + len(targets))
        batch.logit_positions[part, columns] = np.append(places, np.repeat(places[-1:], len(row.candidates) - 1))
        batch.targets[part, columns] = targets
        start, column = own.stop, columns.stop
