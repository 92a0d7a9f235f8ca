"""Which documents or conversations share a row, and where in it each of them lies."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Integer
from numpy.typing import DTypeLike

from affinage.data.compiled import kernel

Read = Callable[[int, int, int], np.ndarray]  # a document's tokens [start, stop)

PIECES_PER_WINDOW = 1_000_000  # among which best fit looks for company; more would gain nothing
_BLOCK = 4_000_000  # tokens handled at once, about 40 MB


def best_fit(lengths: Sequence[int] | Integer[np.ndarray, " items"], capacity: int) -> list[list[int]]:
    """Indices of `lengths` in bins of at most `capacity` each: every item goes where the least room is left over.

    Best-fit decreasing (Johnson et al., SIAM J. Comput. 3(4), 1974): at most 11/9 of the fewest bins, plus 4. Items
    of one length keep their order. Raises ValueError if an item is longer than `capacity`.
    """
    order, bins = _bins(np.asarray(lengths, np.int64), capacity)
    grouped = np.argsort(bins, kind="stable")
    ends = np.cumsum(np.bincount(bins)) if len(bins) else np.zeros(0, np.int64)
    return [order[members].tolist() for members in np.split(grouped, ends[:-1])] if len(ends) else []


def _bins(
    lengths: Integer[np.ndarray, " items"], capacity: int
) -> tuple[Integer[np.ndarray, " items"], Integer[np.ndarray, " items"]]:
    """Items from the longest to the shortest, and the bin of each; bins are numbered as they were opened."""
    if len(lengths) and lengths.max() > capacity:
        raise ValueError(f"an item of {lengths.max()} does not fit into {capacity}")
    order = np.argsort(-lengths, kind="stable")
    return order, _fit(lengths[order], capacity)


@kernel
def _fit(lengths, capacity):  # type: ignore[no-untyped-def]
    """The bin of every item. Bins wait in one stack per room that is left; a tree finds the first stack that has any.

    `tree` is a segment tree over rooms 0..capacity: 1 where some stack below the node is not empty.
    """
    leaves = 1
    while leaves < capacity + 1:
        leaves *= 2
    tree = np.zeros(2 * leaves, np.uint8)
    top = np.full(capacity + 1, -1, np.int64)  # of the stack of every room
    below = np.empty(len(lengths), np.int64)  # of every bin in its stack
    bins = np.empty(len(lengths), np.int64)
    opened = 0
    for item in range(len(lengths)):
        length = lengths[item]
        node = leaves + length
        while node > 1 and not tree[node]:
            while node > 1 and node % 2 == 1:
                node //= 2
            if node > 1:
                node += 1
        if node > 1:
            while node < leaves:
                node = 2 * node if tree[2 * node] else 2 * node + 1
            room = node - leaves
            chosen = top[room]
            top[room] = below[chosen]
            if top[room] < 0:
                _mark(tree, node, 0)
        else:
            room, chosen = capacity, opened
            opened += 1
        bins[item] = chosen
        left = room - length
        if top[left] < 0:
            _mark(tree, leaves + left, 1)
        below[chosen] = top[left]
        top[left] = chosen
    return bins


@kernel
def _mark(tree, node, value):  # type: ignore[no-untyped-def]
    tree[node] = value
    while node > 1:
        node //= 2
        tree[node] = tree[2 * node] | tree[2 * node + 1]


@dataclass(frozen=True)
class Layout:
    """Which piece of which document lies where. Pieces are sorted by row, and within a row by place."""

    rows: int
    document: Integer[np.ndarray, " pieces"]
    offset: Integer[np.ndarray, " pieces"]  # token of the document that the piece begins with
    row: Integer[np.ndarray, " pieces"]
    start: Integer[np.ndarray, " pieces"]  # place in the row
    length: Integer[np.ndarray, " pieces"]

    def blocks(
        self, read: Read, first: int, last: int, context: int, dtype: DTypeLike, *, fill: int = 0
    ) -> Iterator[np.ndarray]:
        """Rows [first, last) in blocks [b, context], filled up with `fill`; `read` gives tokens of a document."""
        height = max(1, _BLOCK // context)
        for begin in range(first, last, height):
            end = min(begin + height, last)
            block = np.full((end - begin, context), fill, dtype)
            low, high = np.searchsorted(self.row, [begin, end])
            columns = (self.document, self.offset, self.row, self.start, self.length)
            for document, offset, row, start, length in zip(*(column[low:high].tolist() for column in columns)):
                block[row - begin, start : start + length] = read(document, offset, offset + length)
            yield block

    @property
    def cut(self) -> Bool[np.ndarray, " documents"]:
        """Of every document whether no row holds the whole."""
        whole = np.ones(self.document.max(initial=-1) + 1, bool)
        whole[self.document[self.offset > 0]] = False
        return ~whole


def in_bins(bins: Sequence[Sequence[int]], lengths: Integer[np.ndarray, " documents"]) -> Layout:
    """Whole documents, a row for each bin, in the bin's order."""
    document = np.concatenate([np.array(members) for members in bins])
    row = np.repeat(np.arange(len(bins)), [len(members) for members in bins])
    length = lengths[document]
    return Layout(len(bins), document, np.zeros_like(document), row, _starts(row, length), length)


def _starts(row: Integer[np.ndarray, " pieces"], length: Integer[np.ndarray, " pieces"]) -> np.ndarray:
    """Where pieces lie that fill their rows from the left."""
    before = np.cumsum(length) - length
    return before - before[np.searchsorted(row, row)]


def end_to_end(lengths: Integer[np.ndarray, " documents"], context: int, overlap: int = 0) -> Layout:
    """Documents one after the other, cut wherever a row is full; a row begins with the last `overlap` tokens again."""
    stops = np.cumsum(lengths)
    starts, stride = stops - lengths, context - overlap
    total = int(stops[-1]) if len(stops) else 0
    rows = max(1, -(-(total - overlap) // stride))
    from_row = np.maximum(0, -(-(starts - context + 1) // stride))
    spans = np.minimum(rows - 1, (stops - 1) // stride) - from_row + 1
    document = np.repeat(np.arange(len(lengths)), spans)
    row = np.arange(spans.sum()) - np.repeat(np.cumsum(spans) - spans - from_row, spans)
    start = np.maximum(starts[document] - row * stride, 0)
    stop = np.minimum(stops[document] - row * stride, context)
    offset = row * stride + start - starts[document]
    order = np.argsort(row, kind="stable")
    layout = (document, offset, row, start, stop - start)
    return Layout(rows, *(column[order] for column in layout))


def whole_where_they_fit(
    lengths: Integer[np.ndarray, " documents"], context: int, window: int = PIECES_PER_WINDOW
) -> Layout:
    """Documents that fit into a row stay whole; longer ones fill rows of their own, and their rest joins the others.

    Best fit, longest first, among `window` pieces at a time, so that rows keep the order of documents by and large.
    """
    count = np.maximum(1, -(-lengths // context))
    document = np.repeat(np.arange(len(lengths)), count)
    offset = (np.arange(len(document)) - np.repeat(np.cumsum(count) - count, count)) * context
    length = np.minimum(lengths[document] - offset, context)
    row = np.empty(len(document), np.int64)
    rows = 0
    for first in range(0, len(document), window):
        order, bins = _bins(length[first : first + window], context)
        opened = int(bins.max()) + 1
        # Longest first is no order to train in: a row stands where its first document does.
        earliest = np.full(opened, len(order))
        np.minimum.at(earliest, bins, order)
        place = np.empty(opened, np.int64)
        place[np.argsort(earliest)] = np.arange(opened)
        row[first + order] = rows + place[bins]
        rows += opened
    by_row = np.argsort(row, kind="stable")
    document, offset, row, length = (column[by_row] for column in (document, offset, row, length))
    return Layout(max(rows, 1), document, offset, row, _starts(row, length), length)
