"""From continuations to score to batches: few shapes, little padding, and shared prefixes computed once.

Rows that begin alike are a prefix group, in which the shared tokens stand once, and each row's end sees them and
itself. Groups are packed into rows of few lengths.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from affinage.errors import UserError

MULTIPLE = 8  # of every length, for the sake of the hardware
Pair = tuple[list[int], list[int]]  # ids of a context, and of the continuation to score
Answer = tuple[int, tuple[float, bool]]  # a request, with its log-probability and whether it is greedy


class Row(NamedTuple):
    """A text without its last token, of which the last tokens are `targets`, to score for a request."""

    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    request: int

    @property
    def first(self) -> int:
        """The place after which the first target stands."""
        return len(self.tokens) - len(self.targets)


def as_rows(pairs: Sequence[Pair], context: int) -> list[Row]:
    """Return rows for (context ids, continuation ids) pairs, each cut from the left to the last `context` inputs.

    The input of a pair is everything but its last token, as in the harness: (context + continuation)[-(length + 1):-1].
    """
    rows = []
    for index, (before, continuation) in enumerate(pairs):
        if not before or not continuation:
            raise ValueError("a pair needs at least one token of context, and one of continuation")
        if len(continuation) > context:
            what = f"a choice has {len(continuation):,} tokens, and the model reads {context:,}"
            raise UserError(what, fix="Leave the task out, or take a model with a longer context.")
        rows.append(Row(tuple((before + continuation)[-(context + 1) : -1]), tuple(continuation), index))
    return rows


# ---- groups ----

_SHORTEST = 8  # shared tokens that are worth a group, and
_SHARE = 1 / 4  # of a row's tokens, too
_ROOM = 256  # tokens of a group of short rows, at most


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


def find_groups(rows: Sequence[Row], most: int) -> list[PrefixGroup]:
    """Return every row in one group, joined with others that begin alike.

    None grows longer than `most` tokens, nor than twice the longest row, or 256 if rows are short.
    """
    most = min(most, max(_ROOM, 2 * max((len(row.tokens) for row in rows), default=0)))
    groups: list[PrefixGroup] = []
    for row in sorted(rows, key=lambda row: (row.tokens, row.request)):
        if groups:
            last = groups[-1]
            limit = min(last.shared or last.rows[0].first + 1, row.first + 1)
            pairs = zip(last.rows[-1].tokens[:limit], row.tokens, strict=False)
            alike = next((n for n, (a, b) in enumerate(pairs) if a != b), limit)
            joined = PrefixGroup(alike, (*last.rows, row))
            if alike >= max(_SHORTEST, _SHARE * len(row.tokens)) and joined.length <= most:
                groups[-1] = joined
                continue
        groups.append(PrefixGroup(0, (row,)))
    return groups


# ---- batches ----

# Tokens of a row that short groups are put into. Which of them leaves little padding depends on the groups: of
# those of 50 tokens 192 hold three, and 256 five.
_ROOMS = (192, 256, 320, 448, 576)
# Keys whose attention costs a token as much as the rest of a layer; 1,750 is of a narrow model on CPUs.
_EQUAL = 1750
# If at most one in four of a row's tokens is scored, the last layer's attention computes these alone.
_FEW = 4
_GroupRow = list[PrefixGroup]


@dataclass(frozen=True)
class Batch:
    """Rows of groups, padded to one shape.

    Attributes:
        tokens: of a group the shared ones, then the ends of its rows one after the other, each at the `positions` that
            follow the shared ones.
        segments: a number for the shared tokens, and for each end.
        prefix_segment_ids: for an end the number of its group's shared tokens; for other tokens their own segment's.
        logit_positions: for each of R equal parts of the rows, the places in its flattened `tokens` after which targets
            stand. If these are few, a part is a row.
        targets: the tokens to score.
        requests: for each part, the requests in the order of their targets, each with their number.
        joined: a row of this length may be more than one sequence, or longer than one.
    """

    tokens: Int[np.ndarray, "B S"]
    positions: Int[np.ndarray, "B S"]
    segments: Int[np.ndarray, "B S"]
    prefix_segment_ids: Int[np.ndarray, "B S"]
    logit_positions: Int[np.ndarray, "R P"]
    targets: Int[np.ndarray, "R P"]
    requests: list[list[tuple[int, int]]]
    joined: bool

    def answers(self, values: Float[np.ndarray, "R P"], best: Bool[np.ndarray, "R P"]) -> Iterator[Answer]:
        """Yield every request with its answer, from those of the targets."""
        for part, requests in enumerate(self.requests):
            start = 0
            for request, count in requests:
                own = slice(start, start + count)
                yield request, (float(np.sum(values[part, own], dtype=np.float64)), bool(np.all(best[part, own])))
                start += count


def batches(
    groups: Sequence[PrefixGroup],
    tokens: int,
    *,
    context: int,
    most: int,
    pad: int,
    multiple: int,
    packed: bool = True,
) -> list[Batch]:
    """Return batches of few shapes, the longest first so that memory runs out at once or never.

    Args:
        groups: to be computed.
        tokens: in a batch at most, if that is more than a row.
        context: tokens of the model's rows.
        most: tokens of a row with several groups, unless one group is longer.
        pad: the id of padding.
        multiple: the number of rows is a multiple of it.
        packed: a row may hold several groups.
    """
    made: list[Batch] = []
    for length, rows in _cheapest(groups, context, most if packed else 0).items():
        # The scores of attention grow with the square of the length.
        fitting = max(1, int(tokens * min(1, context / length)) // (length * multiple)) * multiple
        count = -(-len(rows) // fitting) * multiple  # parts of all batches, all as full as one another
        rows = sorted(rows, key=_targets, reverse=True)
        parts = [rows[start::count] for start in range(count)]
        columns, of_part = _padded(max(sum(map(_targets, part)) for part in parts)), len(parts[0])
        padded = [row for part in parts for row in [*part, *[[]] * (of_part - len(part))]]
        of_batch = of_part * multiple
        if _FEW * _padded(_targets(rows[0])) <= length:  # row by row
            columns, of_part = _padded(_targets(rows[0])), 1
        joined = length > context or any(len(row) > 1 or len(row[0].rows) > 1 for row in rows)
        for start in range(0, len(padded), of_batch):
            made.append(_batch(padded[start : start + of_batch], length, of_part, columns, pad, joined))
    return sorted(made, key=lambda batch: -batch.tokens.size)


def _padded(tokens: int) -> int:
    return -(-tokens // MULTIPLE) * MULTIPLE


def _targets(row: _GroupRow) -> int:
    return sum(group.targets for group in row)


def _cheapest(groups: Sequence[PrefixGroup], context: int, most: int) -> dict[int, list[_GroupRow]]:
    """The groups of each row, by the two lengths of rows; with 0 for `most` one in each."""
    longest_first = sorted(groups, key=lambda group: (-group.length, group.rows[0].tokens))
    largest = max((group.length for group in groups), default=0)
    longest = min(context, _padded(largest)) if largest <= context else _padded(largest)

    def price(rows: dict[int, list[_GroupRow]]) -> float:
        return sum(len(alike) * length * (1 + length / _EQUAL) for length, alike in rows.items())

    rooms = [longest, *(room for room in _ROOMS if room <= most)]
    ways = [_packed(longest_first, sorted({room, max(room, longest)}), packed=most > 0) for room in rooms]
    return min(ways, key=price)


def _packed(longest_first: Sequence[PrefixGroup], sizes: Sequence[int], *, packed: bool) -> dict[int, list[_GroupRow]]:
    """Rows of `sizes`; each group goes where the least room is left over, or into a new row that is long enough."""
    rows: dict[int, list[_GroupRow]] = {}
    every: list[_GroupRow] = []
    left: list[tuple[int, int]] = []  # tokens that rows have left, ascending, and their places in `every`
    for group in longest_first:
        place = bisect_left(left, (group.length, 0))
        if packed and place < len(left):
            space, number = left.pop(place)
        else:
            space, number = next(size for size in sizes if size >= group.length), len(every)
            every.append([])
            rows.setdefault(space, []).append(every[number])
        every[number].append(group)
        insort(left, (space - group.length, number))
    return rows


def _batch(rows: Sequence[_GroupRow], length: int, of_part: int, columns: int, pad: int, joined: bool) -> Batch:
    """A batch of rows, of which `of_part` are a part with `columns` targets."""
    parts = len(rows) // of_part
    positions, segments, prefixes = (np.zeros((len(rows), length), np.int32) for _ in range(3))
    places, targets = (np.zeros((parts, columns), np.int32) for _ in range(2))
    tokens, requests = np.full((len(rows), length), pad, np.int32), [list[tuple[int, int]]() for _ in range(parts)]
    for index, groups in enumerate(rows):
        part, place_in_part = divmod(index, of_part)
        column = sum(count for _, count in requests[part])
        start = number = 0
        for group in groups:
            first, shared, number = start, group.shared, number + 1
            prefixes[index, first : first + group.length] = number
            tokens[index, first : first + shared] = group.rows[0].tokens[:shared]
            positions[index, first : first + shared] = np.arange(shared)
            segments[index, first : first + shared] = number
            start += shared
            for row in group.rows:
                number += 1
                own = slice(start, start + len(row.tokens) - shared)
                tokens[index, own] = row.tokens[shared:]
                positions[index, own] = np.arange(shared, len(row.tokens))
                segments[index, own] = number
                # A target may stand after the last of the shared tokens.
                after = np.arange(row.first, len(row.tokens))
                count = len(row.targets)
                places[part, column : column + count] = place_in_part * length + np.where(
                    after < shared, after + first, after - shared + start
                )
                targets[part, column : column + count] = row.targets
                requests[part].append((row.request, count))
                start, column = own.stop, column + count
    return Batch(tokens, positions, segments, prefixes, places, targets, requests, joined)
