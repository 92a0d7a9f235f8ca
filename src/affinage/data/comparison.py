"""The comparison of candidates for near duplicates: from the best text to the worst, with those that were kept."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from affinage.data.compiled import kernel
from affinage.data.exchange import read_part
from affinage.data.minhash import jaccard
from affinage.data.signatures import NAMES, Corpus, mapped_anew

MAX_COMPARED = 256  # kept texts of one bucket that a text is compared with, the nearest in size first
FOUND = np.dtype([("document", np.int64), ("kept", np.int64), ("similarity", np.float64)])
COPIES_IN_MEMORY = 4  # of a batch's shingle sets while it is read and compared


@dataclass(frozen=True)
class Batch:
    """Some whole components, to be compared."""

    corpus: Corpus
    batch: int
    threshold: float
    room: int  # shingles that may be in memory; more are in a mapped file

    @property
    def path(self) -> Path:
        """Where what is found goes."""
        return self.corpus.folder / f"found-{self.batch:05d}.npy"


def candidates_path(corpus: Corpus, shard: int) -> Path:
    """Where a shard's candidates are: a table of `document`, NAMES, `bytes`, `content`, `keys` and `shingles`."""
    return corpus.folder / f"candidates-{shard:06d}.arrow"


def compare(task: Batch) -> tuple[int, int]:
    """Find the near copies in one batch; how many pairs were compared, and how many texts not with all of a bucket."""
    shards = range(len(task.corpus.shards))
    table = read_part([candidates_path(task.corpus, shard) for shard in shards], task.batch)
    lists = table["shingles"]
    table = table.drop_columns("shingles").combine_chunks()
    best_first = [("bytes", "descending"), *((name, "ascending") for name in NAMES), ("content", "ascending")]
    order = pc.sort_indices(table, sort_keys=[*best_first, ("document", "ascending")]).to_numpy()
    keys = table["keys"].combine_chunks().flatten().to_numpy().reshape(order.size, -1)[order]
    buckets, bucket_count = _buckets(keys)
    sizes = np.concatenate([pc.list_value_length(chunk).to_numpy() for chunk in lists.chunks])
    starts = np.cumsum(sizes) - sizes
    sets = _laid_out(lists, int(sizes.sum()), task)
    match, near, compared, capped = _match(
        buckets, bucket_count, sets, starts[order], sizes[order], task.threshold, MAX_COMPARED
    )
    removed = np.flatnonzero(match >= 0)
    documents = table["document"].to_numpy()[order]
    found = np.empty(removed.size, FOUND)
    found["document"], found["kept"], found["similarity"] = documents[removed], documents[match[removed]], near[removed]
    np.save(task.path, found)
    return compared, capped


def _laid_out(lists: pa.ChunkedArray, total: int, task: Batch) -> np.ndarray:
    """All shingle sets end to end, uint64; of a component too large for memory in a mapped file."""
    if total <= task.room:
        out = np.empty(total, np.uint64)
    else:
        out = mapped_anew(task.path.with_suffix(".sets.npy"), np.uint64, total)
    at = 0
    for chunk in lists.chunks:
        values = chunk.flatten().to_numpy()
        out[at : at + values.size] = values
        at += values.size
    return out


def _buckets(keys: np.ndarray) -> tuple[np.ndarray, int]:
    """The bucket of every text in each band, int32 [texts, bands], -1 where it is alone; how many buckets there are.

    `keys` uint64 [texts, bands].
    """
    buckets, total = np.full(keys.shape, -1, np.int32), 0
    for band, column in enumerate(keys.T):
        order = np.argsort(column, kind="stable")
        ordered = column[order]
        new, last = np.ones(order.size, bool), np.ones(order.size, bool)
        new[1:] = last[:-1] = ordered[1:] != ordered[:-1]
        shared, new = ~(new & last), new & ~last
        buckets[order[shared], band] = np.cumsum(new)[shared] - 1 + total
        total += int(new.sum())
    return buckets, total


@kernel
def _match(
    buckets: np.ndarray,
    bucket_count: int,
    sets: np.ndarray,
    starts: np.ndarray,
    sizes: np.ndarray,
    threshold: float,
    most: int,
) -> tuple[np.ndarray, np.ndarray, int, int]:
    """From the first text to the last: the kept text it is a copy of, or -1, and their similarity.

    A text is compared with the kept texts of its buckets, the latest first: they are the nearest in length, and a text
    less than `threshold` times as large cannot be a copy. Kept texts of a bucket form a linked list (`head`, `link`).
    """
    texts, bands = buckets.shape
    match, similarity = np.full(texts, -1, np.int64), np.zeros(texts)
    head, link = np.full(bucket_count, -1, np.int64), np.full((texts, bands), -1, np.int64)
    asked = np.full(texts, -1, np.int64)  # the text that a kept one was last compared with
    compared, capped = 0, 0
    for text in range(texts):
        mine = sets[starts[text] : starts[text] + sizes[text]]
        cut = False
        for band in range(bands):
            other = head[buckets[text, band]] if buckets[text, band] >= 0 else -1
            steps = 0
            while other >= 0 and match[text] < 0:
                if steps == most:
                    cut = True
                    break
                small, large = min(sizes[text], sizes[other]), max(sizes[text], sizes[other])
                if asked[other] != text and small >= threshold * large:
                    asked[other] = text
                    compared += 1
                    near = jaccard(mine, sets[starts[other] : starts[other] + sizes[other]], threshold)
                    if near >= 0:
                        match[text], similarity[text] = other, near
                steps += 1
                other = link[other, band]
            if match[text] >= 0:
                break
        if match[text] < 0:
            capped += cut
            for band in range(bands):
                if buckets[text, band] >= 0:
                    link[text, band] = head[buckets[text, band]]
                    head[buckets[text, band]] = text
    return match, similarity, compared, capped
