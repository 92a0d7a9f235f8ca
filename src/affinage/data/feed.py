"""Batches from packed rows: batch = f(seed, step), for any number of hosts, with no loader state to save or lose."""

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from jaxtyping import Float, Integer

from affinage.data.permutation import permuted
from affinage.data.row_files import RowFiles, find_row_folders, open_rows
from affinage.data.special_tokens import BOS, PAD
from affinage.errors import UserError

Batch = dict[str, np.ndarray]

MIXTURE_BLOCK = 1024  # rows over which weights hold, rounded to whole rows: to a tenth of a percent


def segments(tokens: Integer[np.ndarray, "B S"]) -> tuple[Integer[np.ndarray, "B S"], Integer[np.ndarray, "B S"]]:
    """Segment ids (how many <s> the row has had so far) and positions (index within the segment), int32 [B, S]."""
    begins = tokens == BOS
    segment_ids = np.cumsum(begins, axis=1, dtype=np.int32)
    index = np.arange(tokens.shape[1], dtype=np.int32)
    positions = index - np.maximum.accumulate(np.where(begins, index, np.int32(0)), axis=1)
    return segment_ids, positions


def make_batch(
    tokens: Integer[np.ndarray, "B S"], mask: Integer[np.ndarray, "B S"], rows: Integer[np.ndarray, " B"]
) -> Batch:
    """The batch that training reads.

    `tokens`, `segment_ids`, `positions` int32 [B, S]; `loss_mask` float32 [B, S], 1 where the token counts as a target
    (`mask`, but never <pad>); `rows` int32 [B], the row's place in the global batch.
    """
    segment_ids, positions = segments(tokens)
    loss_mask: Float[np.ndarray, "B S"] = (mask.astype(bool) & (tokens != PAD)).astype(np.float32)
    return {
        "tokens": tokens,
        "segment_ids": segment_ids,
        "positions": positions,
        "loss_mask": loss_mask,
        "rows": rows.astype(np.int32),
    }


def _read(files: RowFiles, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.empty((len(rows), files.context), np.int32)
    mask = np.ones((len(rows), files.context), np.uint8)
    files.read(rows, tokens, mask)
    return tokens, mask


class RowFeed:
    """Endless shuffled batches from one or several folders of rows.

    Without weights, an epoch goes once through all rows of all folders. With weights, each folder has epochs of its
    own, and they take turns in a fixed pattern of 1,024 rows that holds them in the given proportions. Each epoch has
    its own order. Memory does not grow with the number of rows.
    """

    def __init__(
        self,
        folders: Path | Mapping[str, Path],
        *,
        seed: int,
        batch: int,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        """`folders` are named, or one folder that holds rows or sub-folders of rows; `batch` is rows per step.

        Raises UserError where there are no rows, or weights name no folder.
        """
        named = dict(folders) if isinstance(folders, Mapping) else find_row_folders(folders)
        if not named:
            raise UserError("there are no rows here", where=str(folders), fix="run the stage that packs rows again")
        if weights is not None:
            named = {name: named[name] for name in _weighted(weights, named)}
        self._files = {name: open_rows(folder) for name, folder in sorted(named.items())}
        contexts = {name: files.context for name, files in self._files.items()}
        if len(set(contexts.values())) > 1:
            raise UserError(f"rows of different lengths cannot be mixed: {contexts}")
        self.context = next(iter(contexts.values()))
        self.batch_size = batch
        self._seed = seed
        self._names = list(self._files)
        heights = [files.rows for files in self._files.values()]
        self.rows = sum(heights)  # in all folders
        self._starts = np.cumsum([0, *heights])
        self._mixture = None if weights is None else _mixture([weights[name] for name in self._names])

    @property
    def tokens_per_batch(self) -> int:
        """Tokens in a global batch, <pad> included."""
        return self.batch_size * self.context

    def where(self, step: int) -> list[tuple[str, int]]:
        """Folder and row number of every row of the global batch of `step`."""
        places = (self._place(step * self.batch_size + i) for i in range(self.batch_size))
        return [(self._names[folder], row) for folder, row in places]

    def _place(self, position: int) -> tuple[int, int]:
        """Folder and row at a position of the endless shuffled sequence of rows."""
        if self._mixture is None:
            row = self._shuffled(position, self.rows, "all")
            folder = int(np.searchsorted(self._starts, row, side="right")) - 1
            return folder, row - int(self._starts[folder])
        folders, ranks, counts = self._mixture
        block, slot = divmod(position, MIXTURE_BLOCK)
        folder = folders[slot]
        name = self._names[folder]
        return folder, self._shuffled(block * counts[folder] + ranks[slot], self._files[name].rows, name)

    def _shuffled(self, position: int, rows: int, name: str) -> int:
        """Row at a position of the endless sequence of epochs of `rows` rows."""
        epoch, index = divmod(position, rows)
        return permuted(index, rows, self._seed, name, epoch)

    def batch(self, step: int, host: int = 0, hosts: int = 1) -> Batch:
        """The batch of `step`, or the part of it that belongs to `host` of `hosts`; see `make_batch`."""
        if self.batch_size % hosts:
            raise UserError(f"a batch of {self.batch_size} rows does not divide over {hosts} hosts")
        share = self.batch_size // hosts
        rows = np.arange(host * share, (host + 1) * share)
        places = [self._place(step * self.batch_size + int(row)) for row in rows]
        folder, row_in_folder = (np.array(column) for column in zip(*places))
        tokens = np.empty((share, self.context), np.int32)
        mask = np.ones((share, self.context), np.uint8)
        for number, files in enumerate(self._files.values()):
            here = np.flatnonzero(folder == number)
            if len(here):
                tokens[here], mask[here] = _read(files, row_in_folder[here])
        return make_batch(tokens, mask, rows)

    def iterate(
        self, start_step: int = 0, host: int = 0, hosts: int = 1, *, prefetch: int = 4, threads: int = 2
    ) -> Iterator[Batch]:
        """Batches from `start_step` on, for ever, `prefetch` of them prepared ahead by `threads` threads.

        Closing the iterator, or dropping it, ends the threads.
        """
        with ThreadPoolExecutor(threads, thread_name_prefix="feed") as pool:
            ahead: deque[Future[Batch]] = deque()
            step = start_step
            try:
                while True:
                    while len(ahead) < max(prefetch, 1):
                        ahead.append(pool.submit(self.batch, step, host, hosts))
                        step += 1
                    yield ahead.popleft().result()
            finally:
                for future in ahead:
                    future.cancel()


def _weighted(weights: Mapping[str, float], named: Mapping[str, Path]) -> list[str]:
    """Names with a weight above zero, all of which must be folders."""
    for name, weight in weights.items():
        if name not in named:
            raise UserError(
                f"a weight for {name!r}, but there are no rows of it", fix=f"rows there are: {', '.join(sorted(named))}"
            )
        if not 0 <= weight < float("inf"):
            raise UserError(f"the weight of {name!r} is {weight}", fix="weights are numbers from 0 up")
    chosen = sorted(name for name, weight in weights.items() if weight > 0)
    if not chosen:
        raise UserError("all weights are zero")
    return chosen


def _mixture(weights: list[float]) -> tuple[list[int], list[int], list[int]]:
    """The order in which folders take turns in a block of rows: folder and rank of every slot, rows of every folder.

    A folder's rows are spread evenly over the block. Their numbers are rounded by largest remainder, to at least one.
    """
    shares = np.array(weights) / sum(weights) * MIXTURE_BLOCK
    counts = np.maximum(np.floor(shares).astype(np.int64), 1)
    missing = MIXTURE_BLOCK - int(counts.sum())
    counts[np.argsort(counts - shares, kind="stable")[: max(missing, 0)]] += 1
    counts[np.argmax(counts)] += min(missing, 0)
    folders = np.repeat(np.arange(len(counts)), counts)
    ranks = np.concatenate([np.arange(count) for count in counts])
    order = np.argsort((ranks + 0.5) / counts[folders], kind="stable")
    return folders[order].tolist(), ranks[order].tolist(), counts.tolist()


class ValidationRows:
    """Held-out rows in their order, in batches of one size; the last batch is filled up with rows that do not count."""

    def __init__(self, folder: Path, *, batch: int, limit: int | None = None) -> None:
        """With `limit`, that many rows are taken, evenly spaced over the folder."""
        self._files = open_rows(folder)
        self.name = folder.name
        self.context = self._files.context
        self.batch_size = batch
        self.rows = self._files.rows if limit is None else min(limit, self._files.rows)
        self._chosen = np.arange(self.rows) * self._files.rows // self.rows
        self.bytes = int(np.load(folder / "bytes.npy", allow_pickle=False)[self._chosen].sum())
        """UTF-8 bytes of the tokens that these rows predict: bits per byte = total nats / ln 2 / bytes."""

    def __len__(self) -> int:
        """Number of batches."""
        return -(-self.rows // self.batch_size)

    def batch(self, index: int, host: int = 0, hosts: int = 1) -> Batch:
        """Batch `index`, or the part of it that belongs to `host` of `hosts`; see `make_batch`."""
        if self.batch_size % hosts:
            raise UserError(f"a batch of {self.batch_size} rows does not divide over {hosts} hosts")
        share = self.batch_size // hosts
        places = np.arange(host * share, (host + 1) * share)
        chosen = self._chosen[index * self.batch_size + host * share :][:share]
        tokens = np.full((share, self.context), PAD, np.int32)
        mask = np.zeros((share, self.context), np.uint8)
        tokens[: len(chosen)], mask[: len(chosen)] = _read(self._files, chosen)
        return make_batch(tokens, mask, places)

    def __iter__(self) -> Iterator[Batch]:
        return (self.batch(index) for index in range(len(self)))


def validation_sets(folder: Path, *, batch: int, limit: int | None = None) -> dict[str, ValidationRows]:
    """All folders of rows below `folder`, by name; none if there was no text to hold out."""
    return {name: ValidationRows(path, batch=batch, limit=limit) for name, path in find_row_folders(folder).items()}
