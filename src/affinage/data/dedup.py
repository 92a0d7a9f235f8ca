"""Step `dedup`: one of several equal or nearly equal documents stays, in four passes over files.

1. Signatures: a hash of the content and one key for each band of MinHash (LSH), a file for each document file.
2. Bands: the keys of each band are sorted; documents that share a key are linked, and union-find makes components.
3. Candidates: the word n-grams of all documents that are linked to any, a file for each document file.
4. Comparison: some whole components at a time, from the best document to the worst. A document goes if its exact
   Jaccard similarity to a document that stays reaches the threshold.

So every removed document has one that stays this near, and no two that stay are known to be this near. A component is
no cluster: along a chain of small changes it holds documents unlike each other, which stay. The best of two copies is
the one with fewer HTML tags and entities in its text, then with more distinct n-grams, then of fewer bytes, then with
the smaller id. Documents of `dedup.against` come before all others and always stay.

The driver holds about 30 bytes a document and the names of those that are removed. The result depends neither on the
executor, on `memory`, nor on the order of the files.
"""

import errno
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from affinage.config.data import DedupSettings
from affinage.data.atomic import write_array
from affinage.data.code_points import text_buffers
from affinage.data.compiled import kernel
from affinage.data.documents import DocumentWriter, clear_documents, document_files, row_groups, text_bytes
from affinage.data.executor import LOCAL, Executor, Progress, clear_completions
from affinage.data.minhash import jaccard, sign, write_shingle_sets
from affinage.data.stats import SAMPLES_PER_REASON, Stats

MEMORY = 512_000_000  # bytes
MAX_COMPARED = 256  # kept documents of one bucket that a document is compared with, the nearest in rank first
REMOVED = "removed.parquet"
EXACT, NEAR = "exact duplicate", "near duplicate"  # the reasons
CONTENT, CONTENT_2, MARKUP, BYTES, FIRST_BAND = range(5)  # rows of a signature file, uint64 [4 + bands, documents]
_MARKUP = r"</?[a-zA-Z][^<>]*>|&#?\w{2,8};"
_BYTES_PER_KEY = 100  # that sorting one key takes, at most
_COPIES = 4  # of a batch's n-grams in memory, while it is read and compared
_CHUNK = 1 << 20  # pairs that are united at once
_NAMES = pa.schema([("id", pa.string()), ("source", pa.string()), ("chunk", pa.int32())])


@dataclass(frozen=True)
class Shard:
    """A document file; `start` is the number of its first document among all."""

    path: Path
    rows: int
    start: int
    released: bool  # of `dedup.against`


@dataclass(frozen=True)
class Corpus:
    """All documents, and where what is known of them is kept."""

    shards: tuple[Shard, ...]
    settings: DedupSettings
    scratch: Path

    @property
    def size(self) -> int:
        """Number of documents."""
        return sum(shard.rows for shard in self.shards)

    def path(self, kind: str, *numbers: int, suffix: str = "npy") -> Path:
        """A file in the scratch folder."""
        return self.scratch / f"{'-'.join([kind, *(f'{number:06d}' for number in numbers)])}.{suffix}"

    def signatures(self, shard: int) -> np.ndarray:
        """The signatures of one file, mapped: uint64 [4 + bands, documents]."""
        return _mapped(self.path("signatures", shard))


@dataclass(frozen=True)
class Duplicates:
    """What is removed: a row a document with its number, that of the one that stays, their names and similarity."""

    removed: pa.Table
    candidates: int  # documents that shared a band with another
    compared: int  # pairs whose similarity was computed
    capped: int  # documents that were not compared with every kept one of a bucket


def dedup(
    documents_folder: Path,
    folder: Path,
    settings: DedupSettings,
    *,
    against: Path | None = None,
    memory: int = MEMORY,
    executor: Executor = LOCAL,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Copy the documents without duplicates to `folder`, write `removed.parquet`, and return the step's summary.

    `against` is a folder of documents that were released before: copies of those are removed as well. Removed documents
    are counted as `exact duplicate` (but for case and white space) or `near duplicate`; `removed.parquet` has the
    document that stays in `duplicate_of`, and their `jaccard`. The summary also has `clusters`: how many documents have
    copies, and the most copied; `candidates`, `compared`, `capped` (see `Duplicates`). An interrupted call resumes.
    """
    start = time.perf_counter()
    folder, scratch = Path(folder), Path(folder) / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    released = document_files(against) if against is not None else []
    files = [*released, *document_files(documents_folder)]
    corpus = corpus_of(files, settings, scratch, released=len(released))
    found = find_duplicates(corpus, memory=memory, executor=executor, progress=progress)
    tasks = [k for k, shard in enumerate(corpus.shards) if not shard.released]
    copy = partial(_copy, corpus, documents_folder, folder, found.removed)
    total = Stats()
    for stats in executor.map(copy, tasks, folder, threads=True):
        total.merge(stats)
    _write_removed(folder, found.removed)
    clear_completions(folder)
    shutil.rmtree(scratch)
    return total.summary(time.perf_counter() - start) | {
        "clusters": _clusters(found.removed),
        "candidates": found.candidates,
        "compared": found.compared,
        "capped": found.capped,
    }


def find_duplicates(
    corpus: Corpus, *, memory: int = MEMORY, executor: Executor = LOCAL, progress: Progress | None = None
) -> Duplicates:
    """The duplicates of a corpus, with at most `memory` bytes for sorting and comparing, by all workers together."""

    def run(function: Any, name: str, tasks: Sequence[Any], first: float, last: float) -> list[Any]:
        part = None if progress is None else (lambda share: progress(first + share * (last - first)))
        return executor.map(partial(function, corpus), tasks, corpus.scratch / name, threads=True, progress=part)

    every = range(len(corpus.shards))
    run(_sign, "sign", every, 0.0, 0.4)
    ranges = max(1, -(-corpus.size * _BYTES_PER_KEY * executor.workers // memory))
    bands = [(band, part, ranges) for band in range(corpus.settings.num_buckets) for part in range(ranges)]
    run(_link, "link", bands, 0.4, 0.6)
    room = max(1, memory // (8 * _COPIES * executor.workers))
    candidates, batches = _assign_batches(corpus, bands, room)
    run(_gather, "gather", every, 0.6, 0.8)
    results = run(_compare, "compare", [(batch, room) for batch in range(batches)], 0.8, 1.0)
    tables = [pa.ipc.open_file(corpus.path("removed", batch, suffix="arrow")).read_all() for batch in range(batches)]
    removed = pa.concat_tables([_REMOVED.empty_table(), *tables]).sort_by("document")
    return Duplicates(removed, candidates, *(sum(each[key] for each in results) for key in ("compared", "capped")))


def corpus_of(files: Sequence[Path], settings: DedupSettings, scratch: Path, released: int = 0) -> Corpus:
    """The documents of some files, the first `released` of which were released before."""
    shards: list[Shard] = []
    for number, path in enumerate(files):
        start = shards[-1].start + shards[-1].rows if shards else 0
        shards.append(Shard(path, sum(group.rows for group in row_groups(path)), start, number < released))
    return Corpus(tuple(shards), settings, scratch)


# ---- 1. signatures ----


def _sign(corpus: Corpus, shard: int) -> None:
    settings = corpus.settings
    parts = [np.zeros((FIRST_BAND + settings.num_buckets, 0), np.uint64)]
    for group in row_groups(corpus.shards[shard].path):
        text = group.read(["text"]).column("text")
        found = sign(text, ngram=settings.n_grams, bands=settings.num_buckets, rows=settings.hashes_per_bucket)
        markup = pc.count_substring_regex(text, _MARKUP).to_numpy()
        parts.append(np.vstack([found.content, markup, np.diff(text_buffers(text)[1]), found.keys]).astype(np.uint64))
    write_array(corpus.path("signatures", shard), np.concatenate(parts, axis=1))


# ---- 2. bands ----


def _link(corpus: Corpus, task: tuple[int, int, int]) -> None:
    """Write for every document that shares its key with others the pair of it and the first of them, int64 [pairs, 2].

    `task` is (band, range, number of ranges): one range of the keys of a band.
    """
    band, part, count = task
    keys, documents = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    width = 2**64 // count + 1
    first, last = np.uint64(part * width), np.uint64(min((part + 1) * width, 2**64) - 1)
    for number, shard in enumerate(corpus.shards):
        own = corpus.signatures(number)[FIRST_BAND + band]
        here = np.flatnonzero((own >= first) & (own <= last))
        keys.append(own[here])
        documents.append(shard.start + here)
    key, document = np.concatenate(keys), np.concatenate(documents)
    order = np.argsort(key, kind="stable")
    new = np.ones(order.size, bool)
    new[1:] = key[order[1:]] != key[order[:-1]]
    ordered = document[order]
    leaders = ordered[new][np.cumsum(new) - 1]
    write_array(corpus.path("pairs", *task), np.column_stack([ordered[~new], leaders[~new]]))


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
def _pack(parent: np.ndarray, bytes: np.ndarray, weight: np.ndarray, batch: np.ndarray, room: int) -> tuple[int, int]:
    """Put components into batches of about `room` n-grams; a larger one is a batch of its own.

    Writes the batch of every document, -1 for those alike no other; returns the candidates and the batches. A text is
    taken to have one n-gram for every two of its bytes, which is more than it has.
    """
    for document in range(parent.size):
        root = _root(parent, document)
        if root != document:
            weight[root] += bytes[document] // 2 + 1
    last, load, candidates = -1, 0, 0
    for document in range(parent.size):
        root = _root(parent, document)
        if weight[root] == 0:
            continue
        if root == document:
            own = weight[root] + bytes[document] // 2 + 1
            if last < 0 or load + own > room:
                last, load = last + 1, 0
            load += own
            batch[document] = last
        else:
            batch[document] = batch[root]
        candidates += 1
    return candidates, last + 1


def _assign_batches(corpus: Corpus, bands: Sequence[tuple[int, int, int]], room: int) -> tuple[int, int]:
    """Write the array `batch`; returns the candidates and the batches."""
    parent, batch = np.arange(corpus.size), np.full(corpus.size, -1, np.int32)
    for band in bands:
        pairs = _mapped(corpus.path("pairs", *band))
        for start in range(0, len(pairs), _CHUNK):
            _unite(parent, np.ascontiguousarray(pairs[start : start + _CHUNK]))
    sizes = [np.asarray(corpus.signatures(k)[BYTES]).astype(np.int64) for k in range(len(corpus.shards))]
    bytes = np.concatenate([np.zeros(0, np.int64), *sizes])
    candidates, batches = _pack(parent, bytes, np.zeros(corpus.size, np.int64), batch, room)
    write_array(corpus.path("batch"), batch)
    return int(candidates), int(batches)


def _batch_of(corpus: Corpus, shard: Shard) -> np.ndarray:
    return np.array(_mapped(corpus.path("batch"))[shard.start : shard.start + shard.rows])


def _mapped(path: Path) -> np.ndarray:
    """An array in a file, mapped; an empty one cannot be."""
    try:
        array: np.ndarray = np.load(path, mmap_mode="r")
    except ValueError:
        array = np.load(path)
    return array


# ---- 3. candidates ----


def _gather(corpus: Corpus, number: int) -> None:
    """Write the candidates of one file: a table of what ranks and names them, and their n-grams end to end."""
    shard, ngram = corpus.shards[number], corpus.settings.n_grams
    rows = np.flatnonzero(_batch_of(corpus, shard) >= 0)
    names: list[pa.RecordBatch] = []
    sets, sizes, first = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)], 0
    for group in row_groups(shard.path) if rows.size else ():
        here = rows[slice(*np.searchsorted(rows, [first, first + group.rows]))] - first
        first += group.rows
        if not here.size:
            continue
        batch = group.read([*_NAMES.names, "text"]).take(pa.array(here))
        names.append(_names(batch))
        text = batch.column("text")
        room = np.diff(text_buffers(text)[1]).astype(np.int64) + 1
        starts, own = np.cumsum(room) - room, np.zeros(here.size, np.int64)
        out = np.empty(int(room.sum()), np.uint64)
        write_shingle_sets(text, np.arange(here.size), ngram=ngram, out=out, starts=starts, sizes=own)
        sets += [out[start : start + size] for start, size in zip(starts.tolist(), own.tolist())]
        sizes.append(own)
    signatures = np.asarray(corpus.signatures(number)[:, rows])
    size = np.concatenate(sizes)
    keys = pa.FixedSizeListArray.from_arrays(signatures[FIRST_BAND:].T.ravel(), corpus.settings.num_buckets)
    table = pa.Table.from_batches(names, _NAMES)
    columns = {
        "document": shard.start + rows,
        "rank": np.full(rows.size, int(not shard.released)),
        "markup": signatures[MARKUP],
        "bytes": signatures[BYTES],
        "content": signatures[CONTENT],
        "content_2": signatures[CONTENT_2],
        "keys": keys,
        "start": np.cumsum(size) - size,
        "size": size,
    }
    for name, column in columns.items():
        table = table.append_column(name, pa.array(column) if isinstance(column, np.ndarray) else column)
    _write_table(corpus.path("candidates", number, suffix="arrow"), table)
    write_array(corpus.path("sets", number), np.concatenate(sets))


def _names(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The columns that name documents; released ones may be of somebody else, without them."""
    nothing = {"id": "", "source": "", "chunk": 0}
    columns = [
        batch.column(one.name)
        if one.name in batch.schema.names
        else pa.array([nothing[one.name]] * len(batch), one.type)
        for one in _NAMES
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_NAMES)


def _write_table(path: Path, table: pa.Table) -> None:
    unfinished = path.with_suffix(".part")
    with pa.OSFile(str(unfinished), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    os.replace(unfinished, path)


# ---- 4. comparison ----

_REMOVED = pa.schema(
    [
        ("document", pa.int64()),
        ("kept", pa.int64()),
        ("id", pa.string()),
        ("source", pa.string()),
        ("chunk", pa.int32()),
        ("duplicate_of", pa.string()),
        ("duplicate_of_source", pa.string()),
        ("jaccard", pa.float64()),
        ("exact", pa.bool_()),  # the same content but for case and white space
    ]
)


def _compare(corpus: Corpus, task: tuple[int, int]) -> dict[str, int]:
    """Write what is removed of one batch; returns counts. The n-grams of more than `room` are in a mapped file."""
    batch, room = task
    tables, wanted = [], []
    for number, shard in enumerate(corpus.shards):
        if not (_batch_of(corpus, shard) == batch).any():
            continue
        with pa.memory_map(str(corpus.path("candidates", number, suffix="arrow"))) as source:
            table = pa.ipc.open_file(source).read_all()
        mine = np.flatnonzero(_batch_of(corpus, shard)[table["document"].to_numpy() - shard.start] == batch)
        tables.append(table.take(pa.array(mine)))
        wanted.append(number)
    table = pa.concat_tables(tables).combine_chunks()
    sizes = table["size"].to_numpy()
    sets = _n_grams(corpus, wanted, tables, int(sizes.sum()), room, corpus.path("compared", batch))
    order_by = [("rank", "ascending"), ("markup", "ascending"), ("size", "descending"), ("bytes", "ascending")]
    order_by += [(name, "ascending") for name in ("id", "source", "chunk", "content", "document")]
    order = pc.sort_indices(table, sort_keys=order_by).to_numpy()
    keys = table["keys"].combine_chunks().flatten().to_numpy().reshape(order.size, -1)[order]
    starts = (np.cumsum(sizes) - sizes)[order]
    stays = int((table["rank"].to_numpy() == 0).sum())
    threshold = corpus.settings.threshold
    match, near, compared, capped = _match(*_buckets(keys), sets, starts, sizes[order], threshold, MAX_COMPARED, stays)
    found = np.flatnonzero(match >= 0)
    removed, kept = (table.take(pa.array(order[rows])) for rows in (found, match[found]))
    same = [(removed[name].to_numpy() == kept[name].to_numpy()) for name in ("content", "content_2")]
    columns = [
        removed["document"],
        kept["document"],
        *(removed[name] for name in _NAMES.names),
        kept["id"],
        kept["source"],
    ]
    written = pa.table([*columns, pa.array(near[found]), pa.array(same[0] & same[1])], schema=_REMOVED)
    _write_table(corpus.path("removed", batch, suffix="arrow"), written)
    return {"compared": int(compared), "capped": int(capped)}


def _n_grams(
    corpus: Corpus, shards: Sequence[int], tables: Sequence[pa.Table], total: int, room: int, place: Path
) -> np.ndarray:
    """The n-grams of all documents of the tables end to end, uint64."""
    out = np.empty(total, np.uint64) if total <= room else new_memmap(place, np.uint64, total)
    at = 0
    for shard, table in zip(shards, tables, strict=True):
        sets = _mapped(corpus.path("sets", shard))
        for start, size in zip(table["start"].to_pylist(), table["size"].to_pylist()):
            out[at : at + size] = sets[start : start + size]
            at += size
    return out


def new_memmap(path: Path, dtype: type, size: int) -> np.ndarray:
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


def _buckets(keys: np.ndarray) -> tuple[np.ndarray, int]:
    """The bucket of every document in each band, int32 [N, bands], -1 where it is alone; and how many there are."""
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
    stays: int,
) -> tuple[np.ndarray, np.ndarray, int, int]:
    """From the first document to the last: the kept one it is a copy of, or -1, and their similarity.

    The first `stays` documents are kept whatever they are. Another is compared with the kept ones of its buckets, the
    latest first: they are the nearest in rank, and one with less than `threshold` times as many n-grams cannot be a
    copy. The kept documents of a bucket form a linked list (`head`, `link`).
    """
    texts, bands = buckets.shape
    match, similarity = np.full(texts, -1, np.int64), np.zeros(texts)
    head, link = np.full(bucket_count, -1, np.int64), np.full((texts, bands), -1, np.int64)
    last_compared = np.full(texts, -1, np.int64)  # the document that a kept one was last compared with
    compared, capped = 0, 0
    for text in range(texts):
        mine = sets[starts[text] : starts[text] + sizes[text]]
        cut = False
        for band in range(bands if text >= stays else 0):
            other = head[buckets[text, band]] if buckets[text, band] >= 0 else -1
            steps = 0
            while other >= 0 and match[text] < 0:
                if steps == most:
                    cut = True
                    break
                small, large = min(sizes[text], sizes[other]), max(sizes[text], sizes[other])
                if last_compared[other] != text and small >= threshold * large:
                    last_compared[other] = text
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


# ---- what is written ----


def _copy(corpus: Corpus, documents_folder: Path, folder: Path, removed: pa.Table, number: int) -> dict[str, Any]:
    """Copy one file without its duplicates; returns the statistics."""
    shard, stats = corpus.shards[number], Stats()
    place = folder / shard.path.parent.relative_to(documents_folder)
    documents = removed["document"].to_numpy()
    first, last = np.searchsorted(documents, [shard.start, shard.start + shard.rows])
    mine = removed.slice(first, last - first)
    rows = mine["document"].to_numpy() - shard.start
    clear_documents(place, shard.path.stem)
    at = 0
    with DocumentWriter(place, shard.path.stem, observe=stats.leave) as writer:
        for group in row_groups(shard.path):
            batch = group.read()
            stats.enter(batch.num_rows, text_bytes(batch))
            here = slice(*np.searchsorted(rows, [at, at + group.rows]))
            verdicts = dict(zip((rows[here] - at).tolist(), _verdicts(mine.slice(here.start, here.stop - here.start))))
            writer.write(stats.remove_rows(batch, verdicts))
            at += group.rows
    return stats.to_json()


def _verdicts(removed: pa.Table) -> Iterator[tuple[str, str]]:
    for row in removed.to_pylist():
        detail = f"Jaccard {row['jaccard']:.3f} to {row['duplicate_of']} of {row['duplicate_of_source']}"
        yield EXACT if row["exact"] else NEAR, detail


def _write_removed(folder: Path, removed: pa.Table) -> None:
    names = ("duplicate_of_source", "duplicate_of", "source", "id", "chunk")
    table = removed.sort_by([(name, "ascending") for name in names]).drop_columns(["document", "kept"])
    unfinished = folder / f"{REMOVED}.part"
    pq.write_table(table, unfinished, compression="zstd")
    os.replace(unfinished, folder / REMOVED)


def _clusters(removed: pa.Table) -> dict[str, Any]:
    """How many documents have copies, and the most copied."""
    groups = removed.group_by(["duplicate_of_source", "duplicate_of", "kept"]).aggregate([("document", "count")])
    order = [("document_count", "descending"), ("duplicate_of", "ascending"), ("duplicate_of_source", "ascending")]
    largest = groups.sort_by(order).slice(0, SAMPLES_PER_REASON).to_pylist()
    return {
        "count": groups.num_rows,
        "largest": [
            {"id": row["duplicate_of"], "source": row["duplicate_of_source"], "documents": row["document_count"] + 1}
            for row in largest
        ],
    }
