"""Step `dedup`: one of several equal or nearly equal documents stays, in four passes over files.

1. Signatures: a hash of the content and one key for each band of MinHash (LSH), a file for each document file.
2. Buckets: the keys of each band are sorted; documents with the same key are in one bucket, and are candidates.
3. N-grams: the word n-grams of all candidates, a file for each document file.
4. Comparison: from the best candidate to the worst. A document goes if its exact Jaccard similarity to a document that
   stays, and with which it shares a key, reaches the threshold. So every removed document has one that stays this near.

The best of two copies is the one with fewer HTML tags and entities in its text, then with more distinct n-grams, then
of fewer bytes, then with the smaller id. Documents of `dedup.against` come before all others and always stay. The
result depends neither on the executor nor on the order of the files.
"""

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import feather

from affinage.config.data import DedupSettings
from affinage.data.code_points import Array, kernel, text_buffers
from affinage.data.documents import Stats, Verdicts, copy_documents, document_files, first_documents, read_documents
from affinage.data.executor import LOCAL, Executor
from affinage.data.minhash import jaccard, shingle_sets, sign

MAX_COMPARED = 256  # kept documents of one bucket that a document is compared with, the nearest in rank first
REMOVED = "removed.parquet"
_MARKUP = r"</?[a-zA-Z][^<>]*>|&#?\w{2,8};"
_FACTS = ("content", "markup", "bytes")  # the first rows of a signature file; the keys of bands follow
_NAMES = pa.schema([("id", pa.string()), ("source", pa.string()), ("size", pa.int64())])
_BEST_FIRST = [("released", "descending"), ("markup", "ascending"), ("size", "descending")]
_BEST_FIRST += [(name, "ascending") for name in ("bytes", "id", "source", "content", "document")]


def dedup(
    documents_folder: Path,
    folder: Path,
    settings: DedupSettings,
    *,
    against: Path | None = None,
    executor: Executor = LOCAL,
) -> dict[str, Any]:
    """Copy the documents without duplicates to `folder`, write `removed.parquet`, and return the step's summary.

    `against` is a folder of documents that were released before: copies of those are removed as well. Removed documents
    are counted as `exact duplicate` (but for case and white space) or `near duplicate`; `removed.parquet` has the
    document that stays in `duplicate_of`, and their `jaccard`. An interrupted call resumes.
    """
    own, released = document_files(documents_folder), document_files(against) if against is not None else []
    scratch, files = folder / "scratch", [*released, *own]
    removed = find_duplicates(files, settings, scratch, released=len(released), executor=executor)
    numbers, released_documents = removed["document"].to_numpy(), first_documents(released)[-1]

    def duplicates_in(batch: pa.RecordBatch, before: int, stats: Stats) -> Verdicts:
        begin, verdicts = released_documents + before, {}
        start, stop = np.searchsorted(numbers, [begin, begin + batch.num_rows])
        for row in removed.slice(start, stop - start).to_pylist():
            detail = f"Jaccard {row['jaccard']:.3f} to {row['duplicate_of']} of {row['duplicate_of_source']}"
            verdicts[row["document"] - begin] = (f"{'exact' if row['exact'] else 'near'} duplicate", detail)
        return verdicts

    total = copy_documents(documents_folder, folder, duplicates_in, executor)
    order = [(name, "ascending") for name in ("duplicate_of_source", "duplicate_of", "source", "id")]
    removed = removed.sort_by(order).drop_columns(["document", "kept"])
    pq.write_table(removed, folder / REMOVED, compression="zstd")
    shutil.rmtree(scratch)
    return total.summary()


def find_duplicates(
    files: Sequence[Path], settings: DedupSettings, scratch: Path, *, released: int = 0, executor: Executor = LOCAL
) -> pa.Table:
    """Find the duplicates in document files, of which the first `released` were released before.

    Returns a table with a row for each document to remove: its number, its name and that of the one that stays, their
    similarity. Passes leave files in `scratch`.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    starts = first_documents(files)
    tasks = list(zip(range(len(files)), files, starts))
    executor.map(partial(_sign, settings, scratch), tasks, scratch / "sign", threads=True, label="signing")
    candidates, count = np.zeros(starts[-1], bool), 0  # documents that share a bucket; buckets
    for band in range(settings.num_buckets):
        keys = _signatures(scratch, len(files), len(_FACTS) + band)
        order = np.argsort(keys, kind="stable")
        keys, begins = keys[order], np.ones(keys.size + 1, bool)
        begins[1:-1] = keys[1:] != keys[:-1]
        shared = ~(begins[:-1] & begins[1:])  # with a document before or after that has the same key
        numbers = count - 1 + np.cumsum(begins[:-1] & shared)
        buckets = np.full(keys.size, -1, np.int32)  # -1 where a document is alone
        buckets[order[shared]] = numbers[shared]
        np.save(scratch / f"buckets-{band}.npy", buckets)
        candidates |= buckets >= 0
        count = max(count, int(buckets.max(initial=-1)) + 1)
    np.save(scratch / "candidates.npy", candidates)
    executor.map(partial(_gather, settings, scratch), tasks, scratch / "gather", threads=True, label="gathering")
    return _compare(settings, scratch, candidates, count, len(files), starts[released])


def _sign(settings: DedupSettings, scratch: Path, task: tuple[int, Path, int]) -> None:
    """Pass 1: write the signatures of one file, uint64 [3 + bands, documents]."""
    number, path, _ = task
    parts = [np.zeros((len(_FACTS) + settings.num_buckets, 0), np.uint64)]
    for batch in read_documents(path, ["text"]):
        text = batch.column("text")
        content, keys = sign(text, settings.n_grams, settings.num_buckets, settings.hashes_per_bucket)
        markup = pc.count_substring_regex(text, _MARKUP).to_numpy()
        parts.append(np.vstack([content, markup, np.diff(text_buffers(text)[1]), keys]).astype(np.uint64))
    np.save(scratch / f"signatures-{number}.npy", np.concatenate(parts, axis=1))


def _signatures(scratch: Path, files: int, row: int) -> np.ndarray:
    """One row of the signatures, uint64 [documents of all files]."""
    return np.concatenate([np.load(scratch / f"signatures-{k}.npy", mmap_mode="r")[row] for k in range(files)])


def _gather(settings: DedupSettings, scratch: Path, task: tuple[int, Path, int]) -> None:
    """Pass 3: write the names of the candidates of one file, how many n-grams each has, and these end to end."""
    number, path, start = task
    candidates, names = np.load(scratch / "candidates.npy", mmap_mode="r"), [_NAMES.empty_table()]
    with (scratch / f"sets-{number}").open("wb") as sets:
        for batch in read_documents(path, ["id", "source", "text"]):
            batch, start = batch.filter(pa.array(candidates[start : start + len(batch)])), start + len(batch)
            own_sets, sizes = shingle_sets(batch["text"], settings.n_grams)
            own_sets.tofile(sets)
            # Released documents may be without names.
            own = {name: batch[name] if name in batch.schema.names else [""] * len(batch) for name in ("id", "source")}
            names.append(pa.table(own | {"size": sizes}, _NAMES))
    feather.write_feather(pa.concat_tables(names), scratch / f"candidates-{number}", compression="uncompressed")


def _compare(
    settings: DedupSettings, scratch: Path, candidates: np.ndarray, bucket_count: int, files: int, released: int
) -> pa.Table:
    """Pass 4: the table of the removed documents. N-grams stay in a mapped file.

    The first `released` documents were released before.
    """
    tables = []
    with (scratch / "sets").open("wb") as joined:
        for number in range(files):
            tables.append(feather.read_table(scratch / f"candidates-{number}"))
            joined.write((scratch / f"sets-{number}").read_bytes())
        joined.write(bytes(8))  # an empty file cannot be mapped
    names, documents = pa.concat_tables(tables), np.flatnonzero(candidates)
    facts = {name: _signatures(scratch, files, row)[candidates] for row, name in enumerate(_FACTS)}
    facts |= {"document": documents, "released": documents < released}
    table = pa.table(dict(zip(names.column_names, names.columns)) | facts)
    starts = np.append(0, np.cumsum(table["size"].to_numpy()))
    order = pc.sort_indices(table, _BEST_FIRST).to_numpy()
    table, starts, documents = table.take(order), starts[order], documents[order]
    buckets = np.empty((len(table), settings.num_buckets), np.int32)
    for band in range(settings.num_buckets):
        buckets[:, band] = np.load(scratch / f"buckets-{band}.npy", mmap_mode="r")[documents]
    n_grams, stays = np.memmap(scratch / "sets", np.uint64, "r"), int(facts["released"].sum())
    sizes = table["size"].to_numpy()
    match, similarity = _match(buckets, bucket_count, n_grams, starts, sizes, settings.threshold, stays)
    copies = np.flatnonzero(match >= 0)
    gone, kept = table.take(pa.array(copies)), table.take(pa.array(match[copies]))
    removed = {
        "document": gone["document"],
        "kept": kept["document"],
        "id": gone["id"],
        "source": gone["source"],
        "duplicate_of": kept["id"],
        "duplicate_of_source": kept["source"],
        "jaccard": similarity[copies],
        "exact": pc.equal(gone["content"], kept["content"]),
    }
    return pa.table(removed).sort_by("document")


@kernel
def _match(
    buckets: Array, bucket_count: int, sets: Array, starts: Array, sizes: Array, threshold: float, stays: int
) -> tuple[Array, Array]:
    """From the first document to the last: the kept one it is a copy of, or -1; their similarity.

    The first `stays` documents are kept whatever they are. Another is compared with the kept ones of its buckets, the
    latest first: they are the nearest in rank, and one with less than `threshold` times as many n-grams cannot be a
    copy. The kept documents of a bucket form a linked list (`head`, `link`).
    """
    texts, bands = buckets.shape
    match, similarity = np.full(texts, -1, np.int64), np.zeros(texts)
    head, link = np.full(bucket_count, -1, np.int32), np.full((texts, bands), -1, np.int32)
    last_compared = np.full(texts, -1, np.int32)  # the document that a kept one was last compared with
    for text in range(texts):
        mine = sets[starts[text] : starts[text] + sizes[text]]
        for band in range(bands if text >= stays else 0):
            other = head[buckets[text, band]] if buckets[text, band] >= 0 else -1
            steps = 0
            while other >= 0 and match[text] < 0 and steps < MAX_COMPARED:
                small, large = min(sizes[text], sizes[other]), max(sizes[text], sizes[other])
                if last_compared[other] != text and small >= threshold * large:
                    last_compared[other] = text
                    near = jaccard(mine, sets[starts[other] : starts[other] + sizes[other]], threshold)
                    if near >= 0:
                        match[text], similarity[text] = other, near
                steps += 1
                other = link[other, band]
            if match[text] >= 0:
                break
        if match[text] < 0:
            for band in range(bands):
                if buckets[text, band] >= 0:
                    link[text, band] = head[buckets[text, band]]
                    head[buckets[text, band]] = text
    return match, similarity
