"""Rows that are shuffled together: of several groups, on this machine or elsewhere."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from threading import Lock

import numpy as np
from jaxtyping import Integer

from affinage.data.row_files import RowFiles
from affinage.data.row_order import Shuffle

_REQUESTS = 8  # at the same time
_WINDOWS = 3  # held in memory: the one that is read, the one before it for a thread that is late, the next one


class PoolRows:
    """The rows of some folders, numbered through, in an endless sequence of epochs."""

    def __init__(self, folders: Sequence[RowFiles], purpose: tuple[int | str, ...]) -> None:
        self.folders = tuple(folders)
        self.starts = np.cumsum([0, *(files.rows for files in folders)])
        self.shuffle = Shuffle(int(self.starts[-1]), purpose)

    def locate(self, row: int) -> tuple[int, int]:
        """The folder, by its number, and the row in it."""
        folder = int(np.searchsorted(self.starts, row, side="right")) - 1
        return folder, row - int(self.starts[folder])

    def read(
        self,
        positions: Integer[np.ndarray, " n"],
        at: Integer[np.ndarray, " n"],
        tokens: Integer[np.ndarray, "B S"],
        mask: Integer[np.ndarray, "B S"],
    ) -> None:
        """Copy the rows at positions of the sequence into lines `at` of `tokens`, and what is trained into `mask`."""
        rows = self.shuffle.rows_at(positions)
        if self._blocks is not None:
            numbers, within = np.divmod(rows, self.shuffle.block)
            self._blocks.begin(numbers.tolist())
            self._blocks.prepare(self.shuffle, int(positions.max()))
            for line, number, row in zip(at.tolist(), numbers.tolist(), within.tolist()):
                tokens[line] = self._blocks.get(number)[row]
            return
        if len(self.folders) == 1:
            self.folders[0].read(rows, tokens, mask, at)
            return
        folders = np.searchsorted(self.starts, rows, side="right") - 1
        for number, files in enumerate(self.folders):
            here = folders == number
            if here.any():
                files.read(rows[here] - self.starts[number], tokens, mask, at[here])

    @cached_property
    def _blocks(self) -> "BlockCache | None":
        """Blocks of rows from elsewhere; None where all rows are on this machine."""
        if not any(files.is_remote for files in self.folders):
            return None
        return BlockCache(self, _WINDOWS * (self.shuffle.window + 1))

    def read_block(self, block: int) -> Integer[np.ndarray, "rows S"]:
        """The rows of a block."""
        first = block * self.shuffle.block
        last = min(first + self.shuffle.block, self.shuffle.rows)
        parts = []
        for files, start in zip(self.folders, self.starts.tolist()):
            low, high = max(first - start, 0), min(last - start, files.rows)
            if low < high:
                parts.append(files.read_range(low, high))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class BlockCache:
    """Blocks of a pool that were read lately or will be soon; several threads may use it."""

    def __init__(self, pool: PoolRows, keep: int) -> None:
        self._pool, self._keep = pool, keep
        self._lock = Lock()
        self._blocks: OrderedDict[int, Future[np.ndarray]] = OrderedDict()
        self._prepared = -1
        self._threads = ThreadPoolExecutor(_REQUESTS, thread_name_prefix="blocks")

    def begin(self, blocks: Iterable[int]) -> None:
        """Begin to read the blocks that are not there."""
        with self._lock:
            for block in dict.fromkeys(blocks):
                if block not in self._blocks:
                    self._blocks[block] = self._threads.submit(self._pool.read_block, block)
                self._blocks.move_to_end(block)
            while len(self._blocks) > self._keep:
                self._blocks.popitem(last=False)[1].cancel()

    def prepare(self, shuffle: Shuffle, position: int) -> None:
        """Begin to read the rest of the window that holds a position, and the window after it."""
        window = shuffle.window_of(position)
        if window > self._prepared:
            self._prepared = window
            upcoming = shuffle.blocks_from(position)
            self.begin(next(upcoming))
            self.begin(next(upcoming))

    def get(self, block: int) -> np.ndarray:
        """The rows of a block, when they are there."""
        with self._lock:
            reading = self._blocks.get(block)
        if reading is None or reading.cancelled():
            return self._pool.read_block(block)
        try:
            return reading.result()
        except Exception:
            with self._lock:
                self._blocks.pop(block, None)  # so that it can be asked for again
            raise
