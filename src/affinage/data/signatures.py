"""Signatures of all documents in files, one per shard, so that a band can be read without the others."""

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from affinage.config.data import DedupSettings
from affinage.data.code_points import text_buffers
from affinage.data.executor import Executor, Progress
from affinage.data.minhash import sign

NAMES = ("id", "source")  # what ranks texts of equal length, in this order
CONTENT, CONTENT_2, SHINGLES, BYTES, FIRST_BAND = range(5)  # rows of a signature file, uint64 [4 + bands, documents]
_BYTES_PER_KEY = 100  # that sorting one text's hash or key takes, at most
CHUNK = 1 << 20  # documents looked at together where there is a number for each


class Shard(Protocol):
    """Some documents that are read in order, more than once, by several workers."""

    @property
    def rows(self) -> int:
        """How many documents."""

    def read(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The columns `id`, `source`, `text`, as far as asked for."""


@dataclass(frozen=True)
class _Task:
    shard: Shard
    path: Path
    settings: DedupSettings


@dataclass(frozen=True)
class Corpus:
    """Shards one after the other, a document's number being its place in them, and their signatures on disk."""

    shards: tuple[Shard, ...]
    starts: np.ndarray  # int64 [shards + 1]
    folder: Path

    @property
    def size(self) -> int:
        """Number of documents."""
        return int(self.starts[-1])

    def path(self, shard: int) -> Path:
        """The signatures of one shard."""
        return self.folder / f"signatures-{shard:06d}.npy"

    def signatures(self, shard: int) -> np.ndarray:
        """The signatures of one shard, mapped: uint64 [4 + bands, documents]."""
        return np.load(self.path(shard), mmap_mode="r" if self.shards[shard].rows else None)

    def per_document(self, name: str, dtype: type, fill: int | None = None) -> np.ndarray:
        """A new array on disk with a value for every document, `fill` or its number."""
        array = mapped_anew(self.folder / f"{name}.npy", dtype, max(self.size, 1))
        for start in range(0, self.size, CHUNK):
            stop = min(start + CHUNK, self.size)
            array[start:stop] = np.arange(start, stop) if fill is None else fill
        return array[: self.size]

    def known(self, name: str, shard: int | None = None) -> np.ndarray:
        """An array of `per_document`, for reading; of one shard."""
        array = np.load(self.folder / f"{name}.npy", mmap_mode="r")[: self.size]
        return array if shard is None else array[self.starts[shard] : self.starts[shard + 1]]

    def names(self, shard: int) -> pa.Table:
        """`NAMES` of all documents of one shard."""
        schema = pa.schema([(name, pa.string()) for name in NAMES])
        return pa.Table.from_batches([batch.select(NAMES) for batch in self.shards[shard].read(NAMES)], schema)


def sign_corpus(
    shards: Sequence[Shard], settings: DedupSettings, folder: Path, executor: Executor, progress: Progress | None
) -> Corpus:
    """Write the signatures of all shards into `folder`."""
    starts = np.concatenate([[0], np.cumsum([shard.rows for shard in shards], dtype=np.int64)]).astype(np.int64)
    corpus = Corpus(tuple(shards), starts, folder)
    tasks = [_Task(shard, corpus.path(number), settings) for number, shard in enumerate(shards)]
    executor.map(_sign_shard, tasks, threads=True, progress=progress)
    return corpus


def _sign_shard(task: _Task) -> None:
    parts = []
    for batch in task.shard.read(["text"]):
        text = batch.column("text")
        found = sign(
            text, ngram=task.settings.n_grams, bands=task.settings.num_buckets, rows=task.settings.hashes_per_bucket
        )
        numbers = np.array([found.shingles, np.diff(text_buffers(text)[1])], np.int64).astype(np.uint64)
        parts.append(np.vstack([found.content, numbers, found.keys]))
    nothing = np.zeros((FIRST_BAND + task.settings.num_buckets, 0), np.uint64)
    np.save(task.path, np.concatenate([nothing, *parts], axis=1))


def mapped_anew(path: Path, dtype: type, size: int) -> np.ndarray:
    """A new .npy file of `size` numbers as an array that is written where it is changed.

    Its room is taken at once: where a disk is full when a mapped page is written, the process would be killed by a
    signal (SIGBUS), without a word.
    """
    array: np.ndarray = np.lib.format.open_memmap(path, "w+", dtype, (size,))
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # file systems that cannot
                    raise
    return array


def ranges(documents: int, memory: int, workers: int) -> int:
    """Into how many ranges a hash of all documents must be cut so that `workers` can sort one each."""
    return max(1, -(-documents * _BYTES_PER_KEY * workers // memory))


def in_range(hashes: np.ndarray, part: int, count: int) -> np.ndarray:
    """Places of the hashes, uint64, that lie in range `part` of `count` equal ones."""
    if count == 1:
        return np.arange(hashes.size)
    width = 2**64 // count + 1
    first, last = part * width, min((part + 1) * width, 2**64) - 1
    return np.flatnonzero((hashes >= np.uint64(first)) & (hashes <= np.uint64(last)))
