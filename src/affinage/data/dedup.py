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

import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import feather
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from affinage.config.data import DedupSettings
from affinage.data.code_points import text_buffers
from affinage.data.compiled import Array, kernel
from affinage.data.documents import document_files, row_groups, write_table
from affinage.data.executor import LOCAL, Executor, Progress, clear_completions
from affinage.data.minhash import jaccard, shingle_sets, sign
from affinage.data.stats import SAMPLES_PER_REASON, Stats, copy_documents

MEMORY = 512_000_000  # bytes
MAX_COMPARED = 256  # kept documents of one bucket that a document is compared with, the nearest in rank first
REMOVED = "removed.parquet"
EXACT, NEAR = "exact duplicate", "near duplicate"  # the reasons
CONTENT, CONTENT_2, MARKUP, BYTES, FIRST_BAND = range(5)  # rows of a signature file, uint64 [4 + bands, documents]
_MARKUP = r"</?[a-zA-Z][^<>]*>|&#?\w{2,8};"
_BYTES_PER_KEY = 100  # that sorting one key takes, at most
# Python 3.11 may fail to parse the headers of arrays in several threads at once ("AST constructor recursion depth").
_LOADING = threading.Lock()
_COPIES = 4  # of a batch's n-grams in memory, while it is read and compared
_NAMES = {"id": pa.string(), "source": pa.string(), "chunk": pa.int32()}  # released documents may be without them
_REMOVED = pa.schema(
    [
        ("document", pa.int64()),
        ("kept", pa.int64()),
        *_NAMES.items(),
        ("duplicate_of", pa.string()),
        ("duplicate_of_source", pa.string()),
        ("jaccard", pa.float64()),
        ("exact", pa.bool_()),  # the same content but for case and white space
    ]
)


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

    def path(self, kind: str, *numbers: int) -> Path:
        """A file in the scratch folder."""
        return self.scratch / "-".join([kind, *map(str, numbers)])

    def array(self, kind: str, *numbers: int) -> np.ndarray:
        """An array in the scratch folder, mapped; an empty one cannot be."""
        path = self.path(kind, *numbers).with_suffix(".npy")
        with _LOADING:
            try:
                array: np.ndarray = np.load(path, mmap_mode="r")
            except ValueError:
                array = np.load(path)
        return array

    def batches(self, shard: Shard) -> np.ndarray:
        """Of the documents of one file the batch in which they are compared, or -1, int32."""
        return np.array(self.array("batch")[shard.start : shard.start + shard.rows])


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
    copies, and the most copied; and the counts of `find_duplicates`. An interrupted call resumes.
    """
    start = time.perf_counter()
    folder, scratch = Path(folder), Path(folder) / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    released = document_files(against) if against is not None else []
    corpus = corpus_of([*released, *document_files(documents_folder)], settings, scratch, released=len(released))
    removed, counts = find_duplicates(corpus, memory=memory, executor=executor, progress=progress)
    own = [shard for shard in corpus.shards if not shard.released]
    total = Stats()
    for stats in executor.map(partial(_copy, documents_folder, folder, removed), own, folder, threads=True):
        total.merge(stats)
    order = [(name, "ascending") for name in ("duplicate_of_source", "duplicate_of", "source", "id", "chunk")]
    write_table(folder / REMOVED, removed.sort_by(order).drop_columns(["document", "kept"]))
    clear_completions(folder)
    shutil.rmtree(scratch)
    return total.summary(time.perf_counter() - start) | {"clusters": _clusters(removed)} | counts


def _copy(documents_folder: Path, folder: Path, removed: pa.Table, shard: Shard) -> dict[str, Any]:
    """Copy one file without its duplicates; returns the statistics."""
    documents, stats = removed["document"].to_numpy() - shard.start, Stats()

    def without_duplicates(batch: pa.RecordBatch, at: int) -> pa.RecordBatch:
        first, last = np.searchsorted(documents, [at, at + batch.num_rows])
        verdicts = {}
        for row, one in zip(documents[first:last].tolist(), removed.slice(first, last - first).to_pylist()):
            detail = f"Jaccard {one['jaccard']:.3f} to {one['duplicate_of']} of {one['duplicate_of_source']}"
            verdicts[row - at] = (EXACT if one["exact"] else NEAR, detail)
        return stats.remove_rows(batch, verdicts)

    copy_documents(shard.path, folder / shard.path.parent.relative_to(documents_folder), stats, without_duplicates)
    return stats.to_json()


def _clusters(removed: pa.Table) -> dict[str, Any]:
    """How many documents have copies, and the most copied."""
    groups = removed.group_by(["duplicate_of_source", "duplicate_of", "kept"]).aggregate([("document", "count")])
    order = [("document_count", "descending"), ("duplicate_of", "ascending"), ("duplicate_of_source", "ascending")]
    largest = groups.sort_by(order).slice(0, SAMPLES_PER_REASON).to_pylist()
    names = [(row["duplicate_of"], row["duplicate_of_source"], row["document_count"] + 1) for row in largest]
    return {"count": groups.num_rows, "largest": [dict(zip(("id", "source", "documents"), one)) for one in names]}


def corpus_of(files: Sequence[Path], settings: DedupSettings, scratch: Path, released: int = 0) -> Corpus:
    """The documents of some files, the first `released` of which were released before."""
    shards: list[Shard] = []
    for number, path in enumerate(files):
        start = shards[-1].start + shards[-1].rows if shards else 0
        shards.append(Shard(path, sum(group.rows for group in row_groups(path)), start, number < released))
    return Corpus(tuple(shards), settings, scratch)


def find_duplicates(
    corpus: Corpus, *, memory: int = MEMORY, executor: Executor = LOCAL, progress: Progress | None = None
) -> tuple[pa.Table, dict[str, int]]:
    """The duplicates of a corpus, with at most `memory` bytes for sorting and comparing, by all workers together.

    Returns a table with a row for each document to remove: its number, that of the one that stays, their names and
    similarity. And counts: `candidates`, documents that share a band with another; `compared`, pairs whose similarity
    was computed; `capped`, documents that were not compared with every kept one of a bucket.
    """

    def run(function: Any, tasks: Sequence[Any], first: float, last: float) -> list[Any]:
        part = None if progress is None else (lambda share: progress(first + share * (last - first)))
        place = corpus.scratch / function.__name__
        return executor.map(partial(function, corpus), tasks, place, threads=True, progress=part)

    every = range(len(corpus.shards))
    run(_sign, every, 0.0, 0.4)
    ranges = max(1, -(-corpus.size * _BYTES_PER_KEY * executor.workers // memory))
    bands = [(band, part, ranges) for band in range(corpus.settings.num_buckets) for part in range(ranges)]
    run(_link, bands, 0.4, 0.6)
    room = max(1, memory // (8 * _COPIES * executor.workers))
    batches = _assign_batches(corpus, bands, room)
    run(_gather, every, 0.6, 0.8)
    results = run(_compare, [(batch, room) for batch in range(batches)], 0.8, 1.0)
    tables = [feather.read_table(corpus.path("removed", batch)) for batch in range(batches)]
    removed = pa.concat_tables([_REMOVED.empty_table(), *tables]).sort_by("document")
    return removed, {key: sum(one[key] for one in results) for key in ("candidates", "compared", "capped")}


# ---- 1. signatures ----


def _sign(corpus: Corpus, number: int) -> None:
    settings = corpus.settings
    parts = [np.zeros((FIRST_BAND + settings.num_buckets, 0), np.uint64)]
    for group in row_groups(corpus.shards[number].path):
        text = group.read(["text"]).column("text")
        hashes = {"bands": settings.num_buckets, "rows": settings.hashes_per_bucket}
        content, keys = sign(text, ngram=settings.n_grams, **hashes)
        markup = pc.count_substring_regex(text, _MARKUP).to_numpy()
        parts.append(np.vstack([content, markup, np.diff(text_buffers(text)[1]), keys]).astype(np.uint64))
    np.save(corpus.path("signatures", number), np.concatenate(parts, axis=1))


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
        own = corpus.array("signatures", number)[FIRST_BAND + band]
        here = np.flatnonzero((own >= first) & (own <= last))
        keys.append(own[here])
        documents.append(shard.start + here)
    key, document = np.concatenate(keys), np.concatenate(documents)
    order = np.argsort(key, kind="stable")
    new = np.ones(order.size, bool)
    new[1:] = key[order[1:]] != key[order[:-1]]
    ordered = document[order]
    leaders = ordered[new][np.cumsum(new) - 1]
    np.save(corpus.path("pairs", *task), np.column_stack([ordered[~new], leaders[~new]]))


def _assign_batches(corpus: Corpus, bands: Sequence[tuple[int, int, int]], room: int) -> int:
    """Write the array `batch`: of every document the batch in which it is compared, or -1; returns how many there are.

    A component is in one batch, and a batch has about `room` n-grams or is one larger component. A text is taken to
    have one n-gram for every two of its bytes.
    """
    component = np.arange(corpus.size)
    for band in bands:
        one, other = component[corpus.array("pairs", *band)].T
        if one.size:
            graph = coo_array((np.ones(one.size, np.int8), (one, other)), (corpus.size, corpus.size))
            component = connected_components(graph, directed=False)[1][component]
    sizes = [np.array(corpus.array("signatures", k)[BYTES]).astype(np.int64) for k in range(len(corpus.shards))]
    n_grams = np.concatenate([np.zeros(0, np.int64), *sizes]) // 2 + 1
    shared = np.bincount(component, minlength=corpus.size)[component] > 1
    weight = np.bincount(component[shared], n_grams[shared], minlength=corpus.size)
    first = ((np.cumsum(weight) - weight) // room).astype(np.int64)
    batches, batch = np.unique(first[component[shared]], return_inverse=True)
    of_document = np.full(corpus.size, -1, np.int32)
    of_document[shared] = batch
    np.save(corpus.path("batch"), of_document)
    return batches.size


# ---- 3. candidates ----


def _gather(corpus: Corpus, number: int) -> None:
    """Write the names of the candidates of one file, and their n-grams end to end."""
    shard = corpus.shards[number]
    rows = np.flatnonzero(corpus.batches(shard) >= 0)
    tables = [pa.schema(_NAMES.items()).empty_table()]
    sets, sizes, first = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)], 0
    for group in row_groups(shard.path) if rows.size else ():
        here = rows[slice(*np.searchsorted(rows, [first, first + group.rows]))] - first
        first += group.rows
        if not here.size:
            continue
        batch = group.read([*_NAMES, "text"]).take(pa.array(here))
        absent = {name: pa.nulls(len(batch), type).fill_null(type.to_pandas_dtype()()) for name, type in _NAMES.items()}
        columns = [batch[name] if name in batch.schema.names else absent[name] for name in _NAMES]
        tables.append(pa.table(columns, schema=pa.schema(_NAMES.items())))
        own, own_sizes = shingle_sets(batch["text"], corpus.settings.n_grams)
        sets.append(own)
        sizes.append(own_sizes)
    size = np.concatenate(sizes)
    facts = {"document": shard.start + rows, "start": np.cumsum(size) - size, "size": size}
    table = pa.concat_tables(tables)
    for name, values in facts.items():
        table = table.append_column(name, pa.array(values))
    feather.write_feather(table, corpus.path("candidates", number), compression="uncompressed")
    np.save(corpus.path("sets", number), np.concatenate(sets))


# ---- 4. comparison ----


def _compare(corpus: Corpus, task: tuple[int, int]) -> dict[str, int]:
    """Write what is removed of one batch; returns counts. The n-grams of more than `room` are in a mapped file."""
    batch, room = task
    tables, ranks, signatures, sets = [], [], [], []
    for number, shard in enumerate(corpus.shards):
        batches = corpus.batches(shard)
        if not (batches == batch).any():
            continue
        table = feather.read_table(corpus.path("candidates", number), memory_map=True)
        table = table.filter(pa.array(batches[table["document"].to_numpy() - shard.start] == batch))
        rows = table["document"].to_numpy() - shard.start
        tables.append(table)
        ranks.append(np.full(rows.size, not shard.released))
        signatures.append(corpus.array("signatures", number)[:, rows])
        all_sets = corpus.array("sets", number)
        sets += [all_sets[a : a + size] for a, size in zip(table["start"].to_pylist(), table["size"].to_pylist())]
    table, rank, facts = pa.concat_tables(tables), np.concatenate(ranks), np.concatenate(signatures, axis=1)
    sizes = table["size"].to_numpy()
    names = [table[name].to_numpy(zero_copy_only=False) for name in ("document", "chunk")]
    text = [pc.rank(table[name], tiebreaker="min").to_numpy() for name in ("source", "id")]
    order = np.lexsort([names[0], facts[CONTENT], names[1], *text, facts[BYTES], -sizes, facts[MARKUP], rank])
    n_grams = _end_to_end(sets, int(sizes.sum()) > room, corpus.path("compared", batch))
    keys = np.ascontiguousarray(facts[FIRST_BAND:, order].T)
    starts, released = (np.cumsum(sizes) - sizes)[order], int((~rank).sum())
    match, near, compared, capped = _match(
        *_buckets(keys), n_grams, starts, sizes[order], corpus.settings.threshold, MAX_COMPARED, released
    )
    found = np.flatnonzero(match >= 0)
    gone, stays = order[found], order[match[found]]
    removed, kept = table.take(pa.array(gone)), table.take(pa.array(stays))
    exact = np.all([facts[k][gone] == facts[k][stays] for k in (CONTENT, CONTENT_2)], axis=0)
    columns = [removed["document"], kept["document"], *(removed[name] for name in _NAMES), kept["id"], kept["source"]]
    written = pa.table([*columns, pa.array(near[found]), pa.array(exact, pa.bool_())], schema=_REMOVED)
    feather.write_feather(written, corpus.path("removed", batch))
    return {"candidates": table.num_rows, "compared": int(compared), "capped": int(capped)}


def _end_to_end(sets: Sequence[np.ndarray], large: bool, place: Path) -> np.ndarray:
    """All n-grams as one array, uint64; a large one in a file that is mapped."""
    if not large:
        return np.concatenate(sets)
    with place.open("wb") as file:
        for one in sets:
            file.write(one.tobytes())
    return np.memmap(place, np.uint64, "r")


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
    buckets: Array, bucket_count: int, sets: Array, starts: Array, sizes: Array, threshold: float, most: int, stays: int
) -> tuple[Array, Array, int, int]:
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
