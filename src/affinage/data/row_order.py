"""The order in which rows are trained on: another one in each epoch, found and inverted by arithmetic.

Rows that follow each other on disk form blocks. Blocks are shuffled; then the rows of each window of blocks are
shuffled among each other. So a batch needs rows of a few blocks only, each read at once, and a window at a time is
enough to have near. Rows that all fit into one window are shuffled without blocks. The documents of a shard were
shuffled before they were packed: what a window adds is company of other places on disk.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Integer

from affinage.data.permutation import permuted

BLOCK = 512  # rows; 2 MB of 2,048 tokens in 16 bits, a good size for one request to an object store
WINDOW = 32  # blocks; 16,384 rows, or 34M tokens of context 2,048, are shuffled among each other


@dataclass(frozen=True)
class RowOrder:
    """An endless sequence of epochs of `rows` rows."""

    rows: int
    purpose: tuple[int | str, ...]  # what makes this order differ from others: the seed, and what is shuffled
    block: int = BLOCK
    window: int = WINDOW

    def rows_at(self, positions: Integer[np.ndarray, " n"]) -> Integer[np.ndarray, " n"]:
        """Return the rows at positions of the endless sequence, in any order."""
        epochs, indices = np.divmod(positions, self.rows)
        windows, offsets = np.divmod(indices, self.window * self.block)
        found = np.empty(len(positions), np.int64)
        for epoch, window in dict.fromkeys(zip(epochs.tolist(), windows.tolist())):  # of a batch mostly one
            here = (epochs == epoch) & (windows == window)
            first, height = self._extent(window)
            if height == self.rows:
                found[here] = permuted(offsets[here], height, *self.purpose, epoch)
                continue
            shuffled = first + permuted(offsets[here], height, *self.purpose, epoch, window)
            places, within = np.divmod(shuffled, self.block)
            found[here] = self._blocks(places, epoch) * self.block + within
        return found

    def position(self, row: int, epoch: int) -> int:
        """Return where a row stands in an epoch: the inverse of `rows_at`."""
        if self.window * self.block >= self.rows:
            return epoch * self.rows + _one(row, self.rows, *self.purpose, epoch)
        block, within = divmod(row, self.block)
        whole = self.rows // self.block
        at = _one(block, whole, *self.purpose, epoch, "blocks") if block < whole else block
        window, shuffled = divmod(at * self.block + within, self.window * self.block)
        first, height = self._extent(window)
        return epoch * self.rows + first + _one(shuffled, height, *self.purpose, epoch, window)

    def window_of(self, position: int) -> int:
        """Return the number of the window that holds a position, counted over all epochs."""
        epoch, index = divmod(position, self.rows)
        windows = -(-self.rows // (self.window * self.block))
        return epoch * windows + index // (self.window * self.block)

    def blocks_from(self, position: int) -> Iterator[list[int]]:
        """Return the blocks of the window that holds a position, then those of the windows after it, without end."""
        epoch, index = divmod(position, self.rows)
        window = index // (self.window * self.block)
        while True:
            first, height = self._extent(window)
            places = np.arange(first // self.block, -(-(first + height) // self.block))
            yield self._blocks(places, epoch).tolist()
            window += 1
            if window * self.window * self.block >= self.rows:
                epoch, window = epoch + 1, 0

    def _extent(self, window: int) -> tuple[int, int]:
        """First index and number of rows of a window."""
        first = window * self.window * self.block
        return first, min(self.window * self.block, self.rows - first)

    def _blocks(self, places: Integer[np.ndarray, " n"], epoch: int) -> Integer[np.ndarray, " n"]:
        """The blocks that stand at places of an epoch. The last one, if it is shorter, keeps its place."""
        whole = self.rows // self.block
        found = places.copy()
        if self.window * self.block < self.rows:
            found[places < whole] = permuted(places[places < whole], whole, *self.purpose, epoch, "blocks")
        return found


def _one(place: int, size: int, *purpose: int | str) -> int:
    return int(permuted(np.array([place]), size, *purpose, inverse=True)[0])
