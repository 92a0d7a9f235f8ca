"""Batches from token shards: batch = f(seed, step), for any number of processes, with no state to save or lose."""

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TypeVar

import numpy as np
from jaxtyping import Float, Integer

from affinage.data.mixture import Component, Group, Mixture, Weights
from affinage.data.row_order import RowOrder
from affinage.data.special_tokens import MARKS, Marks
from affinage.data.token_shards import TokenShards, find_shard_folders, open_shards
from affinage.errors import UserError

Batch = dict[str, np.ndarray]
T = TypeVar("T")

_REQUESTS = 8  # at the same time
_WINDOWS = 3  # held in memory: the one that is read, the one before it for a thread that is late, the next one


def segments(
    tokens: Integer[np.ndarray, "B S"], marks: Marks = MARKS
) -> tuple[Integer[np.ndarray, "B S"], Integer[np.ndarray, "B S"]]:
    """Return segment ids and positions (index within the segment), int32 [B, S].

    A segment begins with <s>, and after </s>: what follows there without <s> is the rest of a long document.
    """
    begins = np.zeros(tokens.shape, bool) if marks.begin is None else tokens == marks.begin
    begins[:, 1:] |= tokens[:, :-1] == marks.end
    segment_ids = np.cumsum(begins, axis=1, dtype=np.int32)
    index = np.arange(tokens.shape[1], dtype=np.int32)
    positions = index - np.maximum.accumulate(np.where(begins, index, np.int32(0)), axis=1)
    return segment_ids, positions


def make_batch(
    tokens: Integer[np.ndarray, "B S"],
    mask: Integer[np.ndarray, "B S"],
    rows: Integer[np.ndarray, " B"],
    marks: Marks = MARKS,
) -> Batch:
    """Return the batch that training reads.

    `tokens`, `segment_ids`, `positions` int32 [B, S]; `loss_mask` float32 [B, S], 1 where the token counts as a target
    (`mask`, but never <pad>); `rows` int32 [B], the row's place in the global batch.
    """
    segment_ids, positions = segments(tokens, marks)
    counted = mask.astype(bool)
    if marks.pad != marks.end:  # else the fill counts for nothing because no token of its segment comes before it
        counted &= tokens != marks.pad
    loss_mask: Float[np.ndarray, "B S"] = counted.astype(np.float32)
    return {
        "tokens": tokens,
        "segment_ids": segment_ids,
        "positions": positions,
        "loss_mask": loss_mask,
        "rows": rows.astype(np.int32),
    }


def read_rows(shards: TokenShards, rows: Integer[np.ndarray, " B"]) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens int32 [B, S] of rows by their numbers, and uint8 [B, S], 1 where they are trained on."""
    tokens = np.empty((len(rows), shards.seq_len), np.int32)
    mask = np.ones((len(rows), shards.seq_len), np.uint8)
    shards.read(rows, tokens, mask)
    return tokens, mask


class DataLoader:
    """Endless shuffled batches from one or several folders of token shards.

    Without a mixture, an epoch goes once through all rows of all folders. With one, every weight's rows have epochs of
    their own. Each epoch has its own order. Memory does not grow with the number of rows: those that are on this
    machine are mapped, of others a few blocks are held.
    """

    def __init__(
        self,
        folders: Path | Mapping[str, Path],
        *,
        seed: int,
        batch: int,
        mixture: Sequence[tuple[int, Weights]] | None = None,
    ) -> None:
        """`folders` are named, or one folder that holds shards or sub-folders of shards; `batch` is rows per step.

        `mixture` has the steps from which on weights hold, see `Mixture`. Raises UserError where there are no rows.
        """
        named = dict(folders) if isinstance(folders, Mapping) else find_shard_folders(folders)
        if not named:
            fix = "Run the step that writes token shards again."
            raise UserError("there are no token shards here", where=str(folders), fix=fix)
        self.shards = {name: open_shards(folder) for name, folder in sorted(named.items())}
        lengths = {name: shards.seq_len for name, shards in self.shards.items()}
        if len(set(lengths.values())) > 1:
            raise UserError(f"rows of different lengths cannot be mixed: {lengths}")
        self.context = next(iter(lengths.values()))
        self.batch_size = batch
        groups = {
            name: Group(shards.facts.get("source", ""), shards.facts.get("language", ""), shards.rows)
            for name, shards in self.shards.items()
        }
        self.mixture = Mixture(groups, mixture, batch)
        self._rows_of = {component: self._open(component, seed) for component in self.mixture.components}
        self.rows = sum(self.shards[name].rows for name in {name for of in self._rows_of for name in of})
        """Rows that are drawn from."""

    def _open(self, component: Component, seed: int) -> "_ComponentRows":
        name = "all" if len(component) == len(self.shards) else ",".join(component)
        return _ComponentRows([self.shards[group] for group in component], (seed, name))

    def where(self, step: int) -> list[tuple[str, int]]:
        """Return the folder and the row number of every row of the global batch of `step`."""
        places: dict[int, tuple[str, int]] = {}
        for component, lines, positions in self.mixture.draws(step * self.batch_size, self.batch_size):
            rows = self._rows_of[component]
            for line, row in zip(lines.tolist(), rows.order.rows_at(positions).tolist(), strict=True):
                folder, in_folder = rows.locate(row)
                places[line] = (component[folder], in_folder)
        return [places[line] for line in range(self.batch_size)]

    def steps_of(self, folder: str, row: int, steps: int) -> list[int]:
        """Return which of the first `steps` steps draw a row of a folder: the inverse of `where`."""
        found = []
        for component, rows in self._rows_of.items():
            if folder not in component:
                continue
            number = int(rows.starts[component.index(folder)]) + row
            for stage, index, first, last in self.mixture.uses(component, steps * self.batch_size):
                for epoch in range(first // rows.order.rows, -(-last // rows.order.rows)):
                    position = rows.order.position(number, epoch)
                    if first <= position < last:
                        found.append(stage.row_of(index, position) // self.batch_size)
        return sorted(found)

    def epochs(self, steps: int) -> dict[str, float]:
        """Return how often the first `steps` steps go through the rows of each folder."""
        drawn = self.mixture.drawn(steps * self.batch_size)
        return {name: rows / self.shards[name].rows for name, rows in drawn.items()}

    def batch(self, step: int, part: int = 0, parts: int = 1) -> Batch:
        """Return the batch of `step`, or the part of it that belongs to process `part` of `parts`; see `make_batch`."""
        share, first = _share(self.batch_size, part, parts)
        tokens = np.empty((share, self.context), np.int32)
        mask = np.ones((share, self.context), np.uint8)
        for component, lines, positions in self.mixture.draws(step * self.batch_size + first, share):
            self._rows_of[component].read(positions, lines, tokens, mask)
        rows = np.arange(first, first + share)
        return make_batch(tokens, mask, rows, next(iter(self.shards.values())).marks)

    def iterate(
        self, start_step: int = 0, part: int = 0, parts: int = 1, *, ahead: int = 8, threads: int = 2
    ) -> Iterator[Batch]:
        """Return batches from `start_step` on, for ever, `ahead` of them prepared by `threads` threads.

        Closing the iterator, or dropping it, ends the threads.
        """
        return prefetch(lambda step: self.batch(step, part, parts), start_step, ahead=ahead, threads=threads)

    def iterate_part(self, start_step: int, part: int, parts: int) -> Iterator[Batch]:
        """See `affinage.training.job.DivisibleFeed`."""
        return self.iterate(start_step, part, parts)


def _share(batch: int, part: int, parts: int) -> tuple[int, int]:
    """Rows of one part of a batch, and the first of them."""
    if batch % parts:
        raise UserError(f"a batch of {batch} rows does not divide over {parts} processes")
    return batch // parts, part * (batch // parts)


def prefetch(make: Callable[[int], T], start: int, *, ahead: int, threads: int) -> Iterator[T]:
    """Return `make(start)`, `make(start + 1)`, ... for ever, `ahead` of them made by `threads` threads in advance.

    Closing the iterator, or dropping it, ends the threads. An error of `make` is raised when its turn comes.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="batches")
    try:
        numbers = itertools.count(start)
        pending = deque(pool.submit(make, next(numbers)) for _ in range(max(ahead, 1)))
        while True:
            made = pending.popleft().result()
            pending.append(pool.submit(make, next(numbers)))
            yield made
    finally:
        pool.shutdown(cancel_futures=True)


class _ComponentRows:
    """The rows of some folders, numbered through, in an endless sequence of epochs."""

    def __init__(self, folders: Sequence[TokenShards], purpose: tuple[int | str, ...]) -> None:
        self.folders = tuple(folders)
        self.starts = np.cumsum([0, *(shards.rows for shards in folders)])
        self.order = RowOrder(int(self.starts[-1]), purpose)

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
        rows = self.order.rows_at(positions)
        if self._blocks is not None:
            numbers, within = np.divmod(rows, self.order.block)
            self._blocks.begin(numbers.tolist())
            self._blocks.prepare(self.order, int(positions.max()))
            for line, number, row in zip(at.tolist(), numbers.tolist(), within.tolist()):
                tokens[line] = self._blocks.get(number)[row]
            return
        folders = np.searchsorted(self.starts, rows, side="right") - 1
        for number, shards in enumerate(self.folders):
            here = folders == number
            if here.any():
                shards.read(rows[here] - self.starts[number], tokens, mask, at[here])

    @cached_property
    def _blocks(self) -> "_BlockCache | None":
        """Blocks of rows from elsewhere; None where all rows are on this machine."""
        if not any(shards.is_remote for shards in self.folders):
            return None
        return _BlockCache(self, _WINDOWS * (self.order.window + 1))

    def read_block(self, block: int) -> Integer[np.ndarray, "rows S"]:
        """The rows of a block."""
        first = block * self.order.block
        last = min(first + self.order.block, self.order.rows)
        parts = []
        for shards, start in zip(self.folders, self.starts.tolist()):
            low, high = max(first - start, 0), min(last - start, shards.rows)
            if low < high:
                parts.append(shards.read_range(low, high))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class _BlockCache:
    """Blocks of a component that were read lately or will be soon; several threads may use it."""

    def __init__(self, rows: _ComponentRows, keep: int) -> None:
        self._rows, self._keep = rows, keep
        self._lock = Lock()
        self._blocks: OrderedDict[int, Future[np.ndarray]] = OrderedDict()
        self._prepared = -1
        self._threads = ThreadPoolExecutor(_REQUESTS, thread_name_prefix="blocks")

    def begin(self, blocks: Iterable[int]) -> None:
        """Begin to read the blocks that are not there."""
        with self._lock:
            for block in dict.fromkeys(blocks):
                if block not in self._blocks:
                    self._blocks[block] = self._threads.submit(self._rows.read_block, block)
                self._blocks.move_to_end(block)
            while len(self._blocks) > self._keep:
                self._blocks.popitem(last=False)[1].cancel()

    def prepare(self, order: RowOrder, position: int) -> None:
        """Begin to read the rest of the window that holds a position, and the window after it."""
        window = order.window_of(position)
        if window > self._prepared:
            self._prepared = window
            upcoming = order.blocks_from(position)
            self.begin(next(upcoming))
            self.begin(next(upcoming))

    def get(self, block: int) -> np.ndarray:
        """The rows of a block, when they are there."""
        with self._lock:
            reading = self._blocks.get(block)
        if reading is None or reading.cancelled():
            return self._rows.read_block(block)
        try:
            return reading.result()
        except Exception:
            with self._lock:
                self._blocks.pop(block, None)  # so that it can be requested again
            raise


class ValidationRows:
    """Held-out rows in their order, in batches of one size; the last batch is filled up with rows that do not count."""

    def __init__(self, folder: Path, *, batch: int, limit: int | None = None) -> None:
        """With `limit`, that many rows are taken, evenly spaced over the folder."""
        self._shards = open_shards(folder)
        self.name = folder.name
        self.context = self._shards.seq_len
        self.batch_size = batch
        self.rows = self._shards.rows if limit is None else min(limit, self._shards.rows)
        self._chosen = np.arange(self.rows) * self._shards.rows // self.rows
        self.bytes = int(self._shards.row_bytes[self._chosen].sum())
        """UTF-8 bytes of the tokens that these rows predict: bits per byte = total nats / ln 2 / bytes."""

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-self.rows // self.batch_size)

    def rows_of(self, index: int) -> np.ndarray:
        """Return the numbers, in the folder, of the rows of batch `index`."""
        return self._chosen[index * self.batch_size :][: self.batch_size]

    def batch(self, index: int, part: int = 0, parts: int = 1) -> Batch:
        """Return batch `index`, or the part of it that belongs to process `part` of `parts`; see `make_batch`."""
        share, first = _share(self.batch_size, part, parts)
        chosen = self._chosen[index * self.batch_size + first :][:share]
        tokens = np.full((share, self.context), self._shards.marks.pad, np.int32)
        mask = np.zeros((share, self.context), np.uint8)
        tokens[: len(chosen)], mask[: len(chosen)] = read_rows(self._shards, chosen)
        return make_batch(tokens, mask, np.arange(first, first + share), self._shards.marks)

    def __iter__(self) -> Iterator[Batch]:
        return (self.batch(index) for index in range(len(self)))


def validation_sets(folder: Path, *, batch: int, limit: int | None = None) -> dict[str, ValidationRows]:
    """Return all folders of shards below `folder`, by name; none if there was no text to hold out."""
    return {name: ValidationRows(path, batch=batch, limit=limit) for name, path in find_shard_folders(folder).items()}
