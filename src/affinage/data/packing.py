"""Which documents share a row of tokens, and where in it each of them lies."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Integer

from affinage.data.code_points import kernel


@dataclass(frozen=True)
class Layout:
    """Which piece of which document lies where. Pieces are sorted by row, and within a row by place."""

    rows: int
    document: Integer[np.ndarray, " pieces"]
    offset: Integer[np.ndarray, " pieces"]  # token of the document that the piece begins with
    row: Integer[np.ndarray, " pieces"]
    start: Integer[np.ndarray, " pieces"]  # place in the row
    length: Integer[np.ndarray, " pieces"]

    def fill(self, documents: Sequence[np.ndarray], seq_len: int, padding: int = 0) -> Integer[np.ndarray, "rows S"]:
        """Return the rows of what each document has for each of its tokens, such as their ids."""
        rows = np.full((self.rows, seq_len), padding, documents[0].dtype)
        columns = (self.document, self.offset, self.row, self.start, self.length)
        for document, offset, row, start, length in zip(*(column.tolist() for column in columns), strict=True):
            rows[row, start : start + length] = documents[document][offset : offset + length]
        return rows


def concatenate(lengths: Integer[np.ndarray, " documents"], seq_len: int, overlap: int = 0) -> Layout:
    """Lay documents end to end, cut wherever a row is full; a row begins with the last `overlap` tokens again."""
    ends = np.cumsum(lengths)
    starts, stride = ends - lengths, seq_len - overlap
    rows = max(1, -(-(int(lengths.sum()) - overlap) // stride))
    first_row = np.maximum(0, -(-(starts - seq_len + 1) // stride))
    spans = np.minimum(rows - 1, (ends - 1) // stride) - first_row + 1
    document = np.repeat(np.arange(len(lengths)), spans)
    row = np.arange(spans.sum()) - np.repeat(np.cumsum(spans) - spans - first_row, spans)
    start = np.maximum(starts[document] - row * stride, 0)
    end = np.minimum(ends[document] - row * stride, seq_len)
    offset = row * stride + start - starts[document]
    order = np.argsort(row, kind="stable")
    return Layout(rows, *(column[order] for column in (document, offset, row, start, end - start)))


def best_fit(lengths: Integer[np.ndarray, " documents"], seq_len: int) -> Layout:
    """Keep documents that fit into a row whole; longer ones fill rows of their own, and their rest joins the others.

    Best-fit decreasing (Johnson et al., SIAM J. Comput. 3(4), 1974): at most 11/9 of the fewest rows plus 4.
    """
    count = np.maximum(1, -(-lengths // seq_len))
    document = np.repeat(np.arange(len(lengths)), count)
    offset = (np.arange(len(document)) - np.repeat(np.cumsum(count) - count, count)) * seq_len
    length = np.minimum(lengths[document] - offset, seq_len)
    order = np.argsort(-length, kind="stable")
    bins = np.empty(len(document), np.int64)
    bins[order] = _fit(length[order], seq_len)
    # Longest first is no order to train in: a row stands where its first document does.
    _, earliest = np.unique(bins, return_index=True)
    row = np.argsort(np.argsort(earliest))[bins]
    by_row = np.argsort(row, kind="stable")
    document, offset, row, length = (column[by_row] for column in (document, offset, row, length))
    before = np.cumsum(length) - length
    return Layout(len(earliest), document, offset, row, before - before[np.searchsorted(row, row)], length)


@kernel
def _fit(lengths, capacity):  # type: ignore[no-untyped-def]
    """Return the bin of every item, longest first: the one in which the least room is left over.

    Bins wait in one stack per room that is left, 0 to `capacity`.
    """
    top = np.full(capacity + 1, -1, np.int64)  # of the stack of every room
    below = np.empty(len(lengths), np.int64)  # of every bin in its stack
    bins = np.empty(len(lengths), np.int64)
    opened = 0
    for item in range(len(lengths)):
        room = lengths[item]
        while room < capacity and top[room] < 0:
            room += 1
        chosen = top[room]
        if chosen < 0:
            chosen = opened
            opened += 1
        else:
            top[room] = below[chosen]
        bins[item] = chosen
        left = room - lengths[item]
        below[chosen] = top[left]
        top[left] = chosen
    return bins
