"""Rows of preference pairs with what the reference model says of them."""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Float

from affinage.data.batch import Batch
from affinage.data.feed import RowFeed
from affinage.data.validation_rows import ValidationRows

REFERENCE = "reference_log_probabilities"  # of the batch: float32 [B, documents]


class PreferenceFeed:
    """The batches of a feed, each with the reference's log-probabilities of its documents."""

    def __init__(self, rows: RowFeed, reference: Mapping[str, Float[np.ndarray, "rows documents"]]) -> None:
        """`reference` has an array for each folder of rows."""
        self._rows, self._reference = rows, reference

    def iterate(self, start_step: int) -> Iterator[Batch]:
        """Batches of steps start_step, start_step + 1, ..., without end."""
        return self.iterate_part(start_step, 0, 1)

    def iterate_part(self, start_step: int, part: int, parts: int) -> Iterator[Batch]:
        """See `affinage.training.job.DivisibleFeed`."""
        for step, batch in zip(itertools.count(start_step), self._rows.iterate(start_step, part, parts)):
            own = slice(part * len(batch["rows"]), (part + 1) * len(batch["rows"]))
            found = [self._reference[folder][row] for folder, row in self._rows.where(step)[own]]
            yield {**batch, REFERENCE: np.stack(found).astype(np.float32)}


class PreferenceRows:
    """Held-out pairs in a fixed order, with the reference's log-probabilities where they are known beforehand."""

    bytes = 0  # the loss is of pairs, not of text

    def __init__(self, rows: ValidationRows, reference: Float[np.ndarray, "rows documents"] | None) -> None:
        self._rows, self._reference = rows, reference

    def __iter__(self) -> Iterator[Batch]:
        if self._reference is None:
            yield from self._rows
            return
        for index, batch in enumerate(self._rows):
            found = np.zeros((len(batch["tokens"]), self._reference.shape[1]), np.float32)
            chosen = self._rows.rows_of(index)
            found[: len(chosen)] = self._reference[chosen]
            yield {**batch, REFERENCE: found}


def read_reference(folder: Path) -> dict[str, np.ndarray]:
    """The arrays of `folder` by the folders of rows they belong to."""
    return {path.stem: np.load(path, mmap_mode="r", allow_pickle=False) for path in sorted(folder.glob("*.npy"))}
