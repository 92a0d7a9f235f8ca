"""Batches from packed rows: batch = f(seed, step), for any number of hosts, with no loader state to save or lose."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from affinage.data.ahead import made_ahead
from affinage.data.batch import Batch, make_batch
from affinage.data.mixture import Group, Mixture, Pool, Weights
from affinage.data.pool import PoolRows
from affinage.data.row_files import find_row_folders, open_rows
from affinage.errors import UserError


class RowFeed:
    """Endless shuffled batches from one or several folders of rows.

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
        """`folders` are named, or one folder that holds rows or sub-folders of rows; `batch` is rows per step.

        `mixture` has the steps from which on weights hold, see `Mixture`. Raises UserError where there are no rows.
        """
        named = dict(folders) if isinstance(folders, Mapping) else find_row_folders(folders)
        if not named:
            raise UserError("there are no rows here", where=str(folders), fix="run the stage that packs rows again")
        self._files = {name: open_rows(folder) for name, folder in sorted(named.items())}
        contexts = {name: files.context for name, files in self._files.items()}
        if len(set(contexts.values())) > 1:
            raise UserError(f"rows of different lengths cannot be mixed: {contexts}")
        self.context = next(iter(contexts.values()))
        self.batch_size = batch
        groups = {
            name: Group(files.facts.get("source", ""), files.facts.get("language", ""), files.rows)
            for name, files in self._files.items()
        }
        self.mixture = Mixture(groups, mixture, batch)
        self._pools = {pool: self._open(pool, seed) for pool in self.mixture.pools}
        self.rows = sum(self._files[name].rows for name in {name for pool in self._pools for name in pool})
        """Rows that are drawn from."""

    def _open(self, pool: Pool, seed: int) -> PoolRows:
        name = "all" if len(pool) == len(self._files) else ",".join(pool)
        return PoolRows([self._files[group] for group in pool], (seed, name))

    @property
    def tokens_per_batch(self) -> int:
        """Tokens in a global batch, <pad> included."""
        return self.batch_size * self.context

    def where(self, step: int) -> list[tuple[str, int]]:
        """Folder and row number of every row of the global batch of `step`."""
        places: dict[int, tuple[str, int]] = {}
        for pool, lines, positions in self.mixture.draws(step * self.batch_size, self.batch_size):
            rows = self._pools[pool]
            for line, row in zip(lines.tolist(), rows.shuffle.rows_at(positions).tolist(), strict=True):
                folder, in_folder = rows.locate(row)
                places[line] = (pool[folder], in_folder)
        return [places[line] for line in range(self.batch_size)]

    def steps_of(self, folder: str, row: int, steps: int) -> list[int]:
        """Which of the first `steps` steps draw a row of a folder: the inverse of `where`."""
        found = []
        for pool, rows in self._pools.items():
            if folder not in pool:
                continue
            number = int(rows.starts[pool.index(folder)]) + row
            for stage, index, first, last in self.mixture.uses(pool, steps * self.batch_size):
                for epoch in range(first // rows.shuffle.rows, -(-last // rows.shuffle.rows)):
                    position = rows.shuffle.position(number, epoch)
                    if first <= position < last:
                        found.append(stage.row_of(index, position) // self.batch_size)
        return sorted(found)

    def epochs(self, steps: int) -> dict[str, float]:
        """How often the first `steps` steps go through the rows of each folder."""
        drawn = self.mixture.drawn(steps * self.batch_size)
        return {name: rows / self._files[name].rows for name, rows in drawn.items()}

    def batch(self, step: int, host: int = 0, hosts: int = 1) -> Batch:
        """The batch of `step`, or the part of it that belongs to `host` of `hosts`; see `make_batch`."""
        if self.batch_size % hosts:
            raise UserError(f"a batch of {self.batch_size} rows does not divide over {hosts} hosts")
        share = self.batch_size // hosts
        first = host * share
        tokens = np.empty((share, self.context), np.int32)
        mask = np.ones((share, self.context), np.uint8)
        for pool, lines, positions in self.mixture.draws(step * self.batch_size + first, share):
            self._pools[pool].read(positions, lines, tokens, mask)
        rows = np.arange(first, first + share)
        return make_batch(tokens, mask, rows, next(iter(self._files.values())).marks)

    def iterate(
        self, start_step: int = 0, host: int = 0, hosts: int = 1, *, prefetch: int = 8, threads: int = 2
    ) -> Iterator[Batch]:
        """Batches from `start_step` on, for ever, `prefetch` of them prepared ahead by `threads` threads.

        Closing the iterator, or dropping it, ends the threads.
        """
        yield from made_ahead(
            lambda step: self.batch(step, host, hosts), start_step, ahead=max(prefetch, 1), threads=threads
        )

    def iterate_part(self, start_step: int, part: int, parts: int) -> Iterator[Batch]:
        """See `affinage.training.job.DivisibleFeed`."""
        return self.iterate(start_step, part, parts)
