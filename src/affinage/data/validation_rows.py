"""Held-out rows, in the order in which they lie on disk."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from affinage.data.batch import Batch, make_batch, read_rows
from affinage.data.row_files import find_row_folders, open_rows
from affinage.errors import UserError


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

    def rows_of(self, index: int) -> np.ndarray:
        """Numbers, in the folder, of the rows of batch `index`."""
        return self._chosen[index * self.batch_size :][: self.batch_size]

    def batch(self, index: int, host: int = 0, hosts: int = 1) -> Batch:
        """Batch `index`, or the part of it that belongs to `host` of `hosts`; see `make_batch`."""
        if self.batch_size % hosts:
            raise UserError(f"a batch of {self.batch_size} rows does not divide over {hosts} hosts")
        share = self.batch_size // hosts
        places = np.arange(host * share, (host + 1) * share)
        chosen = self._chosen[index * self.batch_size + host * share :][:share]
        tokens = np.full((share, self.context), self._files.marks.pad, np.int32)
        mask = np.zeros((share, self.context), np.uint8)
        tokens[: len(chosen)], mask[: len(chosen)] = read_rows(self._files, chosen)
        return make_batch(tokens, mask, places, self._files.marks)

    def __iter__(self) -> Iterator[Batch]:
        return (self.batch(index) for index in range(len(self)))


def validation_sets(folder: Path, *, batch: int, limit: int | None = None) -> dict[str, ValidationRows]:
    """All folders of rows below `folder`, by name; none if there was no text to hold out."""
    return {name: ValidationRows(path, batch=batch, limit=limit) for name, path in find_row_folders(folder).items()}
