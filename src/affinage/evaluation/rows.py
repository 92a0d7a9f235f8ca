"""From continuations to score to the rows that are run: what differs only in its last token shares a row."""

from collections.abc import Sequence
from dataclasses import dataclass, field

Pair = tuple[list[int], list[int]]  # ids of a context, and of the continuation whose probability is asked


@dataclass
class Row:
    """One forward pass over `tokens`, of which the last `scored - 1` are themselves scored.

    The continuation that was asked for is those tokens followed by one of `candidates`. `requests` are, for each
    candidate, the indices of the requests it answers.
    """

    tokens: tuple[int, ...]
    scored: int
    candidates: list[int] = field(default_factory=list)
    requests: list[list[int]] = field(default_factory=list)


def in_pieces(pairs: Sequence[Pair], context: int) -> tuple[list[Pair], list[int]]:
    """Pairs whose continuations fit the context, and for each the index of the pair it is (a piece of)."""
    pieces: list[Pair] = []
    owners: list[int] = []
    for index, (before, continuation) in enumerate(pairs):
        if 0 < len(continuation) <= context:  # nothing to score is no piece
            pieces.append((before, continuation))
            owners.append(index)
            continue
        step = max(1, context // 2)
        for start in range(0, len(continuation), step):
            pieces.append((before + continuation[:start], continuation[start : start + step]))
            owners.append(index)
    return pieces, owners


def group_requests(pairs: Sequence[Pair], context: int) -> list[Row]:
    """Rows for (context ids, continuation ids) pairs, each cut from the left to the last `context` inputs.

    The input of a pair is everything but its last token, as in the harness: (context + continuation)[-(length + 1):-1].
    Pairs with the same input and the same number of scored tokens become one row with several candidates.
    """
    rows: dict[tuple[tuple[int, ...], int], Row] = {}
    for index, (before, continuation) in enumerate(pairs):
        if not before or not continuation:
            raise ValueError("a pair to score needs at least one context token and one continuation token")
        if len(continuation) > context:
            raise ValueError(f"a continuation of {len(continuation)} tokens does not fit a context of {context}")
        tokens = tuple((before + continuation)[-(context + 1) : -1])
        row = rows.setdefault((tokens, len(continuation)), Row(tokens, len(continuation)))
        if continuation[-1] not in row.candidates:
            row.candidates.append(continuation[-1])
            row.requests.append([])
        row.requests[row.candidates.index(continuation[-1])].append(index)
    return list(rows.values())
