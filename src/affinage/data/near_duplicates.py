"""Near duplicates among signed texts: bands sorted on disk, what they connect compared in batches."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from affinage.config.data import DedupSettings
from affinage.data.comparison import COPIES_IN_MEMORY, Batch, candidates_path, compare
from affinage.data.compiled import kernel
from affinage.data.exchange import write_parts
from affinage.data.executor import Executor
from affinage.data.minhash import write_shingle_sets
from affinage.data.signatures import BYTES, CHUNK, CONTENT, FIRST_BAND, SHINGLES, Corpus, in_range, ranges


@dataclass(frozen=True)
class NearDuplicates:
    """What the comparison of all candidates gave; `found` are files of FOUND, one per batch."""

    found: list[Path]
    candidates: int
    compared: int
    capped: int


@dataclass(frozen=True)
class _Band:
    """A band, or one of `count` ranges of its keys."""

    corpus: Corpus
    band: int
    part: int
    count: int

    @property
    def path(self) -> Path:
        return self.corpus.folder / f"band-{self.band:03d}-{self.part:05d}.npy"


@dataclass(frozen=True)
class _Spread:
    """A shard whose candidates go to their batches."""

    corpus: Corpus
    shard: int
    batches: int
    settings: DedupSettings


def find_near_duplicates(corpus: Corpus, settings: DedupSettings, memory: int, executor: Executor) -> NearDuplicates:
    """Compare all texts that share a band, but for those noted in the array `exact` of the corpus.

    Only texts of one component of the graph "shares a band with" are ever compared, so components are independent.
    """
    count = ranges(corpus.size, memory, executor.workers)
    bands = [_Band(corpus, band, part, count) for band in range(settings.num_buckets) for part in range(count)]
    executor.map(_link_band, bands, threads=True)
    parent = corpus.per_document("parent", np.int64)
    for band in bands:
        for pairs in _in_chunks(np.load(band.path, mmap_mode="r")):
            _unite(parent, pairs)
        band.path.unlink()
    room = max(1, memory // (8 * COPIES_IN_MEMORY * executor.workers))
    candidates, batches = _assign_batches(corpus, parent, room)
    if not batches:
        return NearDuplicates([], 0, 0, 0)
    executor.map(_spread, [_Spread(corpus, k, batches, settings) for k in range(len(corpus.shards))], threads=True)
    tasks = [Batch(corpus, batch, settings.threshold, room) for batch in range(batches)]
    counts = executor.map(compare, tasks, threads=True)
    compared, capped = (sum(column) for column in zip(*counts))
    return NearDuplicates([task.path for task in tasks], candidates, compared, capped)


def _in_chunks(pairs: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(pairs), CHUNK):
        yield np.ascontiguousarray(pairs[start : start + CHUNK])


def _link_band(task: _Band) -> None:
    """Write for every text that shares its key with others the pair of it and the first of them, int64 [pairs, 2]."""
    keys, documents = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for shard, start in enumerate(task.corpus.starts[:-1].tolist()):
        if not task.corpus.shards[shard].rows:
            continue
        own = task.corpus.signatures(shard)[FIRST_BAND + task.band]
        here = in_range(own, task.part, task.count)
        here = here[~task.corpus.known("exact", shard)[here]]
        keys.append(own[here])
        documents.append(start + here)
    key, document = np.concatenate(keys), np.concatenate(documents)
    order = np.argsort(key, kind="stable")
    new = np.ones(order.size, bool)
    new[1:] = key[order[1:]] != key[order[:-1]]
    ordered = document[order]
    leaders = ordered[new][np.cumsum(new) - 1]
    np.save(task.path, np.column_stack([ordered[~new], leaders[~new]]))


@kernel
def _root(parent: np.ndarray, document: np.int64) -> np.int64:
    while parent[document] != document:
        parent[document] = parent[parent[document]]
        document = parent[document]
    return document


@kernel
def _unite(parent: np.ndarray, pairs: np.ndarray) -> None:
    """Union-find over pairs of documents; the root of a component is its first document."""
    for k in range(len(pairs)):
        one, other = _root(parent, pairs[k, 0]), _root(parent, pairs[k, 1])
        parent[max(one, other)] = min(one, other)


@kernel
def _weigh(parent: np.ndarray, start: np.int64, shingles: np.ndarray, weight: np.ndarray) -> None:
    """Add up the shingles of every component at its root, without the root's own."""
    for k in range(shingles.size):
        root = _root(parent, start + k)
        if root != start + k:
            weight[root] += np.int64(shingles[k])


@kernel
def _pack(
    parent: np.ndarray,
    start: np.int64,
    shingles: np.ndarray,
    weight: np.ndarray,
    batch: np.ndarray,
    state: np.ndarray,
    room: np.int64,
) -> None:
    """Put components into batches of at most `room` shingles; a larger one is a batch of its own.

    `state` int64 [3]: the last batch, the shingles in it, candidates so far.
    """
    for document in range(start, start + shingles.size):
        root = _root(parent, document)
        if weight[root] == 0:
            continue
        if root == document:
            load = weight[root] + np.int64(shingles[document - start])
            if state[0] < 0 or state[1] + load > room:
                state[0], state[1] = state[0] + 1, 0
            state[1] += load
            batch[document] = state[0]
        else:
            batch[document] = batch[root]
        state[2] += 1


def _assign_batches(corpus: Corpus, parent: np.ndarray, room: int) -> tuple[int, int]:
    """Write the array `batch` of the corpus, -1 for texts alike no other; how many candidates and batches there are."""
    weight, batch = corpus.per_document("weight", np.int64, 0), corpus.per_document("batch", np.int32, -1)
    state = np.array([-1, 0, 0], np.int64)
    filled = [(k, start) for k, start in enumerate(corpus.starts[:-1].tolist()) if corpus.shards[k].rows]
    for shard, start in filled:
        _weigh(parent, start, np.array(corpus.signatures(shard)[SHINGLES]), weight)
    for shard, start in filled:
        _pack(parent, start, np.array(corpus.signatures(shard)[SHINGLES]), weight, batch, state, room)
    return int(state[2]), int(state[0]) + 1


def _spread(task: _Spread) -> None:
    """Hand a shard's candidates, with all that comparing them needs, to their batches."""
    corpus = task.corpus
    batch = np.array(corpus.known("batch", task.shard))
    rows = np.flatnonzero(batch >= 0)
    signatures = np.asarray(corpus.signatures(task.shard)[:, rows])
    keys = pa.array(np.ascontiguousarray(signatures[FIRST_BAND:].T).ravel())
    names = corpus.names(task.shard) if rows.size else corpus.names(task.shard).slice(0, 0)
    table = names.take(pa.array(rows))
    columns = {
        "document": pa.array(corpus.starts[task.shard] + rows),
        "bytes": pa.array(signatures[BYTES]),
        "content": pa.array(signatures[CONTENT]),
        "keys": pa.FixedSizeListArray.from_arrays(keys, task.settings.num_buckets),
        "shingles": _shingle_lists(task, rows, signatures[SHINGLES].astype(np.int64)),
    }
    for name, column in columns.items():
        table = table.append_column(name, column)
    write_parts(candidates_path(corpus, task.shard), table, batch[rows], task.batches)


def _shingle_lists(task: _Spread, rows: np.ndarray, shingles: np.ndarray) -> pa.Array:
    """The sorted distinct shingles of some texts of a shard, as lists."""
    room = np.concatenate([[0], np.cumsum(shingles)])
    sets, sizes = np.empty(int(room[-1]), np.uint64), np.zeros(rows.size, np.int64)
    start = 0
    for part in task.corpus.shards[task.shard].read(["text"]) if rows.size else ():
        mine = slice(*np.searchsorted(rows, [start, start + len(part)]))
        write_shingle_sets(
            part.column("text"),
            rows[mine] - start,
            ngram=task.settings.n_grams,
            out=sets,
            starts=room[:-1][mine],
            sizes=sizes[mine],
        )
        start += len(part)
    _close_up(sets, room, sizes)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(sets[: offsets[-1]]))


@kernel
def _close_up(sets: np.ndarray, room: np.ndarray, sizes: np.ndarray) -> None:
    """Move every set to the end of the one before it."""
    at = 0
    for k in range(sizes.size):
        for i in range(sizes[k]):
            sets[at] = sets[room[k] + i]
            at += 1
